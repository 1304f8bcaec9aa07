"""Front of house: the broker that a run's experience comes over, and the machines that come and go beyond it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from troupe.addresses import find
from troupe.balance import Balance
from troupe.config import Config
from troupe.errors import ConfigError, PeerLost
from troupe.guests import Guests
from troupe.ports import Mailbox
from troupe.task import Task
from troupe.transports.amqp import Address
from troupe.transports.codec import MAX_MESSAGE_BYTES
from troupe.transports.rabbitmq import RabbitHub
from troupe.types import Json, Pace, State

_GUESTS_BYTES: Final = 60 * 1024  # of a publication, which says of every worker how far it was heard


@dataclass(frozen=True)
class BrokerLink:
    """What a worker of this machine is handed."""

    spec: Mapping[str, Any]
    fds: tuple[int, ...] = ()


class Front:
    """A `cast.Hub` over RabbitMQ; whoever answers for the run there besides, a turn at a time."""

    def __init__(
        self, config: Config, run: str, topics: Mapping[str, int], most_bytes: int, tries: Path, state: State | None
    ) -> None:
        """`most_bytes`: of one message of experience. `tries`: see transports/tries.py. `state`: of an earlier life."""
        if most_bytes > MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"a message of this run may take {most_bytes >> 20} MiB, where {MAX_MESSAGE_BYTES >> 20} go over a "
                f"broker: give fewer --envs than {config.envs}, more --workers, or shorter --rollout-steps"
            )
        self._address = find(config.via)  # password and all: for this machine's workers, and never shown
        try:
            self.hub = RabbitHub(
                Address.parse(self._address), run, name=config.name if config.share else "learner",
                topics={topic: size + _GUESTS_BYTES for topic, size in topics.items()},
                mode=config.delivery, max_length=config.queue, share=bool(config.share), tries=tries,
            )  # fmt: skip
        except PeerLost as e:  # nothing has begun, so nothing is left behind
            raise ConfigError(str(e)) from e
        if state is not None:
            self.hub.mailbox().receipts.restore(state.values)
        self._balance = Balance(self.hub.depth)
        self._guests: Guests | None = None
        self.failed = False  # the run ends by an exception
        self._blocked, self._poisoned = False, self.hub.mailbox().receipts.poisoned

    def mailbox(self) -> Mailbox:
        """Where experience arrives."""
        return self.hub.mailbox()

    def connect(self, name: str) -> BrokerLink:
        """For a worker of this machine."""
        self.hub.connect(name)  # with a queue of its own from now on
        return BrokerLink({**self.link(), "broker": self._address, "name": name})

    def link(self) -> dict[str, Json]:
        """For a worker of another one, which knows the broker's address and gives itself a name."""
        return {"hub": "learner", "topics": list(self.hub.topics), "office": asdict(self.hub.office)}

    def invite(self, task: Task, first_rank: int, write: Callable[..., None], say: Callable[[str], None]) -> None:
        """Whoever asks from now on is told what to play."""
        self._guests, self._say = Guests(self.hub, task, first_rank, write, say), say

    def attend(self) -> None:
        """Answer what was asked, and say where the broker is in trouble."""
        if self._guests:
            self._guests.attend()
        if self.hub.blocked != self._blocked:
            self._blocked = self.hub.blocked
            self._say("blocked by broker: it is short of memory or disk" if self._blocked else "broker goes on")
        receipts = self.hub.mailbox().receipts
        if receipts.poisoned > self._poisoned:
            self._poisoned = receipts.poisoned
            self._say(f"put aside in {self.hub.office.dead_queue().name}: {receipts.last_damage}")

    def figures(self) -> dict[str, Any]:
        """For the journal: the queue and its bound, what was lost on the way, who plays elsewhere."""
        depth, receipts, pace = self.hub.depth(), self.hub.mailbox().receipts, self.pace()
        return {
            "ready": depth.ready, "unacknowledged": depth.unacknowledged, "bound": depth.bound,
            "messages": receipts.messages, "duplicates": receipts.duplicates, "lost": receipts.lost,
            "stale": receipts.stale, "corrupted": receipts.corrupted, "poisoned": receipts.poisoned,
            "trouble": self.hub.trouble, "rest_s": pace.rest_s, "rollouts": pace.rollouts,
            "machines": dict(self._guests.playing) if self._guests else {},
        }  # fmt: skip

    def state(self) -> State:
        """What was received, for a checkpoint."""
        return State({}, self.hub.mailbox().receipts.state())

    def pace(self) -> Pace:
        """How much workers shall generate, so that as many messages wait here as are of use."""
        return self._balance.pace()

    def stop(self) -> None:
        """Tell every worker, wherever it is, that the run is over."""
        self.hub.stop()

    def close(self) -> None:
        """Leave the broker. Where the run failed, what waits there is for its next life."""
        self.hub.close(keep=self.failed and self.hub.mailbox().receipts.messages > 0)
