"""Mailboxes over RabbitMQ, for workers on any machine: a bounded data queue up, the newest weights down.

This is the learner's side; a worker's is in rabbit_worker.py, what a run has on the broker in office.py, the thread
that talks to it in wire.py. A message is acknowledged when its receiver asks for the next one, since it was merged by
then: whoever is killed before that, another gets it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from troupe.errors import BadMessage, PeerLost, UserError
from troupe.transports.amqp import Address, Locked
from troupe.transports.codec import MAX_MESSAGE_BYTES
from troupe.transports.intake import Intake, why_not
from troupe.transports.lanes import Lane, Parcel
from troupe.transports.office import DESK, DONE, EVERYBODY, HELLO, LEARNERS, QUESTION, REPLY_TO, Office, checked, unseal
from troupe.transports.rabbit_worker import LinkSpec, RabbitMailbox
from troupe.transports.topology import Binding, Consumer, Delivery, Exchange, Queue, Topology
from troupe.transports.tries import Tries
from troupe.transports.wire import Wire
from troupe.types import Message

__all__ = ["Address", "Depth", "HubMailbox", "LinkSpec", "RabbitHub", "RabbitMailbox"]

_REQUESTS: Final = 64  # questions, or frames on their way to the dead letters, that are kept at most
_HELLOS: Final = 256
_FLUSH_S: Final = 2.0
_COUNT_AGE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Depth:
    """How far the learner is behind: `ready` + all learners' `unacknowledged` never exceed `bound`."""

    ready: int  # messages in the data queue
    unacknowledged: int  # that this learner was given and has not finished
    bound: int  # max_length + prefetch x learners


class RabbitHub:
    """Made by the learner: the run's objects on the broker, and a mailbox of its own.

    At most one learner leads a run; others may share it, that is race for its data and publish under their own names.
    `topics` are what may be published, with the bytes of the largest message of each. `tries` is the file that tells
    the next process which messages this one may have died of. `timeout_s` is how long a broker that is not there is
    waited for.
    """

    def __init__(
        self,
        address: Address,
        run: str,
        *,
        name: str = "learner",
        topics: Mapping[str, int] | None = None,
        mode: str = "lossless",
        max_length: int = 64,
        max_length_bytes: int = 1 << 28,
        prefetch: int = 4,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        share: bool = False,
        tries: Path | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self.name, self.topics = checked(name, "learner"), dict(topics or {})
        self.office = Office(run, mode, max_length, max_length_bytes, prefetch, max_message_bytes)
        self._share, self._slot = share, 0
        self._private: set[str] = set()  # queues of the workers that were connected
        self._asked: deque[Message] = deque(maxlen=_REQUESTS)
        self._answers = Lane(window=8)
        self._wire = Wire(
            address, f"troupe {run} {name}", publishing=self._publishing, consuming=self._consuming,
            on_up=self._came_up, on_locked=self._locked_out,
        )  # fmt: skip
        self._mailbox = HubMailbox(self.name, self.office, self.topics, self._wire, Tries(tries))
        try:
            self._wire.start(timeout_s)
        except Locked:
            what = f"{LEARNERS} learners share it" if share else "another learner leads it"
            raise UserError(
                f"{address}: the run {run!r} is taken, {what}: stop that one, choose another run id, or share its queue"
            ) from None

    @property
    def blocked(self) -> bool:
        """Blocked by broker: it is short of memory or disk, and takes nothing that is published until it is not."""
        return self._wire.blocked

    @property
    def trouble(self) -> str:
        """Why nothing goes through at present, in a sentence; empty where all is well."""
        return self._wire.trouble()

    def mailbox(self) -> HubMailbox:
        """The one mailbox of this side; for one thread."""
        return self._mailbox

    def connect(self, name: str) -> LinkSpec:
        """The link to the worker `name`: a new one, or that of its former incarnation with all that waits in it."""
        queue = self.office.private_queue(checked(name, "worker"))
        self._private.add(name)
        self._wire.declare([queue])
        return LinkSpec(name=name, hub=self.name, topics=list(self.topics), office=asdict(self.office))

    def requests(self, timeout_s: float) -> Message | None:
        """What a machine asked next; None after `timeout_s`."""
        return self._asked.popleft() if self._wire.wait(lambda: bool(self._asked), timeout_s) else None

    def answer(self, request: Message, reply: Message) -> None:
        """Send `reply` to whoever made `request`; whether they still wait is theirs to know."""
        frame, headers = self.office.seal(reply)
        headers[QUESTION] = request.meta[QUESTION]
        self._wire.post(self._answers, Parcel(frame, key=str(request.meta[REPLY_TO]), headers=headers, kept=False))

    def depth(self) -> Depth:
        """The figures for balancing, at most about a second old; cheap."""
        ready, consumers = self._wire.count(self.office.data_queue().name, _COUNT_AGE_S)
        bound = self.office.max_length + self.office.prefetch * max(1, consumers)
        return Depth(ready, self._mailbox.unacknowledged, bound)

    def stop(self) -> None:
        """Tell every worker, now and later, to stop."""
        self._mailbox.finish()

    def close(self, *, keep: bool = False) -> None:
        """Leave, and delete what the run has on the broker unless another learner shares it; dead letters stay.

        With `keep` all of it stays, for whoever leads the run next: also what was given to us and is not finished.
        """
        if self._wire.up and not self._wire.blocked:
            self._wire.flush(_FLUSH_S)
        if self._wire.up and not self._wire.blocked and not keep:
            dead = self.office.dead_queue().name
            private = [self.office.private_queue(name).name for name in list(self._private)]
            self._wire.delete_unused([self.office.data_queue().name, dead, *private], _FLUSH_S, unless_filled=dead)
        self._wire.close()

    def _publishing(self) -> Topology:
        return [
            *(Exchange(exchange) for _, _, exchange in self.office.models((*self.topics, DONE))),
            *(self.office.private_queue(name) for name in list(self._private)),
        ]

    def _consuming(self) -> Topology:
        office = self.office
        mine = f".{self._slot}" if self._slot else ""
        lead = Queue(office.name(f"lead{mine}"), ours=True, arguments={"x-max-length": 0})
        meta, ask_all = office.meta_queue(office.name(f"meta{mine}")), Exchange(office.name("meta"))
        yield lead  # first of all: who does not get it touches nothing else
        for _, _, exchange in office.models((*self.topics, DONE)):
            yield from (Exchange(exchange), Binding(lead.name, exchange))  # which keeps it while there is no worker
        yield from (ask_all, meta, Binding(meta.name, ask_all.name))
        if not self._slot:
            yield from (Exchange(EVERYBODY, kept=True), Binding(meta.name, EVERYBODY))
        yield from (office.data_queue(), office.dead_queue())
        yield Consumer(meta.name, 16, self._hear)
        yield Consumer(office.data_queue().name, office.prefetch, self._mailbox.intake.take)

    def _came_up(self) -> None:
        """In the wire's thread: who connected to the broker before us missed what we published last."""
        self._mailbox.slot, self._slot = self._slot, 0  # the lead is tried for first, should the connection be lost
        self._mailbox.republish()
        self.depth()

    def _locked_out(self) -> bool:
        """In the wire's thread: another learner has that slot; whether there is another to try."""
        self._slot = (self._slot + 1) % LEARNERS if self._share else 0
        return self._slot > 0

    def _hear(self, delivery: Delivery) -> None:
        """In the wire's thread: somebody asks."""
        self._wire.settle(delivery)
        try:
            message = unseal(delivery, self.office.max_message_bytes)
        except BadMessage as error:
            self._mailbox.damaged.append(str(error))
            return
        if message.kind == HELLO and message.run == self.office.run:
            self._mailbox.greet(message)
        elif message.kind != HELLO and delivery.reply_to.startswith(DESK):
            question = str(delivery.headers.get(QUESTION, ""))
            with self._wire.condition:
                self._asked.append(
                    replace(message, meta={**message.meta, REPLY_TO: delivery.reply_to, QUESTION: question})
                )
                self._wire.condition.notify_all()


class HubMailbox:
    """The `ports.Mailbox` of a learner."""

    def __init__(self, name: str, office: Office, topics: Mapping[str, int], wire: Wire, tries: Tries) -> None:
        self.name = name
        self.intake = Intake(office, self._bury, tries)
        self.intake.wire = wire
        self.receipts = self.intake.receipts
        self.damaged: deque[str] = deque(maxlen=_REQUESTS)  # what the wire's thread found, until it is counted
        self._office, self._topics, self._wire = office, topics, wire
        self.slot = 0  # among the learners of the run
        self._life, self._edition = secrets.token_hex(8), 0
        self._newest: dict[str, tuple[bytes, dict[str, Any]]] = {}  # topic -> frame, headers
        self._lanes = {topic: Lane() for topic in (*topics, DONE)}
        self._private_lanes: dict[str, Lane] = {}
        self._hellos, self._dead = Lane(window=8), Lane(window=8)

    @property
    def unacknowledged(self) -> int:
        """Messages that were delivered to this process and are not done with."""
        return len(self.intake)

    def send(self, to: str, message: Message, timeout_s: float) -> None:
        """Blocks until the queue of `to` took it, or PeerLost after `timeout_s`."""
        frame, headers = self._office.seal(message)
        lane = self._private_lanes.setdefault(to, Lane(patient=False))
        parcel = Parcel(frame, key=self._office.private_queue(to).name, headers=headers, mandatory=True)
        self._wire.post(lane, parcel)
        if not self._wire.wait(lambda: bool(parcel.outcome), timeout_s):
            self._wire.withdraw(lane, parcel)
            raise PeerLost(why_not(to, lane, self._wire, timeout_s))
        if parcel.outcome == "nobody":
            raise PeerLost(f"{to}: no worker of that name is connected to run {self._office.run!r}")

    def receive(self, timeout_s: float) -> Message | None:
        """The next message of any worker; the one before it is acknowledged by this."""
        self._count_damage()
        return self.intake.receive(timeout_s, self._wire.wait)

    def publish(self, topic: str, message: Message) -> None:
        """Replace what `topic` holds. Never blocks: what is not on its way yet is replaced too."""
        if topic not in self._topics:
            raise BadMessage(f"topic {topic!r} was not declared; there are {sorted(self._topics)}")
        frame, headers = replace(self._office, max_message_bytes=self._topics[topic]).seal(message)
        self._put(topic, frame, headers)

    def finish(self) -> None:
        """Publish that the run is over."""
        self._put(DONE, *self._office.seal(Message(DONE, self._office.run, self.name)))

    def latest(self, topic: str) -> Message | None:
        """Only learners publish, and this one knows what it published: nothing is news here."""
        if topic not in self._topics:
            raise BadMessage(f"topic {topic!r} was not declared; there are {sorted(self._topics)}")
        return None

    def wait_latest(self, topic: str, timeout_s: float) -> Message | None:
        """`latest`: there is nothing to wait for here."""
        return self.latest(topic)

    def close(self) -> None:
        """The connections are the hub's: `RabbitHub.close` ends them."""

    def republish(self) -> None:
        """Every topic's newest once more; whoever has it already knows by its edition."""
        for topic in list(self._newest):
            self._post(topic)

    def greet(self, hello: Message) -> None:
        """The newest of each topic to one worker: topic and slot -> its queue is what the hello says."""
        for topic, (frame, headers) in list(self._newest.items()):
            slot = 0 if topic == DONE else self.slot
            queue = str(hello.meta.get(f"{topic}/{slot}", ""))
            if queue.startswith(f"{self._office.model(topic, slot)}.") and len(self._hellos) < _HELLOS:
                self._wire.post(self._hellos, Parcel(frame, key=queue, headers=headers, kept=False))

    def _put(self, topic: str, frame: bytes, headers: dict[str, Any]) -> None:
        self._edition += 1
        self._newest[topic] = frame, {**headers, "life": self._life, "edition": self._edition}
        self._post(topic)

    def _post(self, topic: str) -> None:
        frame, headers = self._newest[topic]
        exchange = self._office.model(topic, 0 if topic == DONE else self.slot)
        self._wire.post(self._lanes[topic], Parcel(frame, exchange, headers=headers, kept=False), instead=True)

    def _bury(self, delivery: Delivery, why: str) -> None:
        if len(self._dead) < _REQUESTS:
            self._wire.post(self._dead, Parcel(delivery.body, key=self._office.dead_queue().name, headers={"why": why}))

    def _count_damage(self) -> None:
        while self.damaged:
            self.receipts.corrupted += 1
            self.receipts.last_damage = self.damaged.popleft()
