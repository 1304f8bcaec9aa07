"""Launch: raise the curtain on what a config names, keep house while it learns, and stop when the goal is met."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import numpy as np
import psutil
import torch

from troupe import panel
from troupe.books import Books
from troupe.build import build_algorithm, build_player, env_spec, rollout_shape, rollout_steps
from troupe.cast import LIVES, Cast, ProcessCast, SerialCast
from troupe.checkpoints import SaveFailed
from troupe.config import HELD_FIXED, Config, to_dict
from troupe.envs import make_reference
from troupe.errors import ConfigError, EnvironmentFault, TroupeError
from troupe.eventfiles import with_event_files
from troupe.goal import Goal, parse_goal
from troupe.journal import Journal
from troupe.resolve import check_pairs
from troupe.ports import Algorithm
from troupe.roles.cargo import RolloutShape
from troupe.roles.evaluator import Evaluation
from troupe.roles.play import Player
from troupe.rundir import RunDir
from troupe.schemes import SCHEMES
from troupe.schemes.scheme import Company
from troupe.supervisor import Event, Supervisor
from troupe.types import Array, Message, State
from troupe.watchdog import WatchedEnvironments

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0  # for children to end by themselves
EXIT_TIMEOUT_S = 9.0  # after a first signal everything is over by then, whatever hangs
FINAL_EVALUATION_S = 300.0
HOUSEKEEPING_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: str
    met: bool  # the goal was reached
    reason: str  # "solved", "limit", "interrupted by SIGINT"...
    exit_code: int
    steps: int
    seconds: float
    evaluation: panel.Evaluation | None  # of the final weights, or those that solved it


@dataclass(frozen=True)
class Prepared:
    """All that can be built and refused before anything is on disk."""

    config: Config
    goal: Goal
    algorithm: Algorithm
    shape: RolloutShape

    def facts(self) -> dict[str, Any]:
        """What the manifest says of it: the seed, and the whole network."""
        c, parameters = self.config, self.algorithm.parameters
        return {
            "seed": c.seed, "env": c.env, "algo": c.algo, "scheme": c.scheme, "parameters": parameters.count,
            "network": str(self.algorithm.network).splitlines(), "fingerprint": parameters.fingerprint,
        }  # fmt: skip


def prepare(config: Config) -> Prepared:
    """Build the agent and check everything that `config` asks for."""
    torch.set_num_threads(1)
    check_pairs(config)
    env = make_reference(env_spec(config))
    try:
        threshold = getattr(env.spec, "reward_threshold", None)
        goal = parse_goal(config.until, config.solved_at if config.solved_at is not None else threshold)
        algorithm = build_algorithm(config, env.observation_space, env.action_space)
        return Prepared(config, goal, algorithm, rollout_shape(config, env.observation_space, env.action_space))
    finally:
        env.close()


def train(
    prepared: Prepared, run: RunDir, *, resume: bool, show: bool = True, supervisor: Supervisor | None = None
) -> Outcome:
    """Train in `run`, whose lock is held, until the goal is met, a limit is reached or a signal comes.

    `supervisor`: one that was started early, so that its fork server imported while this process did.
    """
    played = _Show(prepared, run, resume=resume, supervisor=supervisor)
    if not show:
        return played.perform(None)
    print(f"{prepared.algorithm.network}\n{prepared.algorithm.parameters.count:,} parameters", flush=True)
    return played.perform(panel.Panel(played.status))


class _Show:
    """One life of a run: its parts, its books, and the loop that keeps house between two turns of the main role."""

    def __init__(self, prepared: Prepared, run: RunDir, *, resume: bool, supervisor: Supervisor | None) -> None:
        self.config, self.goal, self.algorithm = prepared.config, prepared.goal, prepared.algorithm
        self.shape, self.run, self.supervisor = prepared.shape, run, supervisor
        self.events: deque[str] = deque(maxlen=20)
        self.heard: SimpleQueue[Event] = SimpleQueue()
        self.early: list[tuple[str, dict[str, Any]]] = []  # journal lines from before the curtain rises
        self.signals = _Signals()
        self.books = Books(self, self.goal, self.config.horizon, me="worker-0" if self._plays_here() else "learner")
        self.journal: Journal | None = None
        self.last_evaluation: panel.Evaluation | None = None
        self.best = -math.inf
        self.asked_s: float | None = None  # training time at which the evaluation under way was asked for
        self.evaluated_s = 0.0
        self.saved_s = 0.0
        self.solved: panel.Evaluation | None = None
        self.play_state: State | None = None
        if resume:
            self._restore()

    def _plays_here(self) -> bool:
        return SCHEMES[self.config.scheme]().plays_here

    # Before the curtain ----------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        found = self.run.load_latest({key: _plain(getattr(self.config, key)) for key in HELD_FIXED})
        best = self.run.load_best()
        if best is not None:
            self.best = float(best.info.get("mean", -math.inf))
        if found is None:
            return
        for name, why in found.skipped.items():
            self.say(f"checkpoint {name} was skipped: {why}")
        self.algorithm.parameters.restore(found.weights, found.state.get("parameters"))
        self.algorithm.restore(found.state.get("algorithm"))
        self.books.restore(found.state.get("books"), found.version)
        if self._plays_here() and "player" in found.state.values:
            self.play_state = found.state.get("player")
        self.saved_s = self.evaluated_s = self.books.seconds_before
        self.say(f"resumed at {found.steps:,} steps, version {found.version}")

    def _player(self) -> Player | None:
        if not self._plays_here():
            return None
        player = build_player(self.config, 0, self.books.life * LIVES)
        if self.play_state is not None and not player.restore(self.play_state):
            self.say("open episodes cannot be rebuilt with this back end: they begin anew, all else is exact")
        player.envs = WatchedEnvironments(player.envs, self.config.step_timeout_s, self._hung)
        return player

    def _hung(self, verb: str) -> None:
        """From the watchdog's thread: the main one will not come back, and the fork server ends what it started."""
        waited = f"{self.config.env} did not return from {verb} within {self.config.step_timeout_s:g} s"
        with suppress(Exception):
            self.write("end", reason=waited, exit_code=EnvironmentFault.exit_code)
            if self.journal:
                self.journal.flush()
            sys.stderr.write(f"troupe: {waited}: if it is only slow, allow more with --step-timeout-s\n")
            sys.stderr.flush()
        os._exit(EnvironmentFault.exit_code)

    def _cast(self) -> Cast:
        config, parts = self.config, SCHEMES[self.config.scheme]().parts(self.config)
        weights = self.algorithm.parameters.vector.numpy().nbytes + 4096 + 64 * len(parts)
        if config.via == "memory":
            return SerialCast(config, self.run.name, parts, life=self.books.life)
        return ProcessCast(
            config, self.run.name, parts, life=self.books.life, logs=self.run.logs, shape=self.shape,
            topics=dict(SCHEMES[config.scheme]().topics(weights)), weights_bytes=weights, on_event=self.heard.put, supervisor=self.supervisor,
        )  # fmt: skip

    # The loop --------------------------------------------------------------------------------------------------------

    def perform(self, view: panel.Panel | None) -> Outcome:
        """From the first process to the last."""
        with self.signals.caught():
            cast, player = self._cast(), None
            try:
                player = self._player()
                cast.wait_ready(START_TIMEOUT_S)
                self._raise_curtain()
                with view if view else suppress():
                    return self._keep_house(cast, player)
            except TroupeError as e:
                raise _users_own(e) from e
            finally:
                cast.stop(STOP_TIMEOUT_S)
                if player:
                    player.envs.close()
                self._drain_events()
                if self.journal:
                    self.journal.close()

    def _raise_curtain(self) -> None:
        """Everybody is in place: the training clock starts."""
        self.journal = with_event_files(self.run.journal(), self.run.path, self.config.tensorboard)
        self.books.begin()
        since_command = time.time() - psutil.Process().create_time()
        self.write("start", command_to_first_step_s=round(since_command, 3), life=self.books.life, steps=self.books.steps)
        for kind, fields in self.early:
            self.write(kind, **fields)

    def _keep_house(self, cast: Cast, player: Player | None) -> Outcome:
        company = Company(
            self.config, self.run.name, self.algorithm, self.books, rollout_steps(self.config), player,
            cast.learner, self.shape,
        )  # fmt: skip
        checked = 0.0
        for _ in SCHEMES[self.config.scheme]().main(company):
            cast.turn()
            now = time.monotonic()
            if now - checked < HOUSEKEEPING_S and not self.goal.spent(self.books.steps, self.books.seconds()):
                continue
            checked = now
            self._drain_events()
            self._hear_evaluations(cast)
            if self.signals.number:
                return self._end(f"interrupted by {signal.Signals(self.signals.number).name}", player)
            if self.solved:
                return self._end("solved", player)
            if self.goal.spent(self.books.steps, self.books.seconds()):
                self.books.tick()
                self._evaluate_at_the_end(cast)
                return self._end("solved" if self.solved else "limit", player)
            self._ask_for_evaluation(cast)
            if self.books.seconds() - self.saved_s >= self.config.checkpoint_every_s:
                self._save(player)
            self.books.tick()
        raise TroupeError("the main role ended by itself")

    def _end(self, reason: str, player: Player | None) -> Outcome:
        seconds = self.books.seconds()
        met = bool(self.solved) or (reason == "limit" and self.goal.score is None)
        code = 0 if met else 128 + self.signals.number if self.signals.number else 3
        self._save(player)
        rate = self.books.steps / seconds if seconds else 0.0
        self.write(
            "end", reason=reason, steps=self.books.steps, seconds=seconds, steps_per_s=rate, exit_code=code,
            version=self.books.version, ledger=self.books.ledger,
        )  # fmt: skip
        evaluation = self.solved or self.last_evaluation
        return Outcome(str(self.run.path), met, reason, code, self.books.steps, seconds, evaluation)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def _ask_for_evaluation(self, cast: Cast) -> None:
        if self.asked_s is not None:
            return
        now, mean, wanted = self.books.seconds(), self.books.mean(), self.config.eval_from
        wanted = self.goal.score if wanted is None else wanted
        promising = self.goal.score is not None and wanted is not None and mean is not None and mean >= wanted
        if promising or now - self.evaluated_s >= self.config.eval_every_s:
            self._ask(cast, give_up_below=self.goal.score)

    def _ask(self, cast: Cast, *, give_up_below: float | None) -> None:
        parameters = self.algorithm.parameters
        meta = {
            "steps": self.books.steps, "episodes": self.config.eval_episodes,
            "give_up_below": -math.inf if give_up_below is None else give_up_below,
        }  # fmt: skip
        self.asked_s = self.books.seconds()
        arrays = {"weights": parameters.weights()}
        cast.desk.publish("candidate", Message("candidate", self.run.name, "desk", 0, 0, parameters.version, meta, arrays))

    def _hear_evaluations(self, cast: Cast, timeout_s: float = 0.0) -> None:
        message = cast.desk.receive(timeout_s)
        if message is None:
            return
        self.asked_s, self.evaluated_s = None, self.books.seconds()
        meta, complete = message.meta, bool(message.meta["complete"])
        result = Evaluation(message.arrays["returns"], message.arrays["lengths"], complete, float(meta["seconds"]))
        mean, half = result.mean, result.half_interval
        seen = panel.Evaluation(int(meta["steps"]), mean, result.sd, len(result.returns), mean - half, mean + half)
        self.last_evaluation = seen
        figures = {
            "steps": seen.steps, "version": message.version, "mean": mean, "sd": seen.sd, "episodes": seen.episodes,
            "low": seen.low, "high": seen.high, "complete": complete, "seconds": result.seconds,
            "greedy": self.config.eval_greedy,
        }  # fmt: skip
        self.write("eval", **figures, returns=result.returns)
        if complete and mean > self.best:
            self.best = mean
            self._save_best(message, figures)
        if complete and self.goal.score is not None and mean >= self.goal.score:
            self.solved = seen
            self.write("solved", **figures)

    def _evaluate_at_the_end(self, cast: Cast) -> None:
        """The final weights' figure, whatever the goal was."""
        deadline = time.monotonic() + FINAL_EVALUATION_S
        self.say("evaluating the final weights")
        if self.asked_s is not None:  # one of older weights is under way: let it end first
            self._wait_for_evaluation(cast, deadline)
        if not self.solved and not self.signals.number:
            self._ask(cast, give_up_below=None)
            self._wait_for_evaluation(cast, deadline)

    def _wait_for_evaluation(self, cast: Cast, deadline: float) -> None:
        while self.asked_s is not None and not self.signals.number and time.monotonic() < deadline:
            cast.turn()
            self._hear_evaluations(cast, timeout_s=0.1)
            self._drain_events()

    # What is kept ----------------------------------------------------------------------------------------------------

    def _info(self) -> dict[str, Any]:
        return {key: _plain(getattr(self.config, key)) for key in HELD_FIXED}

    def _save(self, player: Player | None) -> None:
        parameters, state = self.algorithm.parameters, State()
        state.put("parameters", parameters.state())
        state.put("algorithm", self.algorithm.state())
        state.put("books", self.books.state())
        if player is not None:
            state.put("player", player.state())
        self.saved_s = self.books.seconds()
        self._try(
            lambda: self.run.save(self.books.steps, parameters.version, state, parameters.weights(), self._info())
        )

    def _save_best(self, message: Message, figures: dict[str, Any]) -> None:
        weights: Array = np.asarray(message.arrays["weights"])
        info = {**self._info(), **figures}
        self._try(lambda: self.run.save_best(figures["steps"], message.version, State(), weights, info))

    def _try(self, save: Any) -> None:
        try:
            path = save()
            self.write("checkpoint", path=f"{path.parent.name}/{path.name}")
        except SaveFailed as e:
            self.say(str(e))

    # What is said ----------------------------------------------------------------------------------------------------

    def write(self, kind: str, **fields: Any) -> None:
        """Pages: a journal line; kept until there is a journal."""
        if self.journal is None:
            self.early.append((kind, fields))
        else:
            self.journal.write(kind, **fields)

    def say(self, text: str) -> None:
        """An event that a person should see."""
        self.events.append(text)
        self.write("event", text=text)

    def _drain_events(self) -> None:
        with suppress(Empty):
            while True:
                event = self.heard.get_nowait()
                fields = {"part": event.part, "pid": event.pid, "incarnation": event.incarnation, "cause": event.cause}
                self.write("part", what=event.kind, at_s=event.at_s, **fields, traceback=event.traceback)
                if event.kind in ("lost", "given_up", "replaced", "server_lost", "killed"):
                    cause = f": {event.cause}" if event.cause else ""
                    self.events.append(f"{event.part or 'fork server'} {event.kind.replace('_', ' ')}{cause}")
                if event.kind == "lost" and event.part.startswith("evaluator"):
                    self.asked_s = None  # its answer will not come

    def status(self) -> panel.Status:
        """For the panel, from its own thread."""
        b, c = self.books, self.config
        score = self.goal.score
        return panel.Status(
            run=self.run.name, algo=c.algo, scheme=c.scheme, env=c.env, workers=c.workers, steps=b.steps,
            goal=str(self.goal), progress=None if score is not None else b.progress(), return_mean=b.mean(),
            return_windows=list(b.means), evaluation=self.last_evaluation, steps_per_s=b.steps_per_s,
            waiting_on=b.waiting_on(),
            divisions={name: panel.Division(**division.shares()) for name, division in list(b.divisions.items())},
            lag_median=b.lag(0.5), lag_p95=b.lag(0.95), events=list(self.events), elapsed_s=b.seconds(),
        )  # fmt: skip


class _Signals:
    """A first signal asks for an orderly end, a second one forces it, and so does a first that is not heeded."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch SIGINT and SIGTERM inside the block; only the main thread can, elsewhere they stay the caller's."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self._force()
        self.number = number
        timer = threading.Timer(EXIT_TIMEOUT_S, self._force)
        timer.daemon = True
        timer.start()

    def _force(self) -> None:
        with suppress(Exception):  # nothing may keep us here; the fork server ends its children when we are gone
            sys.stderr.write("troupe: forced to stop\n")
        os._exit(128 + self.number)


def _users_own(error: TroupeError) -> TroupeError:
    """A worker that was given up since its environment failed is the user's mistake, told in one sentence."""
    for line in reversed(str(error).splitlines()):
        _, found, sentence = line.partition("EnvironmentFault: ")
        if found:
            return EnvironmentFault(sentence)
        _, found, sentence = line.partition("MissingExtra: ")
        if found:
            return ConfigError(sentence)
    return error


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
