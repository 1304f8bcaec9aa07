"""What a stranger with the broker's password can send to a run, and to a machine that plays: all of it is refused."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import zlib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pika
from command import Command
from remote import NUMBERED, Stranger, carrier, events, exact, numbers, steps, train

from rabbit import new_run, rollout, stranger, wait_for
from troupe import broker, task
from troupe.guests import Guests
from troupe.task import Task
from troupe.transports.amqp import Address
from troupe.transports.codec import MAX_MESSAGE_BYTES
from troupe.transports.office import seal
from troupe.transports.rabbitmq import RabbitHub, RabbitMailbox
from troupe.types import Message


class Canary:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def publish(channel: Any, exchange: str, key: str, body: bytes, **headers: Any) -> None:
    properties = pika.BasicProperties(headers={"crc32": zlib.crc32(body), **headers})
    channel.basic_publish(exchange, key, body, properties)


def wrong(guest: Stranger) -> dict[str, Message]:
    """What is wrong with it, in the words of the refusal -> a message that is of this run and sound but for that."""
    good, none = guest.message, 0 * guest.played.actions - 1
    missing = good(7)
    return {
        "observations is [51, 8, 3], not [51, 8, 2]": good(1, observations=np.zeros((51, 8, 3), np.float32)),
        "observations are uint8, not float32": good(2, observations=np.zeros((51, 8, 2), np.uint8)),
        "actions are -1 to -1, where there are 0 to 1": good(3, actions=none),
        "rewards holds a number that is not finite": good(4, rewards=np.full((50, 8), np.nan, np.float32)),
        "final_index points outside": good(
            5, final_index=np.array([[0, 8]]), final_observations=np.zeros((1, 2), np.float32)
        ),
        "play_s is 'long', which is no time": replace(good(6), meta={"play_s": "long"}),
        "a rollout has the arrays": replace(missing, arrays={"observations": missing.arrays["observations"]}),
    }  # fmt: skip


def test_nothing_a_stranger_sends_to_a_learner_is_learned_from(
    command: Command, node: broker.Node, tmp_path: Path
) -> None:
    """T24, T25, T27, T28: the run counts each by its kind and goes on; the dead letters keep what could not be read."""
    learner = train(command, "visited", **NUMBERED, workers=1, until="minutes=2")
    learner.until(lambda: steps(learner))
    guest = Stranger(node.address, "visited")
    canary = tmp_path / "canary"
    data = "troupe.visited.data"
    with stranger(node.address) as channel:
        other = replace(guest.message(1), run="another")
        publish(channel, "", data, seal(other, MAX_MESSAGE_BYTES)[0])
        publish(channel, "", data, pickle.dumps(Canary(canary)))
        publish(channel, "", data, bytes(MAX_MESSAGE_BYTES + 1))
        learner.until(lambda: carrier(learner).get("corrupted") == 3)
        dead = "troupe.visited.dead"
        wait_for(lambda: channel.queue_declare(dead, passive=True).method.message_count == 3)
        whys = [channel.basic_get(dead, auto_ack=True)[1].headers["why"] for _ in range(3)]
        assert "plays for run 'another', this is 'visited'" in whys[0] and "not a message of Troupe" in whys[1]
        assert f"a frame of {MAX_MESSAGE_BYTES + 1} bytes, over the limit of {MAX_MESSAGE_BYTES}" in whys[2]
    refused = wrong(guest)
    guest.send(*refused.values(), guest.message(8))
    guest.send(guest.message(8), guest.message(9, incarnation=1), guest.message(9), guest.message(10))
    learner.until(lambda: carrier(learner)["stale"] == 2)
    lines = learner.lines("rejected")
    assert [str(line["why"]).partition(": ")[0] for line in lines] == [guest.name] * len(refused)
    for sentence, line in zip(refused, lines, strict=True):
        assert sentence in str(line["why"])
    figures = carrier(learner)
    assert (figures["duplicates"], figures["stale"], figures["lost"]) == (1, 2, 8)  # 1 to 8 of the incarnation 1
    before = len(learner.lines("episodes"))
    learner.until(lambda: "actor-0" in numbers(learner.lines("episodes")[before:]))
    guest.close()
    learner.signal(signal.SIGINT)
    assert learner.wait() == 130
    assert exact(learner)["rejected"] == len(refused) and not canary.exists()


def test_nothing_a_stranger_publishes_is_played_with(command: Command, node: broker.Node, tmp_path: Path) -> None:
    """Who plays distrusts the learner's side as well: what is no weights of this run is refused, and it plays on."""
    learner = train(command, "misled", **NUMBERED, workers=1, until="minutes=2")
    learner.until(lambda: steps(learner))
    guest = Stranger(node.address, "misled")  # whose mailbox sees every publication
    news = guest.mailbox.wait_latest("weights", 20.0)
    assert news is not None
    canary, count = tmp_path / "canary", len(news.arrays["weights"])
    ones = np.ones(count, np.float32)
    forged = [
        replace(news, run="another"),
        replace(news, arrays={"weights": ones[:-1]}),
        replace(news, arrays={"weights": ones.astype(np.float64)}),
        replace(news, arrays={"weights": ones * np.nan}),
        replace(news, arrays={"weights": ones, "more": ones}),
        replace(news, meta={**news.meta, "rest_s": 1e9}),
        replace(news, meta={**news.meta, "progress": "all"}),
    ]
    with stranger(node.address) as channel:
        for number, message in enumerate(forged, 1):
            publish(
                channel,
                "troupe.misled.model.weights",
                "",
                seal(message, 1 << 24)[0],
                life=f"forged-{number}",
                edition=1,
            )
        publish(channel, "troupe.misled.model.weights", "", pickle.dumps(Canary(canary)))
        publish(channel, "troupe.misled.model.done", "", pickle.dumps(Canary(canary)))
    learner.until(lambda: "publications that were no weights of this run" in events(learner))
    before = len(learner.lines("episodes"))
    learner.until(lambda: numbers(learner.lines("episodes")[before:]))
    guest.close()
    learner.signal(signal.SIGINT)
    assert learner.wait() == 130
    assert not learner.parts("lost") and not canary.exists()


def test_a_machine_refuses_whatever_differs_and_names_it(command: Command, node: broker.Node) -> None:
    """T27: version, spaces, network; and the learner is told why."""
    sound = described()
    offers = {
        "is led by Troupe 0.0.0": {"version": "0.0.0"},
        "has the observation space Box(3,)": {"observation": "Box(3,)"},
        "has the network 0123": {"fingerprint": "0123"},
    }
    houses: dict[str, tuple[Guests, list[str]]] = {}
    with ExitStack() as leaving:
        for number, (sentence, change) in enumerate(offers.items()):
            hub, told = RabbitHub(Address.parse(node.address), f"offer-{number}"), list[str]()
            leaving.callback(hub.close)
            offer = msgspec.structs.replace(sound, run=f"offer-{number}", **change)
            houses[sentence] = Guests(hub, offer, 1, silent, told.append), told
        guest = command("join", "--workers=1")

        def answered() -> bool:
            for house, _ in houses.values():
                house.attend()
            return all(told for _, told in houses.values())

        guest.until(answered)
    for sentence, (_, told) in houses.items():
        assert len(told) == 1 and "cannot play" in told[0] and sentence in told[0] and sentence in guest.said()
    assert "Traceback" not in guest.said()
    guest.signal(signal.SIGINT)
    assert guest.wait() == 130


def silent(kind: str, **fields: object) -> None:
    """A journal that nobody reads."""


def described() -> Task:
    from troupe.build import build_algorithm, env_spec
    from troupe.envs import make_reference
    from troupe.goal import Goal
    from troupe.resolve import resolve

    config = resolve({"env": "CartPole-v1", "algo": "impala"})
    env = make_reference(env_spec(config))
    algorithm = build_algorithm(config, env.observation_space, env.action_space)
    spaces = str(env.observation_space), str(env.action_space)
    env.close()
    return task.describe(config, "run", Goal(475.0), 0, algorithm, spaces, {"hub": "learner"})


LEARNER = """
import os, signal, sys
from pathlib import Path
from troupe.transports.amqp import Address
from troupe.transports.rabbitmq import RabbitHub
hub = RabbitHub(Address.parse(sys.stdin.readline().strip()), sys.argv[1], max_length=16, tries=Path(sys.argv[2]))
print("up", flush=True)
while (message := hub.mailbox().receive(1.0)) is not None:
    print(message.sequence, flush=True)
    if message.sequence == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if message.sequence == 5:
        hub.close(keep=True)  # as a run does that fails
        sys.exit(1)
print(hub.mailbox().receipts.poisoned, flush=True)
hub.close()
"""


def test_a_message_that_ends_whoever_merges_it_is_put_aside_and_the_next_are_merged(
    node: broker.Node, tmp_path: Path
) -> None:
    """T21, by a kill or an exception: at the fifth delivery at the latest. What waits behind it is not blamed."""
    run, given = new_run(), []
    spec = {"name": "worker-0", "hub": "learner", "topics": [], "office": {"run": run, "max_length": 16}}
    keeper = RabbitHub(Address.parse(node.address), run, max_length=16)
    worker = RabbitMailbox(spec, Address.parse(node.address))  # type: ignore[arg-type]
    for sequence in range(1, 8):
        worker.send("learner", rollout(run, sequence), 10.0)
    assert worker.flush(10.0)
    keeper._wire.close()  # its queue stays
    for _ in range(12):
        process = subprocess.run(
            [sys.executable, "-c", LEARNER, run, str(tmp_path / "tries.json")], input=node.address + "\n", text=True,
            capture_output=True, timeout=30, check=False,
        )  # fmt: skip
        given += process.stdout.split()[1:]
        if process.returncode == 0:
            break
        assert process.returncode in (-signal.SIGKILL, 1) and not process.stderr, process.stderr
    assert process.returncode == 0 and given[-1] == "1", "the last one put one of the two aside"
    counts = {number: given[:-1].count(str(number)) for number in range(1, 8)}
    assert {counts[2], counts[5]} <= {3, 4}, "3 where it had come to another one before that did not begin it"
    assert all(1 <= counts[number] <= 2 for number in (1, 3, 4, 6, 7)), counts
    with stranger(node.address) as channel:
        dead = f"troupe.{run}.dead"
        bodies = [channel.basic_get(dead, auto_ack=True) for _ in range(2)]
        for number, (_, properties, _) in zip((2, 5), bodies, strict=True):
            assert f"its message {number} ended whoever began it" in properties.headers["why"]
        channel.queue_delete(dead)
    worker.close()
