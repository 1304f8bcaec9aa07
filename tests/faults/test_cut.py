"""T16: the network between a worker and the broker is cut, both ways and one way; nothing is lost, both find back.

The worker lives in a network namespace of its own. TROUPE_TEST_HEARTBEAT_S=5 gives the figures of the real heartbeat.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from rabbit import certificates, new_run
from troupe import broker
from troupe.transports.amqp import Address
from troupe.transports.rabbitmq import RabbitHub

HEARTBEAT_S = int(os.environ.get("TROUPE_TEST_HEARTBEAT_S", "1"))
DETECT_S = 2 * (HEARTBEAT_S + 5) + 2.0  # pika looks every 5 s more than that; and a busy machine
RECONNECT_S = 10.0

WORKER = """
import sys, threading, time
from contextlib import suppress
from troupe.transports import amqp
amqp.HEARTBEAT_S = int(sys.argv[2])
from rabbit import rollout
from troupe.errors import PeerLost
from troupe.transports.amqp import Address
from troupe.transports.rabbitmq import RabbitMailbox
address = Address.parse(sys.stdin.readline().strip())
spec = {"name": "worker-0", "hub": "learner", "topics": [], "office": {"run": sys.argv[1]}}
worker, over, sequence, was = RabbitMailbox(spec, address), threading.Event(), 0, None
def watch():
    was = None
    while not over.wait(0.02):
        if (trouble := worker.trouble) != was:
            was = trouble
            print(trouble or "up", flush=True)
watcher = threading.Thread(target=watch)
watcher.start()
with suppress(PeerLost):  # the run is stopping
    while not worker.stopping:
        worker.send("learner", rollout(sys.argv[1], sequence + 1), 100.0)
        sequence += 1
        time.sleep(0.01)
over.set()
watcher.join()
print(f"sent {sequence}", flush=True)
worker.close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


@dataclass
class Net:
    """A namespace, and the link to it."""

    name: str
    here: str  # our address on it
    there: str
    link: str


@pytest.fixture
def net() -> Iterator[Net]:
    name, subnet = f"tr{os.getpid()}", f"198.18.{os.getpid() % 250}"
    made = Net(name, f"{subnet}.1", f"{subnet}.2", f"{name}a")
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces are not allowed here: {getattr(e, 'stderr', '') or e}")
    with ExitStack() as leaving:
        leaving.callback(subprocess.run, ["ip", "netns", "del", name], check=True, timeout=10)  # the link goes with it
        ip("link", "add", made.link, "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("address", "add", f"{made.here}/24", "dev", made.link)
        ip("link", "set", made.link, "up")
        ip("-n", name, "address", "add", f"{made.there}/24", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield made


def test_a_cut_network_costs_nothing_and_is_found_out_soon(net: Net, tmp_path: Path) -> None:
    tls = certificates(tmp_path / "tls", net.here)
    with ExitStack() as leaving:
        node = leaving.enter_context(
            broker.start(tmp_path / "node", host=net.here, tls=broker.Tls(tls.certificate, tls.key))
        )
        hub = RabbitHub(Address.parse(node.address), run := new_run())
        leaving.callback(hub.close)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
        worker = subprocess.Popen(
            ["ip", "netns", "exec", net.name, sys.executable, "-u", "-c", WORKER, run, str(HEARTBEAT_S)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        leaving.callback(worker.wait, 10)
        leaving.callback(worker.kill)
        assert worker.stdin and worker.stdout
        worker.stdin.write(f"{node.tls_address}?cafile={tls.authority}\n")
        worker.stdin.close()
        said: SimpleQueue[str] = SimpleQueue()
        listener = threading.Thread(target=listen, args=(worker.stdout, said))
        listener.start()
        assert said.get(timeout=20.0) == "up\n"
        got: list[int] = []
        receive(hub, got, 50)
        for cut, heal in (
            (["link", "set", net.link, "down"], ["link", "set", net.link, "up"]),
            (["route", "add", "blackhole", net.there], ["route", "del", "blackhole", net.there]),
        ):
            began = time.monotonic()
            ip(*cut)
            assert said.get(timeout=20.0 + DETECT_S) != "up\n"  # it says so, whatever it says
            detected_s = time.monotonic() - began
            ip(*heal)
            began = time.monotonic()
            while said.get(timeout=20.0 + RECONNECT_S) != "up\n":
                pass
            back_s = time.monotonic() - began
            print(f"{cut}: found out after {detected_s:.1f} s, back {back_s:.1f} s after it was healed")
            assert detected_s < DETECT_S and back_s < RECONNECT_S
            receive(hub, got, len(got) + 50)
        hub.stop()
        receive(hub, got, 10**6)
        assert worker.wait(10) == 0
        listener.join(10.0)
        worker.stdout.close()
        sent = int(said.get(timeout=1.0).split()[1])
        assert got == list(range(1, len(got) + 1)) and hub.mailbox().receipts.lost == 0
        assert sent - len(got) <= 5, "but for what it held itself when it was told to stop"


def listen(stdout: Iterable[str], said: SimpleQueue[str]) -> None:
    for line in stdout:
        said.put(line)


def receive(hub: RabbitHub, got: list[int], enough: int) -> None:
    """Until there are `enough`, or nothing comes any more."""
    while len(got) < enough and (message := hub.mailbox().receive(3.0 if enough > 10**5 else 20.0)) is not None:
        got.append(message.sequence)
