"""How the parts of a scheme come to life: in processes that are kept alive, or one after another in this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from troupe.build import build_algorithm, build_player, env_spec, rollout_steps
from troupe.config import Config, convert, to_dict
from troupe.envs import envpool_has, make_reference
from troupe.errors import EnvironmentFault, TroupeError
from troupe.ports import Mailbox
from troupe.pulse import Phase, Pulse
from troupe.roles.actor import actor
from troupe.roles.cargo import RolloutShape
from troupe.roles.evaluator import evaluator
from troupe.schemes.scheme import Part
from troupe.seeding import Seeds
from troupe.supervisor import Event, Supervisor
from troupe.supervisor import Part as Process
from troupe.transports.memory import MemoryHub, MemoryMailbox
from troupe.transports.shared import SharedHub, SharedMailbox
from troupe.warmup import preloads

EVALUATOR = Part("evaluator", 0)
NEVER_PLAYED = 4  # losses of each worker, without one step by any, after which trying again is no use
LIVES = 1000  # incarnations per life of a run: those of a resumed run never meet those before

Beat = Callable[[int], None]


class Cast(Protocol):
    """The parts beside the main process, and the mailboxes it has towards them."""

    @property
    def learner(self) -> Mailbox:
        """Experience arrives here, weights are published here."""

    @property
    def desk(self) -> Mailbox:
        """Candidates are published here, evaluations arrive here."""

    def wait_ready(self, timeout_s: float) -> None:
        """Until everyone is in place."""

    def turn(self) -> None:
        """Once per turn of the main process. Raises what a part that cannot go on died of."""

    def stop(self, timeout_s: float) -> None:
        """Everyone ends; nothing is left."""


def perform(
    part: Part, config: Config, run: str, mailbox: SharedMailbox | MemoryMailbox, incarnation: int, beat: Beat
) -> Iterator[None]:
    """The loop of one part, built from the config alone."""
    if part.role == "evaluator":
        return _evaluator(config, run, mailbox, incarnation, beat)
    player = build_player(config, part.rank, incarnation, beat)
    algorithm = build_algorithm(config, player.envs.observation_space, player.envs.action_space, rank=part.rank)
    lag = algorithm.lag_rollouts if config.overlap else 0
    return actor(
        algorithm, player, mailbox, run=run, name=part.name, incarnation=incarnation, steps=rollout_steps(config),
        lag_rollouts=lag, send_timeout_s=config.step_timeout_s,
    )  # fmt: skip


def _evaluator(
    config: Config, run: str, mailbox: SharedMailbox | MemoryMailbox, incarnation: int, beat: Beat
) -> Iterator[None]:
    spec = env_spec(config)
    env = make_reference(spec)
    algorithm = build_algorithm(config, env.observation_space, env.action_space)
    env.close()
    rng = Seeds(config.seed).stream("evaluator", 0, incarnation)
    return evaluator(
        algorithm, lambda: make_reference(spec), mailbox, rng, run=run, incarnation=incarnation,
        greedy=config.eval_greedy, beat=lambda: beat(0),
    )  # fmt: skip


def enter(payload: dict[str, Any], fds: list[int]) -> None:
    """Where the process of a part begins."""
    torch.set_num_threads(1)  # before any tensor is made: more processes than cores would trip over their threads
    pulse = Pulse.attach(fds[0])
    mailbox = SharedMailbox(payload["link"], fds[1:], on_wait=pulse.touch)
    config: Config = convert(Config, payload["config"], "the config")

    def beat(steps: int) -> None:
        pulse.add_steps(steps)
        pulse.beat(Phase.PLAY)

    part = Part(payload["role"], payload["rank"])
    loop = perform(part, config, payload["run"], mailbox, payload["first"] + payload["incarnation"], beat)
    beat(0)  # everything is built: ready
    for _ in loop:
        if mailbox.stopping:
            break
    pulse.beat(Phase.DONE)
    mailbox.close()


class ProcessCast:
    """Every part in a process of its own, replaced when it dies or hangs."""

    def __init__(
        self,
        config: Config,
        run: str,
        parts: list[Part],
        *,
        life: int,
        logs: Path,
        topics: dict[str, int],
        shape: RolloutShape,
        weights_bytes: int,
        on_event: Callable[[Event], None],
        supervisor: Supervisor | None = None,
    ) -> None:
        self._experience = SharedHub(shape.nbytes() * 5 // 4 if parts else 1 << 12, topics, down_bytes=1 << 12)
        self._desk = SharedHub(weights_bytes * 2, {"candidate": weights_bytes}, down_bytes=1 << 12, name="desk")
        self.learner, self.desk = self._experience.mailbox(), self._desk.mailbox()
        self.supervisor = supervisor or Supervisor(preload=preloads(envpool=envpool_has(env_spec(config))))
        self._on_event = on_event
        self._losses: Counter[str] = Counter()
        self._given_up: set[str] = set()
        self._players: dict[str, Pulse] = {}
        self.supervisor.listen(self._hear, step_timeout_s=config.step_timeout_s)
        self._pulses: list[Pulse] = []
        for part in [*parts, EVALUATOR]:
            link = (self._desk if part is EVALUATOR else self._experience).connect(part.name)
            pulse = Pulse.create()
            self._pulses.append(pulse)
            if part is not EVALUATOR:
                self._players[part.name] = pulse
            payload = {
                "role": part.role, "rank": part.rank, "run": run, "first": life * LIVES, "link": dict(link.spec),
                "config": to_dict(config),
            }  # fmt: skip
            log = logs / f"{part.name}.log"
            essential = part is EVALUATOR or len(parts) == 1
            self.supervisor.start(
                Process(part.name, "troupe.cast:enter", payload, link.fds, pulse, log, essential=essential)
            )

    def _hear(self, event: Event) -> None:
        """From the supervisor's thread: pass it on, and see whether anybody is left who can play."""
        self._on_event(event)
        if event.part not in self._players:
            return
        self._losses[event.part] += event.kind == "lost"
        self._given_up |= {event.part} if event.kind == "given_up" else set()
        if all(self._losses[name] >= NEVER_PLAYED and not p.read().steps for name, p in self._players.items()):
            self.supervisor.fail(EnvironmentFault(f"no worker ever got to play a step: {event.cause}"))
        elif self._given_up == set(self._players):
            self.supervisor.fail(TroupeError(f"every worker was given up: {event.cause}\n{event.traceback}"))

    def wait_ready(self, timeout_s: float) -> None:
        """Until every process has built what it needs."""
        self.supervisor.wait_ready(timeout_s)

    def turn(self) -> None:
        """Nothing to do but to hear of a failure."""
        self.supervisor.check()

    def stop(self, timeout_s: float) -> None:
        """Ask, wait, kill; then give the memory back."""

        def ask() -> None:
            self._experience.stop()
            self._desk.stop()

        self.supervisor.stop(timeout_s, ask)
        self._experience.close()
        self._desk.close()
        for pulse in self._pulses:
            pulse.close()


class SerialCast:
    """The serial twin: every part is a generator in this process, and takes its turn after the main one."""

    def __init__(self, config: Config, run: str, parts: list[Part], *, life: int) -> None:
        experience, desk = MemoryHub(capacity=4 * max(1, len(parts))), MemoryHub()
        self.learner, self.desk = experience.mailbox("learner"), desk.mailbox("desk")
        self._loops = [
            perform(p, config, run, experience.mailbox(p.name), life * LIVES, lambda steps: None) for p in parts
        ]
        self._loops.append(perform(EVALUATOR, config, run, desk.mailbox("evaluator"), life * LIVES, lambda steps: None))

    def wait_ready(self, timeout_s: float) -> None:
        """Everyone was built in the constructor."""

    def turn(self) -> None:
        """Each part once."""
        for loop in self._loops:
            next(loop)

    def stop(self, timeout_s: float) -> None:
        """Close the environments."""
        for loop in self._loops:
            loop.close()  # type: ignore[attr-defined]
