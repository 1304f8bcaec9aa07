"""What a receiver counts about the messages it is given: delivered, duplicated, stale, lost, corrupted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from troupe.types import Message

_COUNTS: Final = ("messages", "bytes", "duplicates", "stale", "lost", "corrupted", "poisoned")
_GAPS: Final = 1024  # numbers of a sender that are remembered as missing


@dataclass(slots=True)
class Receipts:
    """Counters of one receiving mailbox, and the memory that tells a duplicate from a message.

    A sender numbers its messages to this receiver from 1 and starts again at 1 in its next incarnation. Sequence 0
    means "not numbered": such a message is delivered and only counted.
    """

    messages: int = 0  # delivered
    bytes: int = 0  # of their frames
    duplicates: int = 0  # (sender, incarnation, sequence) seen before: not delivered
    stale: int = 0  # of an incarnation older than the newest seen: not delivered
    lost: int = 0  # gaps in the sequence of an incarnation
    corrupted: int = 0  # records or frames that were damaged: not delivered
    poisoned: int = 0  # that ended every process they were given to: not delivered again
    last_damage: str = ""  # what was wrong with the newest of those frames
    _newest: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)  # sender -> incarnation, sequence
    _gaps: dict[str, set[int]] = field(default_factory=dict, repr=False)  # sender -> numbers that did not come

    def accept(self, message: Message, size: int, *, redelivered: bool = False) -> bool:
        """Count `message` of `size` bytes; whether it is to be delivered.

        `redelivered`: another receiver had it before and did not finish. It then may fill a gap.
        """
        incarnation, sequence = self._newest.get(message.sender, (-1, 0))
        if message.incarnation < incarnation:
            self.stale += 1
            return False
        if message.incarnation > incarnation:
            sequence = 0
            self._gaps.pop(message.sender, None)
        if message.sequence:
            if message.sequence <= sequence:
                if not (redelivered and self._fills_gap(message)):
                    self.duplicates += 1
                    return False
            else:
                self._miss(message.sender, sequence + 1, message.sequence)
                sequence = message.sequence
        self._newest[message.sender] = (message.incarnation, sequence)
        self.messages += 1
        self.bytes += size
        return True

    def poison(self, size: int, why: str) -> None:
        """The message of `size` bytes that was accepted last is not delivered after all."""
        self.messages -= 1
        self.bytes -= size
        self.poisoned += 1
        self.last_damage = why

    def state(self) -> dict[str, Any]:
        """All of it, for a checkpoint: what is merged after it and not saved will show as lost."""
        return {
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "newest": {sender: list(newest) for sender, newest in self._newest.items()},
            "gaps": {sender: sorted(gaps) for sender, gaps in self._gaps.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on counting where `state` was taken."""
        for name in _COUNTS:
            setattr(self, name, int(state["counts"].get(name, 0)))
        self._newest = {sender: (int(life), int(number)) for sender, (life, number) in state["newest"].items()}
        self._gaps = {sender: set(gaps) for sender, gaps in state["gaps"].items()}

    def _miss(self, sender: str, first: int, end: int) -> None:
        if first == end:
            return
        self.lost += end - first
        gaps = self._gaps.setdefault(sender, set())
        gaps.update(range(max(first, end - _GAPS), end))
        if len(gaps) > _GAPS:
            self._gaps[sender] = set(sorted(gaps)[-_GAPS:])

    def _fills_gap(self, message: Message) -> bool:
        gaps = self._gaps.get(message.sender, set())
        if message.sequence not in gaps:
            return False
        gaps.remove(message.sequence)
        self.lost -= 1
        return True
