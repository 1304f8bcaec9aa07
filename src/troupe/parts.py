"""The parts of a run: how each is built from the stage alone, and where its process begins."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec
import torch

from troupe.build import build_algorithm, build_player, env_spec, rollout_steps
from troupe.commons import Commons
from troupe.config import Config, convert, to_dict
from troupe.envs import make_reference
from troupe.errors import PeerLost
from troupe.goal import Goal
from troupe.parameters import Optimiser
from troupe.ports import Mailbox
from troupe.pulse import Phase, Pulse
from troupe.region import Region
from troupe.roles.actor import actor
from troupe.roles.evaluator import evaluator
from troupe.roles.report import Reporter
from troupe.roles.worker import worker
from troupe.schemes import SCHEMES
from troupe.schemes.parameter_server import serve
from troupe.schemes.scheme import Links, Part, VectorScheme, Who
from troupe.seeding import Seeds
from troupe.transports.shared import HubMailbox, SharedMailbox

EVALUATOR: Final = Part("evaluator", 0, essential=True)
PLAYERS: Final = ("actor", "worker")  # the roles that play
LIVES: Final = 1000  # incarnations per life of a run: those of a resumed run never meet those before
MEMORY_MESSAGES: Final = 4  # that may wait of each part where all take turns in one thread
_NAP_S: Final = 0.01  # of a worker that has nothing to do

Beat = Callable[[int], None]


@dataclass(frozen=True)
class Stage:
    """What every part of a run is built from, besides its mailboxes."""

    config: Config
    run: str
    goal: Goal
    life: int  # how often the run was resumed
    folder: Path  # the parts' own, while the run runs
    commons: Commons | None = None
    replay: Region | None = None  # one memory for the experience of all workers

    def __enter__(self) -> Stage:
        """For the process that made it; what a killed one left is swept away."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left of it."""
        for region in (self.commons, self.replay):
            if region is not None:
                region.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def plain(self) -> dict[str, Any]:
        """All but the memory, which crosses into processes as descriptors."""
        return {
            "run": self.run, "config": to_dict(self.config), "goal": asdict(self.goal), "life": self.life,
            "folder": str(self.folder), "commons": self.commons.spec if self.commons else None,
            "replay": self.replay is not None,
        }  # fmt: skip

    @classmethod
    def rebuilt(cls, plain: dict[str, Any], fds: Iterator[int]) -> Stage:
        """The same in another process; takes the descriptors of the memory from `fds`."""
        config: Config = convert(Config, plain["config"], "the config")
        return cls(
            config, plain["run"], msgspec.convert(plain["goal"], Goal), plain["life"], Path(plain["folder"]),
            Commons(next(fds), plain["commons"]) if plain["commons"] else None,
            Region(next(fds)) if plain["replay"] else None,
        )  # fmt: skip


def perform(
    part: Part, stage: Stage, links: Links, incarnation: int, beat: Beat, on_wait: Callable[[], None]
) -> Iterator[None]:
    """The loop of one part, built from the stage alone. `links` are its mailboxes, by hub."""
    who = Who(stage.run, part.name, part.rank, incarnation, on_wait, stage.folder)
    if part.role == "evaluator":
        return _evaluator(stage.config, stage.run, links["desk"], incarnation, beat)
    if part.role == "server":
        return _server(stage, links, who)
    if part.role == "worker":
        return _worker(stage, links, who, beat)
    return _actor(stage, links, who, beat)


def _actor(stage: Stage, links: Links, who: Who, beat: Beat) -> Iterator[None]:
    config = stage.config
    player = build_player(config, who.rank, who.incarnation, beat)
    algorithm = build_algorithm(config, player.envs.observation_space, player.envs.action_space, rank=who.rank)
    lag = algorithm.lag_rollouts if config.overlap else 0
    if config.via == "memory":  # one thread cannot wait for itself: no more than the mailbox holds of each actor
        lag = min(lag, MEMORY_MESSAGES - 1)
    return actor(
        algorithm, player, links["learner"], run=who.run, name=who.name, incarnation=who.incarnation,
        steps=rollout_steps(config), lag_rollouts=lag, send_timeout_s=config.step_timeout_s,
    )  # fmt: skip


def _worker(stage: Stage, links: Links, who: Who, beat: Beat) -> Iterator[None]:
    """Plays and learns from the moment the curtain rises until the budget is spent."""
    config, goal, commons = stage.config, stage.goal, stage.commons
    assert commons is not None
    player = build_player(config, who.rank, who.incarnation, beat)
    spaces = player.envs.observation_space, player.envs.action_space
    algorithm = build_algorithm(
        config, *spaces, rank=who.rank, replay_memory=stage.replay.view if stage.replay else None
    )
    seat = commons.seat(who.rank)
    seat.sit(who.incarnation)

    def spent() -> bool:
        return goal.spent(commons.steps(), commons.seconds())

    def progress() -> float:
        return goal.progress(commons.steps(), commons.seconds(), config.horizon)

    ledger = Reporter(
        links["learner"], seat, progress, run=who.run, name=who.name, incarnation=who.incarnation,
        timeout_s=config.step_timeout_s,
    )  # fmt: skip

    def on_wait() -> None:
        who.on_wait()
        if spent():  # those we wait for may have ended already
            ledger.settle()

    scheme = cast(VectorScheme, SCHEMES[config.scheme]())
    exchange = scheme.exchange(config, seat, links, replace(who, on_wait=on_wait))
    loop = worker(algorithm, exchange, player, ledger, steps=rollout_steps(config))

    def turns() -> Iterator[None]:
        while True:
            if commons.begun and not spent():
                next(loop)
            else:
                ledger.settle()
                beat(0)
                links["learner"].receive(_NAP_S)  # nothing comes: a wait that a stop ends
            yield

    return turns()


def _server(stage: Stage, links: Links, who: Who) -> Iterator[None]:
    config, commons = stage.config, stage.commons
    assert commons is not None
    seat = commons.seat(config.workers + who.rank)
    seat.sit(who.incarnation)
    return serve(config, seat, who.rank, Optimiser(config.optimiser), links["self"], links["learner"], who)


def _evaluator(config: Config, run: str, mailbox: Mailbox, incarnation: int, beat: Beat) -> Iterator[None]:
    spec = env_spec(config)
    env = make_reference(spec)
    algorithm = build_algorithm(config, env.observation_space, env.action_space)
    env.close()
    rng = Seeds(config.seed).stream("evaluator", 0, incarnation)
    return evaluator(
        algorithm, lambda: make_reference(spec), mailbox, rng, run=run, incarnation=incarnation,
        greedy=config.eval_greedy, beat=lambda: beat(0),
    )  # fmt: skip


class Line(Mailbox, Protocol):
    """A mailbox of a part, which also hears when the run stops."""

    hub: str

    @property
    def stopping(self) -> bool: ...


class Lines:
    """All mailboxes of a process that plays a part, and its pulse while they wait."""

    def __init__(self, specs: list[Any], given: Iterator[int], pulse: Pulse) -> None:
        """`given`: the descriptors of those that are links to a hub of this machine."""
        self._pulse = pulse
        self.all: list[Line] = []
        for spec in specs:
            if "broker" in spec:
                self.all.append(self._beyond(spec))
            else:
                self.all.append(SharedMailbox(spec, [next(given) for _ in range(4)], on_wait=pulse.touch))

    def _beyond(self, spec: Any) -> Line:
        """Towards a hub beyond a broker."""
        from troupe.transports.amqp import Address  # brings pika, which few runs need
        from troupe.transports.rabbitmq import RabbitMailbox

        return RabbitMailbox(spec, Address.parse(spec["broker"]), self.on_wait)

    @property
    def stopping(self) -> bool:
        """Somebody told this process to end."""
        return any(mailbox.stopping for mailbox in self.all)

    def on_wait(self) -> None:
        """A sign of life; ends the wait, by an exception, when the run is stopping."""
        if self.stopping:
            raise PeerLost("the run is stopping")
        self._pulse.touch()


def enter(payload: dict[str, Any], fds: list[int]) -> None:
    """Where the process of a part begins. `fds`: its pulse, the stage's memory, its links, the hub it is lent."""
    torch.set_num_threads(1)  # before any tensor is made: more processes than cores would trip over their threads
    given = iter(fds)
    pulse = Pulse.attach(next(given))
    stage = Stage.rebuilt(payload["stage"], given)
    lines = Lines(payload["links"], given, pulse)
    links: dict[str, Mailbox] = {mailbox.hub: mailbox for mailbox in lines.all}
    if payload["hub"]:
        links["self"] = HubMailbox.attach(payload["hub"], given)

    def beat(steps: int) -> None:
        pulse.add_steps(steps)
        pulse.beat(Phase.PLAY)

    incarnation = stage.life * LIVES + payload["incarnation"]
    part = Part(payload["role"], payload["rank"], at=payload["at"])
    loop = perform(part, stage, links, incarnation, beat, lines.on_wait)
    beat(0)  # everything is built: ready
    try:
        for _ in loop:
            pulse.touch()
            if lines.stopping:
                break
    except PeerLost:
        if not lines.stopping:
            raise
    pulse.beat(Phase.DONE)
    for mailbox in lines.all:
        mailbox.close()
