"""Runs over a broker as tests start them, what their journals tell, and a stranger who knows the form."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from command import Command, Run

from troupe import task
from troupe.build import build_algorithm, build_player, rollout_steps
from troupe.roles.cargo import pack
from troupe.transports.amqp import Address
from troupe.transports.desk import RabbitDesk
from troupe.transports.rabbitmq import RabbitMailbox
from troupe.types import Json, Message, Rollout

OPTIONS = {"scheme": "actor-learner", "algo": "impala", "backend": "gymnasium", "envs": 8, "eval_episodes": 2}
# One episode of each environment is one message.
NUMBERED: dict[str, Any] = {"env": "fault_envs:Numbered", "rollout_steps": 50, "env_delay_ms": 2}
JOIN = ("join", "--workers=1", "--once", "--allow=fault_envs")


def train(command: Command, name: str, env: str = "CartPole-v1", **options: object) -> Run:
    given = {**OPTIONS, "via": "rabbitmq", "workers": 0, "until": "minutes=2", **options}
    return command("train", env, "--quiet", f"--name={name}", run=name, **given)


def machines(run: Run, what: str) -> list[str]:
    return [str(line["machine"]) for line in run.lines("machine") if line["what"] == what]


def steps(run: Run) -> int:
    found = run.lines("progress")
    return int(found[-1]["steps"]) if found else 0


def carrier(run: Run) -> dict[str, Any]:
    """The newest figures of what carries messages."""
    found = [line["carrier"] for kind in ("progress", "end") for line in run.lines(kind) if "carrier" in line]
    return dict(found[-1]) if found else {}


def events(run: Run) -> str:
    return "\n".join(str(line["text"]) for line in run.lines("event"))


def numbers(lines: list[dict[str, Json]]) -> dict[str, dict[int, list[int]]]:
    """worker -> number of an environment -> the episodes of it that were merged, in their order (Numbered)."""
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for number in line["returns"]:
            me = int(number)
            found[str(line["worker"])][me].append(round((number - me) * 1000))
    return found


def exact(run: Run) -> dict[str, int]:
    """The last ledger, where every message is accounted for."""
    end = run.lines("end")[-1]
    ledger = end["ledger"]
    assert ledger["messages"] == ledger["trained"] + ledger["rejected"]
    assert ledger["messages"] == end["carrier"]["messages"]
    return dict(ledger)


class Stranger:
    """Asks what is played as `troupe join` does, and then sends whatever the test wants."""

    def __init__(self, broker: str, run: str, name: str = "stranger.actor-900") -> None:
        self.address, self.name = Address.parse(broker), name
        desk = RabbitDesk(self.address)
        [answer] = desk.ask(Message("ask", "", "stranger"), run=run, timeout_s=20.0)
        desk.close()
        self.task = task.read(str(answer.meta["task"]))
        self.config = task.accept(self.task, frozenset({"fault_envs"}))
        player = build_player(self.config, 900, 0)
        spaces = player.envs.observation_space, player.envs.action_space
        algorithm = build_algorithm(self.config, *spaces, rank=900)
        played = algorithm.sift(player.play(algorithm, rollout_steps(self.config)))
        assert isinstance(played, Rollout)
        self.played: Rollout = played
        player.envs.close()
        self.mailbox = RabbitMailbox({**self.task.link, "name": name}, self.address)  # type: ignore[typeddict-item]

    def message(self, sequence: int, sender: str = "", incarnation: int = 0, **arrays: Any) -> Message:
        """A rollout of this run, but for what is given."""
        sender = sender or self.name
        played = replace(self.played, **arrays)
        return pack(played, run=self.task.run, sender=sender, incarnation=incarnation, sequence=sequence, meta={})

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.mailbox.send("learner", message, 20.0)
        assert self.mailbox.flush(20.0)

    def close(self) -> None:
        self.mailbox.close()
