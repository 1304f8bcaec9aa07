"""troupe join: a machine that plays for whoever leads a run on a broker, run after run."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from troupe import task as tasks
from troupe.build import env_spec
from troupe.config import Config
from troupe.envs import envpool_has
from troupe.errors import BadMessage, ConfigError, PeerLost, TroupeError
from troupe.parts import Stage
from troupe.pulse import Pulse
from troupe.schemes.scheme import Part
from troupe.signals import Signals
from troupe.supervisor import Event, Supervisor
from troupe.supervisor import Part as Process
from troupe.task import Task
from troupe.transports.shared import SharedHub
from troupe.types import Message
from troupe.warmup import preloads

ASK_S: Final = 2.0  # that learners have to answer
PROTOCOL_S: Final = 5.0  # between two protocols
GONE_S: Final = 60.0  # without an answer, after which a learner is taken for gone
STOP_S: Final = 5.0  # that workers have to end by themselves
_SMALL: Final = 1 << 12  # bytes of a ring that nothing passes: its hub only says stop


class Desk(Protocol):
    """The broker, as a machine sees it that plays in no run yet."""

    def ask(self, message: Message, *, run: str | None, timeout_s: float) -> list[Message]:
        """What the learner of `run` answers, or those of all runs."""

    def close(self) -> None: ...


@dataclass
class Machine:
    """This machine: what it is called, how many workers it has, whose code it may run."""

    address: str  # of the broker, password and all: for the workers' own connections
    workers: int
    run: str  # play in this one only; "": in any
    once: bool  # one run, not one after another
    allowed: frozenset[str]
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    name: str = field(default_factory=lambda: f"{_host()}-{secrets.token_hex(3)}")
    refused: dict[str, str] = field(default_factory=dict)  # runs that cannot be played here, and why

    def message(self, kind: str, run: str = "", **meta: Any) -> Message:
        """What this machine says."""
        return Message(kind, run, self.name, meta=meta)


def join(machine: Machine, desk: Desk) -> int:
    """Wait for a task, check it, play until the learner is done; the exit code."""
    signals = Signals()
    with signals.caught():
        waiting = False
        while not signals.number:
            task = _find(machine, desk)
            if task is None:
                if not waiting:
                    machine.say(f"{machine.name} waits for a learner{f' of run {machine.run}' * bool(machine.run)}")
                waiting = True
                continue
            waiting = False
            try:
                config = tasks.accept(task, machine.allowed)
            except TroupeError as e:
                machine.refused[task.run] = str(e)
                desk.ask(machine.message("refuse", task.run, why=str(e)), run=task.run, timeout_s=ASK_S)
                if machine.once or machine.run:
                    raise ConfigError(str(e)) from e
                print(f"troupe: {e}", file=sys.stderr)
                continue
            rank = _place(machine, desk, task)
            if rank is None:
                continue
            _Engagement(machine, desk, task, config, rank, signals).play()
            if machine.once:
                break
    return 128 + signals.number if signals.number else 0


def _find(machine: Machine, desk: Desk) -> Task | None:
    """The first task that is offered and was not refused before."""
    for answer in desk.ask(machine.message("ask", machine.run), run=machine.run or None, timeout_s=ASK_S):
        try:
            task = tasks.read(str(answer.meta.get("task")))
        except BadMessage as e:
            print(f"troupe: {answer.sender} of run {answer.run}: {e}", file=sys.stderr)
            continue
        if task.run not in machine.refused:
            return task
    return None


def _place(machine: Machine, desk: Desk, task: Task) -> int | None:
    """The rank of this machine's first worker; None where the learner went away meanwhile."""
    for answer in desk.ask(machine.message("join", task.run, workers=machine.workers), run=task.run, timeout_s=ASK_S):
        rank = answer.meta.get("rank")
        if isinstance(rank, int) and rank >= 0:
            return rank
    return None


class _Engagement:
    """One run, from the first worker to the last."""

    def __init__(self, machine: Machine, desk: Desk, task: Task, config: Config, rank: int, signals: Signals) -> None:
        self.machine, self.desk, self.task, self.config, self.rank = machine, desk, task, config, rank
        self.signals = signals
        self.pulses: list[Pulse] = []
        self.finished = self.lost = 0
        self.cause = ""

    def play(self) -> None:
        """Until the learner is done or gone, or somebody stops this machine."""
        machine, run = self.machine, self.task.run
        self.began_s = time.monotonic()
        machine.say(f"{machine.name} plays {self.config.env} for run {run} with {machine.workers} workers")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="troupe-join-")))
            hub = SharedHub(_SMALL, {}, down_bytes=_SMALL, name="machine")
            stack.callback(hub.close)
            pool = envpool_has(env_spec(self.config))
            supervisor = Supervisor(
                self._hear, step_timeout_s=self.config.step_timeout_s, preload=preloads(envpool=pool)
            )
            stack.callback(supervisor.stop, STOP_S, hub.stop)
            stage = Stage(self.config, run, self.task.goal, self.task.life, folder)
            for number in range(machine.workers):
                self._start(supervisor, hub, stage, Part("actor", self.rank + number, at=machine.name))
            why = self._watch(supervisor)
        self._tell(last=True)
        machine.say(f"{why}: {self._steps():,} steps in {time.monotonic() - self.began_s:.0f} s")
        for pulse in self.pulses:
            pulse.close()

    def _start(self, supervisor: Supervisor, hub: SharedHub, stage: Stage, part: Part) -> None:
        pulse, stop = Pulse.create(), hub.connect(part.name)
        self.pulses.append(pulse)
        broker = {**self.task.link, "broker": self.machine.address, "name": part.name}
        payload = {
            "role": part.role, "rank": part.rank, "at": part.at, "stage": stage.plain(),
            "links": [dict(stop.spec), broker], "hub": None,
        }  # fmt: skip
        log = stage.folder / f"{part.name}.log"
        supervisor.start(Process(part.name, "troupe.parts:enter", payload, stop.fds, pulse, log))

    def _watch(self, supervisor: Supervisor) -> str:
        """Tell the learner how it goes, until there is a reason to stop; that reason."""
        heard_s = told_s = time.monotonic()
        while True:
            supervisor.check()
            now = time.monotonic()
            if self.signals.number:
                return "stopped"
            if self.finished == self.machine.workers:
                return f"run {self.task.run} is done"
            if now - heard_s > GONE_S:
                return f"the learner of run {self.task.run} has not answered for {GONE_S:g} s"
            if now - told_s < PROTOCOL_S:
                time.sleep(0.05)
                continue
            told_s = now
            if self._tell(last=False):
                heard_s = time.monotonic()

    def _tell(self, *, last: bool) -> bool:
        """The protocol; whether the learner heard it."""
        message = self.machine.message(
            "protocol", self.task.run, workers=self.machine.workers, steps=self._steps(), lost=self.lost,
            seconds=round(time.monotonic() - self.began_s, 3), cause=self.cause, last=last,
        )  # fmt: skip
        try:
            return bool(self.desk.ask(message, run=self.task.run, timeout_s=ASK_S))
        except PeerLost:
            return False

    def _steps(self) -> int:
        return sum(pulse.read().steps for pulse in self.pulses)

    def _hear(self, event: Event) -> None:
        """From the supervisor's thread."""
        self.finished += event.kind in ("finished", "given_up")
        if event.kind == "lost":
            self.lost, self.cause = self.lost + 1, f"{event.part}: {event.cause}"
            print(f"troupe: {event.part} was lost: {event.cause}", file=sys.stderr)


def _host() -> str:
    """This machine's name, of letters that may stand in the name of a queue."""
    name = socket.gethostname().partition(".")[0] or f"machine-{os.getpid()}"
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)[:32]
