"""Mailboxes over a real broker: who gets what, who leads, who is asked, and what is left behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rabbit import new_run, rollout, stranger, wait_for
from troupe.broker import Node
from troupe.errors import BadMessage, ConfigError, PeerLost, UserError
from troupe.transports.amqp import Address
from troupe.transports.desk import RabbitDesk
from troupe.transports.office import Office
from troupe.transports.rabbitmq import Depth, LinkSpec, RabbitHub, RabbitMailbox
from troupe.types import Message

TOPICS = {"weights": 1 << 20}


class Rig:
    """Makes hubs and workers of one run, and closes them."""

    def __init__(self, address: Address) -> None:
        self.address, self.run = address, new_run()
        self._open: list[Any] = []

    def hub(self, **options: Any) -> RabbitHub:
        hub = RabbitHub(self.address, self.run, **{"topics": TOPICS, **options})
        self._open.append(hub)
        return hub

    def worker(
        self, hub: RabbitHub, name: str = "worker-0", on_wait: Callable[[], None] = lambda: None
    ) -> RabbitMailbox:
        spec: LinkSpec = json.loads(json.dumps(hub.connect(name)))
        worker = RabbitMailbox(spec, self.address, on_wait)
        self._open.append(worker)
        return worker

    def weights(self, version: int, sender: str = "learner") -> Message:
        return Message("weights", self.run, sender, version=version, arrays={"w": np.full(8, version, np.float32)})

    def close(self) -> None:
        for one in reversed(self._open):
            one.close()


@pytest.fixture
def rig(node: Node) -> Iterator[Rig]:
    made = Rig(Address.parse(node.address))
    yield made
    made.close()


def test_a_worker_that_comes_late_gets_the_newest_of_each_topic(rig: Rig) -> None:
    hub = rig.hub(topics={"weights": 1 << 10, "status": 1 << 10})
    for version in (1, 2):
        hub.mailbox().publish("weights", rig.weights(version))
    hub.mailbox().publish("status", rig.weights(7))
    worker = rig.worker(hub)
    for topic, version in (("weights", 2), ("status", 7)):
        got = worker.wait_latest(topic, 5.0)
        assert got is not None
        assert got.version == version
    hub.mailbox().republish()  # as it may happen when it is published and asked for at once
    hub.mailbox().publish("status", rig.weights(8))
    got = worker.wait_latest("status", 5.0)
    assert got is not None and got.version == 8, "each comes once"
    assert worker.wait_latest("weights", 0.1) is None


def test_a_worker_that_was_there_first_gets_what_the_next_learner_published(rig: Rig) -> None:
    hub = rig.hub()
    worker = rig.worker(hub)
    for version in (8, 9):
        hub.mailbox().publish("weights", rig.weights(version))
        assert worker.wait_latest("weights", 10.0)
    hub.close()
    rig.hub().mailbox().publish("weights", rig.weights(5))
    got = worker.wait_latest("weights", 10.0)
    assert got is not None
    assert got.version == 5


def test_of_several_learners_the_newest_of_each_is_read_in_turn(rig: Rig) -> None:
    one, two = rig.hub(), rig.hub(name="second", share=True)
    worker = rig.worker(one)
    for version in (1, 2, 3):
        one.mailbox().publish("weights", rig.weights(version, "learner"))
    two.mailbox().publish("weights", rig.weights(9, "second"))
    board = worker._topics["weights"]
    wait_for(lambda: {s: m.version for s, m in board.fresh.items()} == {"learner": 3, "second": 9}, 3.0)
    got = [worker.latest("weights"), worker.latest("weights"), worker.latest("weights")]
    assert {(m.sender, m.version) for m in got if m} == {("learner", 3), ("second", 9)}
    assert got[2] is None
    worker._wire.call(lambda: time.sleep(0.5))  # what is published waits on the broker, where there is room for 1
    for hub, version in ((one, 4), (two, 10), (one, 5)):
        hub.mailbox().publish("weights", rig.weights(version, hub.name))
        assert hub._wire.flush(5.0)
    wait_for(lambda: {s: m.version for s, m in board.fresh.items()} == {"learner": 5, "second": 10}, 3.0)


def test_a_second_learner_is_refused_unless_it_shares(rig: Rig) -> None:
    rig.hub()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"another learner leads it.*share its queue"):
        rig.hub()
    assert time.monotonic() - began < 2.0
    for name in ("second", "third", "fourth"):
        rig.hub(name=name, share=True)
    with pytest.raises(UserError, match="4 learners share it"):
        rig.hub(name="fifth", share=True)


def test_whoever_shares_agrees_about_the_queue(rig: Rig) -> None:
    rig.hub(max_length=8)
    with pytest.raises(UserError, match="other settings"):
        rig.hub(name="second", share=True, max_length=9)


def test_the_lead_is_free_again_when_the_learner_leaves(rig: Rig) -> None:
    rig.hub().close()
    rig.hub()


def test_two_learners_race_and_each_message_is_one_learners(rig: Rig) -> None:
    one, two = rig.hub(), rig.hub(name="second", share=True)
    worker = rig.worker(one)
    got: dict[str, list[int]] = {"learner": [], "second": []}

    def learn(hub: RabbitHub) -> None:
        while len(got["learner"]) + len(got["second"]) < 200:
            message = hub.mailbox().receive(0.05)
            if message is not None:
                got[hub.name].append(message.sequence)

    threads = [threading.Thread(target=learn, args=(hub,)) for hub in (one, two)]
    for thread in threads:
        thread.start()
    for sequence in range(1, 201):
        worker.send("learner", rollout(rig.run, sequence), 10.0)
    for thread in threads:
        thread.join(20.0)
    assert sorted(got["learner"] + got["second"]) == list(range(1, 201))
    assert min(map(len, got.values())) > 20, "both had their share"
    for sequences in got.values():
        assert sequences == sorted(sequences)
    assert one.mailbox().receipts.duplicates == two.mailbox().receipts.duplicates == 0


def test_what_a_learner_that_left_did_not_finish_another_gets_though_it_saw_later_ones(rig: Rig) -> None:
    one, two = rig.hub(prefetch=2), rig.hub(name="second", share=True, prefetch=2)
    worker = rig.worker(one)
    for sequence in range(1, 9):
        worker.send("learner", rollout(rig.run, sequence), 5.0)
    wait_for(lambda: one.mailbox().unacknowledged == 2)
    got = []
    while (message := two.mailbox().receive(1.0)) is not None:
        got.append(message.sequence)
    assert len(got) == 6
    one.close()
    while (message := two.mailbox().receive(1.0)) is not None:
        got.append(message.sequence)
    assert sorted(got) == list(range(1, 9))
    assert two.mailbox().receipts.lost == 0


def test_fresh_drops_the_oldest_and_counts_them(rig: Rig) -> None:
    hub = rig.hub(mode="fresh", max_length=4, prefetch=1)
    worker = rig.worker(hub)
    for sequence in range(1, 51):
        worker.send("learner", rollout(rig.run, sequence), 5.0)  # never held back for long
    assert worker.flush(5.0)
    got = []
    while (message := hub.mailbox().receive(0.3)) is not None:
        got.append(message.sequence)
    assert got[-4:] == [47, 48, 49, 50]
    assert len(got) + hub.mailbox().receipts.lost == 50
    assert len(got) <= 6


def test_what_waits_is_bounded_and_the_figures_tell(rig: Rig) -> None:
    hub = rig.hub(max_length=8, prefetch=2)
    worker = rig.worker(hub)
    with pytest.raises(PeerLost, match="full"):
        for sequence in range(1, 100):
            worker.send("learner", rollout(rig.run, sequence), 0.3)
    wait_for(lambda: hub.depth() == Depth(8, 2, 10))
    assert hub.mailbox().receive(0.0) is not None
    wait_for(lambda: hub.depth().unacknowledged == 2)  # it is in hand, and not finished


def test_a_wait_ends_when_the_hub_says_stop_and_beats_until_then(rig: Rig) -> None:
    beats: list[float] = []
    hub = rig.hub()
    worker = rig.worker(hub, on_wait=lambda: beats.append(time.monotonic()))
    threading.Timer(0.5, hub.stop).start()
    began = time.monotonic()
    assert worker.receive(30.0) is None
    assert worker.stopping
    assert worker.wait_latest("weights", 30.0) is None
    assert time.monotonic() - began < 5.0
    assert len(beats) >= 4
    assert max(np.diff(beats), default=0.0) < 0.3  # 0.1 s, on a machine that has other work
    late = rig.worker(hub, "worker-1")
    wait_for(lambda: late.stopping)


def test_what_waits_for_a_worker_its_next_incarnation_gets(rig: Rig) -> None:
    hub = rig.hub()
    rig.worker(hub).close()
    hub.mailbox().send("worker-0", rig.weights(4), 5.0)
    got = rig.worker(hub).receive(5.0)
    assert got is not None
    assert got.version == 4


def test_a_machine_asks_one_run_or_all(rig: Rig, node: Node) -> None:
    hub, other = rig.hub(), Rig(rig.address)
    second = other.hub()
    desk = RabbitDesk(rig.address)
    question = Message("what-to-play", "", "machine", meta={"cores": 4})

    def serve(hub: RabbitHub, run: str, count: int) -> None:
        for _ in range(count):
            request = hub.requests(10.0)
            assert request is not None
            assert (request.kind, request.meta["cores"]) == ("what-to-play", 4)
            hub.answer(request, Message("play", run, "learner", meta={"env": "CartPole-v1"}))

    threads = [threading.Thread(target=serve, args=args) for args in [(hub, rig.run, 2), (second, other.run, 1)]]
    for thread in threads:
        thread.start()
    answers = desk.ask(question, run=None, timeout_s=2.0)
    assert {rig.run, other.run} <= {m.run for m in answers}
    began = time.monotonic()
    assert [(m.run, m.meta) for m in desk.ask(question, run=rig.run, timeout_s=5.0)] == [
        (rig.run, {"env": "CartPole-v1"})
    ]
    assert time.monotonic() - began < 2.0, "there is one answer, and it has come"
    assert desk.ask(question, run="no-such-run", timeout_s=5.0) == []
    assert time.monotonic() - began < 4.0, "nobody leads it: nothing to wait for"
    for thread in threads:
        thread.join(10.0)
    rig.worker(hub)
    assert hub.requests(0.2) is None, "the hello of a worker is no request"
    desk.close()
    other.close()


def test_an_answer_that_comes_too_late_is_none_to_the_next_question(rig: Rig) -> None:
    hub, desk = rig.hub(), RabbitDesk(rig.address)
    assert desk.ask(Message("first", "", "machine"), run=rig.run, timeout_s=0.1) == []
    answers: list[Message] = []
    asking = threading.Thread(
        target=lambda: answers.extend(desk.ask(Message("second", "", "machine"), run=rig.run, timeout_s=10.0))
    )
    first = hub.requests(5.0)
    asking.start()
    second = hub.requests(5.0)
    assert first is not None and second is not None
    for request in (first, second):
        hub.answer(request, Message(f"to the {request.kind}", rig.run, "learner"))
    asking.join(15.0)
    assert [answer.kind for answer in answers] == ["to the second"]
    desk.close()


def test_a_question_with_a_forged_address_is_not_answered(rig: Rig, node: Node) -> None:
    """Or a stranger could have a learner publish into any queue."""
    import pika

    hub = rig.hub()
    body, headers = Office(rig.run).seal(Message("what-to-play", "", "machine"))
    with stranger(node.address) as channel:
        hello = Message("hello", rig.run, "x", meta={"weights/0": f"troupe.{rig.run}.data"})
        forged = pika.BasicProperties(headers=headers, reply_to=f"troupe.{rig.run}.data")
        channel.basic_publish("", f"troupe.{rig.run}.meta", body, forged)
        body, headers = Office(rig.run).seal(hello)
        hub.mailbox().publish("weights", rig.weights(1))
        channel.basic_publish("", f"troupe.{rig.run}.meta", body, pika.BasicProperties(headers=headers))
    assert hub.requests(0.3) is None
    assert hub.mailbox().receive(0.1) is None


def test_a_closed_run_leaves_nothing_on_the_broker(rig: Rig, node: Node) -> None:
    hub = rig.hub()
    worker = rig.worker(hub)
    worker.send("learner", rollout(rig.run, 1), 5.0)
    assert worker.flush(5.0)
    assert f"troupe.{rig.run}.data" in node.control("list_queues", "name")
    worker.close()
    hub.close()
    assert rig.run not in node.control("list_queues", "name")
    assert rig.run not in node.control("list_exchanges", "name")


def test_a_send_without_a_learner_says_so(rig: Rig) -> None:
    hub = rig.hub()
    worker = rig.worker(hub)
    hub.close()
    with pytest.raises(PeerLost, match="no learner of that run"):
        for sequence in range(1, 10):
            worker.send("learner", rollout(rig.run, sequence), 0.5)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mode": "quick"}, "lossless or fresh"),
        ({"max_length": 0}, "at least 1"),
        ({"max_length_bytes": 10}, "less than the largest message"),
        ({"name": "a/b"}, "cannot name a queue"),
    ],
)
def test_options_that_make_no_sense_are_refused(rig: Rig, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        rig.hub(**options)


def test_topics_are_declared(rig: Rig) -> None:
    hub = rig.hub()
    for read in (hub.mailbox().latest, rig.worker(hub).latest):
        with pytest.raises(BadMessage, match="was not declared"):
            read("gradients")
    with pytest.raises(BadMessage, match="was not declared"):
        hub.mailbox().publish("gradients", rig.weights(1))
    with pytest.raises(BadMessage, match="may not publish"):
        rig.worker(hub, "worker-1").publish("weights", rig.weights(1))
