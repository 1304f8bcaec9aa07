"""The mailbox of a worker over RabbitMQ, on whatever machine: experience to the data queue, the newest weights back."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypedDict

from troupe.errors import BadMessage, PeerLost
from troupe.transports.amqp import Address
from troupe.transports.intake import Intake, why_not
from troupe.transports.lanes import Lane, Parcel
from troupe.transports.office import DONE, HELLO, Office, checked, edition
from troupe.transports.topology import Binding, Consumer, Delivery, Exchange, Queue, Topology
from troupe.transports.wire import Wire
from troupe.types import Message

_BACKLOG: Final = {"lossless": (4, 1), "fresh": (8, 8)}  # messages held here, and of those unconfirmed: see lanes.Lane
_DAMAGED: Final = 64
_FLUSH_S: Final = 2.0


class LinkSpec(TypedDict):
    """What a worker must know besides the broker's address, which is not in here since it holds the password; JSON."""

    name: str
    hub: str
    topics: list[str]
    office: dict[str, Any]


class RabbitMailbox:
    """The `ports.Mailbox` of a worker; for one thread.

    `on_wait` is called at least every 0.1 s while a call here waits: hand it `Pulse.touch`, so that a worker held up
    by a slow learner is not taken for a hung one. Waits end early when the hub says stop. A broker that goes away is
    waited for without end; `timeout_s` is for one that is not there at the start.
    """

    def __init__(
        self,
        spec: LinkSpec,
        address: Address,
        on_wait: Callable[[], None] = lambda: None,
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self.name, self.hub = checked(spec["name"], "worker"), spec["hub"]
        self.office = Office(**spec["office"])
        self.stopping = False  # the hub asked everybody to stop
        self._on_wait = on_wait
        self._topics = {topic: _Board() for topic in (*spec["topics"], DONE)}
        self._queues: dict[str, str] = {}  # topic and slot -> our queue, another one for each connection
        self._damaged: deque[str] = deque(maxlen=_DAMAGED)
        self._backlog, window = _BACKLOG[self.office.mode]
        self._data, self._hello = Lane(window), Lane()
        self._intake = Intake(self.office)
        self.receipts = self._intake.receipts
        self._wire = Wire(
            address, f"troupe {self.office.run} {self.name}", publishing=self._publishing, consuming=self._consuming,
            on_up=self._say_hello,
        )  # fmt: skip
        self._intake.wire = self._wire
        self._wire.start(timeout_s)

    @property
    def blocked(self) -> bool:
        """Blocked by broker: it is short of memory or disk, and takes nothing that is published until it is not."""
        return self._wire.blocked

    @property
    def trouble(self) -> str:
        """Why nothing goes through at present, in a sentence; empty where all is well."""
        return self._wire.trouble()

    def send(self, to: str, message: Message, timeout_s: float) -> None:
        """Blocks while the data queue is full and a few wait here already; PeerLost after `timeout_s`."""
        if to != self.hub:
            raise PeerLost(f"{to}: {self.name} has a link to {self.hub!r} only")
        frame, headers = self.office.seal(message)
        if not self._wait(lambda: len(self._data) < self._backlog, timeout_s):
            why = f"{to}: the run is stopping" if self.stopping else why_not(to, self._data, self._wire, timeout_s)
            raise PeerLost(why)
        parcel = Parcel(frame, key=self.office.data_queue().name, headers=headers, mandatory=True)
        self._wire.post(self._data, parcel)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message the hub sent to this worker; the one before it is acknowledged by this."""
        return self._intake.receive(timeout_s, self._wait)

    def publish(self, topic: str, message: Message) -> None:
        """Refused: only learners write to a topic."""
        raise BadMessage(f"{self.name} may not publish {topic!r}: only {self.hub!r} does; send it a message instead")

    def latest(self, topic: str) -> Message | None:
        """The newest message of `topic` not returned yet; where several learners publish, of each in turn."""
        while self._damaged:
            self.receipts.corrupted += 1
            self.receipts.last_damage = self._damaged.popleft()
        if topic not in self._topics or topic == DONE:
            raise BadMessage(f"topic {topic!r} was not declared; there are {sorted(set(self._topics) - {DONE})}")
        with self._wire.condition:
            return self._topics[topic].pop()

    def wait_latest(self, topic: str, timeout_s: float) -> Message | None:
        """`latest`, waited for: None after `timeout_s`."""
        message = self.latest(topic)
        if message is None and self._wait(lambda: bool(self._topics[topic].fresh), timeout_s):
            message = self.latest(topic)
        return message

    def flush(self, timeout_s: float) -> bool:
        """Until the broker has confirmed all that was sent; whether it did."""
        return self._wire.flush(timeout_s, self._on_wait)

    def close(self) -> None:
        """Hand over what was sent, if that can be done soon, and leave."""
        if self._wire.up and not self.stopping:
            self.flush(_FLUSH_S)
        self._wire.close()

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        return self._wire.wait(done, timeout_s, self._on_wait, lambda: self.stopping)

    def _publishing(self) -> Topology:
        return [Exchange(self.office.name("meta"))]

    def _consuming(self) -> Topology:
        for topic, slot, exchange in self.office.models(self._topics):
            queue = f"{exchange}.{self.name}.{secrets.token_hex(4)}"
            self._queues[f"{topic}/{slot}"] = queue
            yield from (Exchange(exchange), Queue(queue, ours=True, arguments={"x-max-length": 1}))
            yield from (Binding(queue, exchange), Consumer(queue, 1, partial(self._news, topic)))
        private = self.office.private_queue(self.name)
        yield from (private, Consumer(private.name, 4, self._intake.take))

    def _say_hello(self) -> None:
        """In the wire's thread: what was published before we came is asked for; a learner that comes later tells."""
        hello = Message(HELLO, self.office.run, self.name, meta=dict(self._queues))
        frame, headers = self.office.seal(hello)
        parcel = Parcel(frame, exchange=self.office.name("meta"), headers=headers, kept=False)
        self._wire.post(self._hello, parcel, instead=True)

    def _news(self, topic: str, delivery: Delivery) -> None:
        """In the wire's thread: something was published."""
        self._wire.settle(delivery)
        try:
            message = self.office.unseal(delivery)
        except BadMessage as error:
            self._damaged.append(str(error))
            return
        with self._wire.condition:
            if self._topics[topic].put(message, *edition(delivery)) and topic == DONE:
                self.stopping = True
            self._wire.condition.notify_all()


class _Board:
    """The newest message of a topic, of each of its publishers."""

    def __init__(self) -> None:
        self.fresh: dict[str, Message] = {}  # publisher -> what was not read yet; whoever waits longest comes first
        self._seen: dict[str, tuple[str, int]] = {}  # publisher -> its life, the edition of its newest

    def put(self, message: Message, life: str, number: int) -> bool:
        """Keep `message`, unless this or a newer one was here."""
        seen = self._seen.get(message.sender)
        if seen is not None and seen[0] == life and number <= seen[1]:
            return False
        self._seen[message.sender] = life, number
        self.fresh[message.sender] = message
        return True

    def pop(self) -> Message | None:
        return self.fresh.pop(next(iter(self.fresh))) if self.fresh else None
