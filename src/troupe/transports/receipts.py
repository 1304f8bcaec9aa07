"""What a receiver counts about the messages it is given: delivered, duplicated, stale, lost, corrupted."""

from __future__ import annotations

from dataclasses import dataclass, field

from troupe.types import Message


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
    last_damage: str = ""  # what was wrong with the newest of those frames
    _newest: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)  # sender -> incarnation, sequence

    def accept(self, message: Message, size: int) -> bool:
        """Count `message` of `size` bytes; whether it is to be delivered."""
        incarnation, sequence = self._newest.get(message.sender, (-1, 0))
        if message.incarnation < incarnation:
            self.stale += 1
            return False
        if message.incarnation > incarnation:
            sequence = 0
        if message.sequence:
            if message.sequence <= sequence:
                self.duplicates += 1
                return False
            self.lost += message.sequence - sequence - 1
        self._newest[message.sender] = (message.incarnation, message.sequence or sequence)
        self.messages += 1
        self.bytes += size
        return True
