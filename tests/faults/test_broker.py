"""What a broker, a network and strangers can do to a run over RabbitMQ; and the private node itself."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pika
import pytest

from rabbit import new_run, rollout, stranger, wait_for
from troupe import broker
from troupe.broker import Node
from troupe.errors import PeerLost, UserError
from troupe.transports import amqp
from troupe.transports.amqp import Address
from troupe.transports.office import Office
from troupe.transports.rabbitmq import RabbitHub, RabbitMailbox
from troupe.types import Message


class Stream(threading.Thread):
    """A worker that sends `count` numbered messages as fast as it may, or until nobody takes them."""

    def __init__(self, worker: RabbitMailbox, run: str, count: int, timeout_s: float = 60.0) -> None:
        super().__init__()
        self.worker, self.run_id, self.count, self.timeout_s = worker, run, count, timeout_s
        self.sent = 0

    def run(self) -> None:
        with suppress(PeerLost):
            for sequence in range(1, self.count + 1):
                self.worker.send("learner", rollout(self.run_id, sequence, self.worker.name), self.timeout_s)
                self.sent = sequence


@pytest.fixture
def address(node: Node) -> Address:
    return Address.parse(node.address)


@pytest.fixture
def pair(address: Address) -> Iterator[tuple[RabbitHub, RabbitMailbox, str]]:
    hub = RabbitHub(address, run := new_run(), topics={"weights": 1 << 16}, max_length=16)
    worker = RabbitMailbox(hub.connect("worker-0"), address)
    yield hub, worker, run
    worker.close()
    hub.close()


def test_a_broker_killed_mid_stream_costs_nothing_and_both_are_back_soon(
    node: Node, pair: tuple[RabbitHub, RabbitMailbox, str]
) -> None:
    """Lossless: each message is received once and in order, over the death of the broker."""
    hub, worker, run = pair
    stream = Stream(worker, run, 300)
    stream.start()
    got: list[int] = []
    while len(got) < 100:
        message = hub.mailbox().receive(10.0)
        assert message is not None
        got.append(message.sequence)
    node.kill()
    wait_for(lambda: hub.trouble and worker.trouble)
    wait_for(lambda: "no broker answers" in worker.trouble)
    hub.mailbox().publish("weights", Message("weights", run, "learner", version=7))  # does not wait for a broker
    node.restart()
    opened = time.monotonic()
    while len(got) < 300:
        message = hub.mailbox().receive(10.0)
        assert message is not None, f"after {got[-1]}"
        if message.sequence == 200:
            assert time.monotonic() - opened < 10.0
        got.append(message.sequence)
    stream.join(10.0)
    assert got == list(range(1, 301))
    assert hub.mailbox().receipts.lost == 0
    news = worker.wait_latest("weights", 10.0)
    assert news is not None
    assert news.version == 7
    with pytest.raises(UserError, match="leads it"):
        RabbitHub(Address.parse(node.address), run, max_length=16)  # the lead was taken again


def test_a_broker_that_comes_late_is_waited_for_and_a_full_backlog_holds_the_worker_back(
    node: Node, pair: tuple[RabbitHub, RabbitMailbox, str]
) -> None:
    hub, worker, run = pair
    node.kill()
    made: list[RabbitHub] = []
    address = Address.parse(node.address)
    late = threading.Thread(target=lambda: made.append(RabbitHub(address, new_run(), timeout_s=60.0)))
    late.start()
    stream = Stream(worker, run, 40)
    stream.start()
    wait_for(lambda: "no broker answers" in hub.trouble and "no broker answers" in worker.trouble)
    began, cpu_s = time.monotonic(), time.process_time()
    with pytest.raises(PeerLost, match="no broker answers"):
        hub.mailbox().send("worker-0", rollout(run, 1, "learner"), 1.0)
    assert stream.sent <= 4 + 1
    assert time.process_time() - cpu_s < 0.3 * (time.monotonic() - began) + 0.1
    node.restart()
    got = [hub.mailbox().receive(15.0) for _ in range(40)]
    assert [m and m.sequence for m in got] == list(range(1, 41))
    stream.join(10.0)
    late.join(30.0)
    assert len(made) == 1
    made[0].close()


def sealed(run: str, message: Message) -> tuple[bytes, Any]:
    body, headers = Office(run).seal(message)
    return body, pika.BasicProperties(headers=headers, delivery_mode=2)


def test_what_is_published_three_times_is_received_once(node: Node, pair: tuple[RabbitHub, RabbitMailbox, str]) -> None:
    hub, _, run = pair
    got = []
    with stranger(node.address) as channel:
        for sequence in range(1, 41):
            for _ in range(3):
                body, properties = sealed(run, rollout(run, sequence))
                while True:  # a full queue refuses
                    try:
                        channel.basic_publish("", f"troupe.{run}.data", body, properties)
                        break
                    except pika.exceptions.NackError:
                        message = hub.mailbox().receive(0.0)
                        got += [message.sequence] if message else []
    while (message := hub.mailbox().receive(0.5)) is not None:
        got.append(message.sequence)
    assert got == list(range(1, 41))
    assert hub.mailbox().receipts.duplicates == 80
    wait_for(lambda: (hub.depth().ready, hub.depth().unacknowledged) == (0, 0))


LEARNER = """
import os, signal, sys, time
from troupe.transports import amqp
from troupe.transports.amqp import Address
from troupe.transports.rabbitmq import RabbitHub
hub = RabbitHub(Address.parse(sys.stdin.readline().strip()), sys.argv[1], max_length=16)
print("up", flush=True)
for _ in range(3):
    print(hub.mailbox().receive(20.0).sequence, flush=True)
time.sleep(0.3)  # an acknowledgement, were there one, would reach the broker
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_learner_had_not_finished_the_next_one_gets(node: Node, address: Address) -> None:
    """It was given 1, 2 and 3 and asked for no more: 3 comes again; 1 and 2 only if it died before it could say so."""
    run = new_run()
    process = subprocess.Popen(
        [sys.executable, "-c", LEARNER, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(node.address + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "up\n"
    spec = {"name": "worker-0", "hub": "learner", "topics": [], "office": {"run": run, "max_length": 16}}
    worker = RabbitMailbox(spec, address)  # type: ignore[arg-type]
    for sequence in range(1, 11):
        worker.send("learner", rollout(run, sequence), 10.0)
    assert process.stdout.read() == "1\n2\n3\n"
    assert process.wait(20.0) == -signal.SIGKILL
    assert worker.flush(10.0)
    hub = RabbitHub(address, run, max_length=16)
    got = []
    while (message := hub.mailbox().receive(1.0)) is not None:
        got.append(message.sequence)
    assert got[-8:] == list(range(3, 11))
    assert got[:-8] in ([], [2], [1, 2])
    worker.close()
    hub.close()
    process.stdin.close()
    process.stdout.close()


class Canary:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_frame_of_a_stranger_does_harm(
    node: Node, pair: tuple[RabbitHub, RabbitMailbox, str], tmp_path: Path
) -> None:
    """All are refused, counted, and kept aside; between them the run goes on."""
    hub, worker, run = pair
    good, _ = sealed(run, rollout(run, 1, "stranger"))
    canary = tmp_path / "canary"
    rng = random.Random(1)
    bad = [
        b"",
        b"\0" * 100,
        good[: len(good) // 2],
        good + b"\0" * 8,
        pickle.dumps(Canary(canary)),
        b'{"kind": "rollout"}',
        sealed(new_run(), rollout(new_run(), 1))[0],  # of another run
        b"x" * (17 << 20),  # over the limit
    ]
    for _ in range(20):
        flipped = bytearray(good)
        flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        bad.append(bytes(flipped))
    receipts = hub.mailbox().receipts
    with stranger(node.address) as channel:
        for number, body in enumerate(bad, 1):
            honest = zlib.crc32(body) if number <= 8 else zlib.crc32(good)  # a flipped bit is told by the checksum
            properties = pika.BasicProperties(headers={"crc32": honest})
            channel.basic_publish("", f"troupe.{run}.data", body, properties)
            worker.send("learner", rollout(run, number), 5.0)
            got = hub.mailbox().receive(10.0)
            assert got is not None, f"after the bad frame {number}"
            assert (got.sender, got.sequence) == ("worker-0", number)
            if (extra := hub.mailbox().receive(0.0)) is not None:
                raise AssertionError(f"frame {number} was delivered: {extra}")
        for headers in ({}, {"crc32": "12"}, {"crc32": -5}, {"crc32": [1]}):
            channel.basic_publish("", f"troupe.{run}.data", good, pika.BasicProperties(headers=headers))
        channel.basic_publish("", f"troupe.{run}.meta", b"what?", pika.BasicProperties(reply_to="x"))
        channel.basic_publish(f"troupe.{run}.model.weights", "", b"learn this")
        channel.basic_publish(f"troupe.{run}.model.done", "", pickle.dumps(Canary(canary)))
        total = len(bad) + 4 + 1
        wait_for(lambda: hub.mailbox().receive(0.0) is None and receipts.corrupted == total)
        assert receipts.last_damage
        assert receipts.messages == len(bad)
        wait_for(lambda: worker.latest("weights") is None and worker.receipts.corrupted == 2)
        assert not worker.stopping
        dead = f"troupe.{run}.dead"
        wait_for(lambda: channel.queue_declare(dead, passive=True).method.message_count == len(bad) + 4)
        _, properties, body = channel.basic_get(dead, auto_ack=True)
        assert (body, "bad message" in properties.headers["why"]) == (b"", True)
        channel.queue_delete(dead)
    assert not canary.exists()


def test_the_bound_is_never_exceeded_with_fast_workers_and_a_slow_learner(node: Node, address: Address) -> None:
    run = new_run()
    hub = RabbitHub(address, run, max_length=8, prefetch=3)
    workers = [RabbitMailbox(hub.connect(f"worker-{n}"), address) for n in range(3)]
    streams = [Stream(worker, run, 10**6, timeout_s=1.0) for worker in workers]
    for stream in streams:
        stream.start()
    seen = []
    over = time.monotonic() + 4.0
    polls = 0
    while time.monotonic() < over:
        hub.mailbox().receive(0.02)
        time.sleep(0.02)  # merging it
        seen.append(hub.depth())
        if len(seen) % 40 == 0:
            polls += 1
            for line in node.control("list_queues", "name", "messages_ready", "messages_unacknowledged").splitlines():
                if line.startswith(f"troupe.{run}.data"):
                    ready, unacknowledged = map(int, line.split()[1:])
                    assert ready <= 8
                    assert unacknowledged <= 3
    assert polls >= 1
    assert {depth.bound for depth in seen} == {11}
    assert max(depth.ready + depth.unacknowledged for depth in seen) in (8, 9, 10, 11)
    hub.stop()
    for worker, stream in zip(workers, streams, strict=True):
        stream.join(10.0)
        worker.close()
    hub.close()


def test_an_alarm_blocks_publishing_and_nothing_else(node: Node, pair: tuple[RabbitHub, RabbitMailbox, str]) -> None:
    hub, worker, run = pair
    for sequence in range(1, 7):
        worker.send("learner", rollout(run, sequence), 5.0)
    assert worker.flush(5.0)
    node.control("set_vm_memory_high_watermark", "0")
    try:
        worker.send("learner", rollout(run, 7), 5.0)
        wait_for(lambda: worker.blocked, 5.0)
        assert "blocked by broker" in worker.trouble
        got = [hub.mailbox().receive(2.0) for _ in range(6)]
        assert [m and m.sequence for m in got] == [1, 2, 3, 4, 5, 6], "consuming goes on"
        with pytest.raises(PeerLost, match="blocked by broker"):
            for sequence in range(8, 20):
                worker.send("learner", rollout(run, sequence), 0.2)
    finally:
        node.control("set_vm_memory_high_watermark", "0.4")
    cleared = time.monotonic()
    message = hub.mailbox().receive(10.0)
    assert message is not None
    assert message.sequence == 7
    assert time.monotonic() - cleared < 5.0
    wait_for(lambda: not worker.blocked)


def test_a_learner_that_computes_long_is_not_disconnected(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker gives up a client after two silent heartbeats; here the thread beats, whatever the main one does."""
    monkeypatch.setattr(amqp, "HEARTBEAT_S", 1)
    hub = RabbitHub(address, new_run())
    epochs = hub._wire._publishing.epoch, hub._wire._consuming.epoch
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        sum(range(10_000))
    assert (hub._wire._publishing.epoch, hub._wire._consuming.epoch) == epochs
    assert not hub.trouble
    hub.close()


def test_a_folder_is_one_nodes_and_its_own(node: Node) -> None:
    with pytest.raises(UserError, match=r"runs from .* already"):
        broker.start(node.folder)
    assert node.folder.stat().st_mode & 0o777 == 0o700
    for name in ("rabbitmq.conf", "password", ".erlang.cookie"):
        assert (node.folder / name).stat().st_mode & 0o077 == 0
    assert "guest" not in node.control("list_users")
    secret = (node.folder / "password").read_text()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert secret.encode() not in process.read_bytes()
        except OSError:
            continue


def test_a_broker_for_the_network_needs_tls(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0\.0\.0\.0 without TLS"):
        broker.start(tmp_path / "node", host="0.0.0.0")
    assert not (tmp_path / "node").exists()


def test_without_the_package_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_SCRIPTS", tmp_path)
    with pytest.raises(UserError, match="apt-get install rabbitmq-server"):
        broker.start(tmp_path / "node")


def erlang_processes() -> set[str]:
    """The process ids of all nodes and port mappers on this machine."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() in ("beam.smp", "epmd", "erl_child_setup"):
                found.add(process.name)
        except OSError:
            continue
    return found


def ended(processes: set[str]) -> None:
    """Until none of them is left."""
    wait_for(lambda: not erlang_processes() & processes)


SERVE = "import sys; from pathlib import Path; from troupe import broker; broker.serve(Path(sys.argv[1]))"


def test_serving_tells_the_address_and_whatever_ends_it_ends_the_node(tmp_path: Path) -> None:
    """Asked with SIGTERM, it says nothing and leaves nothing; killed, it leaves no process either."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        before = erlang_processes()
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", SERVE, str(tmp_path / "node")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        address = Address.parse(process.stdout.readline().strip())
        with socket.create_connection((address.host, address.port), timeout=5.0):
            pass
        ours = erlang_processes() - before
        assert len(ours) >= 3
        os.kill(process.pid, number)
        assert process.stdout.read() == ""
        assert process.wait(15.0) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        process.stdout.close()
        ended(ours)
    again = replace(address, port=1)
    assert again.password == (tmp_path / "node" / "password").read_text()
