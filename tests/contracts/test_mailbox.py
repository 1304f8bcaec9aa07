"""What every mailbox promises, whatever carries the messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest

from rabbit import wait_for
from troupe.errors import BadMessage, PeerLost
from troupe.transports.amqp import Address
from troupe.transports.memory import MemoryHub
from troupe.transports.rabbitmq import RabbitHub, RabbitMailbox
from troupe.transports.receipts import Receipts
from troupe.transports.shared import SharedHub, SharedMailbox
from troupe.types import Message


class Box(Protocol):
    """A `ports.Mailbox` that can wait for a topic and counts."""

    receipts: Receipts

    def send(self, to: str, message: Message, timeout_s: float) -> None: ...
    def receive(self, timeout_s: float) -> Message | None: ...
    def publish(self, topic: str, message: Message) -> None: ...
    def latest(self, topic: str) -> Message | None: ...
    def wait_latest(self, topic: str, timeout_s: float) -> Message | None: ...
    def close(self) -> None: ...


@dataclass
class Office:
    """A learner and two workers, connected."""

    learner: HubSide
    workers: list[Box]
    waits: bool  # a full receiver is waited for
    held: int = 0  # messages that a receiver was given and that count as waiting until it asks for the next
    patience_s: float = 0.0  # a message takes that long from one to the other at most
    arrived: Callable[[str, int], None] = lambda topic, sequence: None  # every worker could read it


class HubSide(Protocol):
    """The learner's side of an office."""

    receipts: Receipts

    def send(self, to: str, message: Message, timeout_s: float) -> None: ...
    def receive(self, timeout_s: float) -> Message | None: ...
    def publish(self, topic: str, message: Message) -> None: ...
    def latest(self, topic: str) -> Message | None: ...


NAMES = ("worker-0", "worker-1")
TOPICS = {"weights": 1 << 16, "status": 1 << 10}
LARGE = 1 << 21  # bytes: more than any receiver of the office can hold


def memory_office(request: pytest.FixtureRequest) -> Iterator[Office]:
    hub = MemoryHub(capacity=32, max_message_bytes=1 << 20)
    learner, *workers = (hub.mailbox(name) for name in ("learner", *NAMES))
    yield Office(learner, [*workers], waits=False)
    for box in (learner, *workers):
        box.close()


def shared_office(request: pytest.FixtureRequest) -> Iterator[Office]:
    hub = SharedHub(1 << 18, TOPICS, down_bytes=1 << 16)
    workers = [child(hub, name) for name in NAMES]
    yield Office(hub.mailbox(), [*workers], waits=True)
    for box in workers:
        box.close()
    hub.close()


def child(hub: SharedHub, name: str) -> SharedMailbox:
    connection = hub.connect(name)
    return SharedMailbox(connection.spec, [os.dup(fd) for fd in connection.fds])


def rabbit_office(request: pytest.FixtureRequest) -> Iterator[Office]:
    """Always the same run: what one test left on the broker would be seen by the next."""
    address = Address.parse(request.getfixturevalue("node").address)
    hub = RabbitHub(address, "run", topics=TOPICS, max_length=16, max_message_bytes=1 << 20)
    workers = [RabbitMailbox(hub.connect(name), address) for name in NAMES]

    def arrived(topic: str, sequence: int) -> None:
        boards = [worker._topics[topic] for worker in workers]
        wait_for(lambda: all([m.sequence for m in board.fresh.values()] == [sequence] for board in boards))

    yield Office(hub.mailbox(), [*workers], waits=True, held=1, patience_s=0.3, arrived=arrived)
    for box in workers:
        box.close()
    hub.close()


OFFICES: dict[str, Callable[[pytest.FixtureRequest], Iterator[Office]]] = {
    "memory": memory_office,
    "shared": shared_office,
    "rabbitmq": rabbit_office,
}


@pytest.fixture(params=OFFICES)
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    yield from OFFICES[request.param](request)


def message(sequence: int = 0, sender: str = "worker-0", incarnation: int = 0, size: int = 8) -> Message:
    data = np.full(size, sequence % 251, np.uint8)
    return Message("rollout", "run", sender, incarnation, sequence, version=3, meta={"x": 1.5}, arrays={"data": data})


def drain(office: Office) -> list[Message]:
    got = []
    while (one := office.learner.receive(office.patience_s)) is not None:
        got.append(one)
    return got


def test_a_message_arrives_as_it_was_sent(office: Office) -> None:
    sent = message(1)
    office.workers[0].send("learner", sent, 1.0)
    got = office.learner.receive(1.0)
    assert got is not None
    assert (got.kind, got.run, got.sender, got.sequence, got.version) == ("rollout", "run", "worker-0", 1, 3)
    assert got.meta == {"x": 1.5}
    assert np.array_equal(got.arrays["data"], sent.arrays["data"])
    got.arrays["data"][0] = 9  # what was received is the receiver's own


def test_what_the_sender_does_to_its_arrays_later_is_not_seen(office: Office) -> None:
    sent = message(1)
    office.workers[0].send("learner", sent, 1.0)
    office.learner.publish("weights", sent)
    sent.arrays["data"][:] = 99
    office.arrived("weights", 1)
    for got in (office.learner.receive(1.0), office.workers[1].latest("weights")):
        assert got is not None
        assert got.arrays["data"].max() == 1


def test_messages_of_one_sender_arrive_once_and_in_order(office: Office) -> None:
    for sequence in range(1, 11):
        for worker, name in zip(office.workers, NAMES, strict=True):
            worker.send("learner", message(sequence, name), 1.0)
    got = drain(office)
    for name in NAMES:
        assert [m.sequence for m in got if m.sender == name] == list(range(1, 11))
    assert office.learner.receipts.messages == 20
    assert office.learner.receive(0.0) is None


def test_duplicates_stale_incarnations_and_gaps_are_counted_and_not_delivered(office: Office) -> None:
    for incarnation, sequence in [(0, 1), (0, 1), (0, 2), (0, 5), (0, 4), (1, 1), (0, 6), (1, 2), (1, 2)]:
        office.workers[0].send("learner", message(sequence, "worker-0", incarnation), 1.0)
    got = [(m.incarnation, m.sequence) for m in drain(office)]
    assert got == [(0, 1), (0, 2), (0, 5), (1, 1), (1, 2)]
    receipts = office.learner.receipts
    assert (receipts.duplicates, receipts.stale, receipts.lost, receipts.messages) == (3, 1, 2, 5)


def test_messages_without_a_number_are_all_delivered(office: Office) -> None:
    for _ in range(3):
        office.workers[0].send("learner", message(0), 1.0)
    assert len(drain(office)) == 3


def test_a_full_receiver_holds_the_sender_back_and_loses_nothing(office: Office) -> None:
    sent = 0
    with pytest.raises(PeerLost, match="full"):
        while True:
            began = time.monotonic()
            office.workers[0].send("learner", message(sent + 1, size=8192), 0.2)
            sent += 1
    if office.waits:
        assert 0.2 <= time.monotonic() - began < 1.0
    assert 1 < sent <= 32
    taken = [office.learner.receive(0.0) for _ in range(1 + office.held)]
    office.workers[0].send("learner", message(sent + 1, size=8192), 1.0)
    assert [m and m.sequence for m in (*taken, *drain(office))] == list(range(1, sent + 2))
    assert office.learner.receipts.lost == 0


def test_a_message_that_no_receiver_could_hold_is_refused_at_once(office: Office) -> None:
    began = time.monotonic()
    with pytest.raises(BadMessage, match="bytes"):
        office.workers[0].send("learner", message(1, size=LARGE), 10.0)
    with pytest.raises(BadMessage, match="bytes"):
        office.learner.publish("weights", message(1, size=LARGE))
    assert time.monotonic() - began < 5.0
    assert office.learner.receive(0.0) is None


def test_nobody_of_that_name_is_a_lost_peer(office: Office) -> None:
    for box in (office.learner, office.workers[0]):
        with pytest.raises(PeerLost, match="nobody"):
            box.send("nobody", message(), 0.1)


def test_the_learner_answers_each_worker(office: Office) -> None:
    for name in NAMES:
        office.learner.send(name, message(1, "learner"), 1.0)
    for worker in office.workers:
        got = worker.receive(1.0)
        assert got is not None
        assert got.sender == "learner"
        assert worker.receive(0.0) is None


def test_a_topic_holds_the_newest_and_gives_it_to_each_reader_once(office: Office) -> None:
    for worker in office.workers:
        assert worker.latest("weights") is None
    for sequence in (1, 2, 3):
        office.learner.publish("weights", message(sequence, "learner"))
    office.arrived("weights", 3)
    for worker in office.workers:
        got = worker.wait_latest("weights", 1.0)
        assert got is not None
        assert got.sequence == 3
        assert worker.latest("weights") is None
        assert worker.latest("status") is None
    office.learner.publish("weights", message(4, "learner"))
    office.arrived("weights", 4)
    assert [m.sequence for w in office.workers if (m := w.latest("weights"))] == [4, 4]
    assert office.workers[0].wait_latest("weights", 0.05) is None


def test_an_empty_mailbox_answers_none_in_time(office: Office) -> None:
    began = time.monotonic()
    assert office.learner.receive(0.05) is None
    assert time.monotonic() - began < 1.0
