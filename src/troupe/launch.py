"""Launch: raise the curtain on what a config names, keep house while it learns, and stop when the goal is met."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe import panel
from troupe.average import Average
from troupe.books import Books
from troupe.build import build_player, rollout_steps
from troupe.cast import Cast, ProcessCast, SerialCast
from troupe.checkpoints import SaveFailed
from troupe.commons import Commons
from troupe.config import HELD_FIXED
from troupe.errors import ConfigError, EnvironmentFault, TroupeError
from troupe.eventfiles import EventFiles
from troupe.journal import Journal
from troupe.parts import LIVES, Stage
from troupe.prepare import Prepared
from troupe.region import Region, reserve
from troupe.reviews import Reviews
from troupe.roles.play import Player
from troupe.rundir import RunDir
from troupe.schemes import SCHEMES
from troupe.schemes.scheme import Company
from troupe.signals import Signals
from troupe.supervisor import Event, Supervisor
from troupe.task import describe
from troupe.transports import transport
from troupe.types import Array, Message, State
from troupe.watchdog import WatchedEnvironments

if TYPE_CHECKING:
    from troupe.front import Front

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0  # for children to end by themselves
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
        self.scheme, self.replay_bytes = SCHEMES[self.config.scheme](), prepared.replay_bytes
        self.events: deque[str] = deque(maxlen=20)
        self.heard: SimpleQueue[Event] = SimpleQueue()
        self.early: list[tuple[str, dict[str, Any]]] = []  # journal lines from before the curtain rises
        self.signals = Signals()
        me = "worker-0" if self.scheme.plays_here else "learner"
        self.books = Books(self, self.goal, self.config.horizon, me=me)
        self.journal: Journal | EventFiles | None = None
        self.saved_s = 0.0
        self.play_state: State | None = None
        self.front_state: State | None = None
        self.spaces = prepared.spaces
        self.front: Front | None = None  # where the run is led over a broker
        self.refresh: Callable[[], None] = lambda: None  # before anything is saved of a vector that others change
        if resume:
            self._restore()
        if transport(self.config.via) == "rabbitmq":  # where messages outlive who sent them
            self.books.life = max(self.books.life, run.begin_life())
        self.average = Average(self.algorithm.parameters, self.config.average, self.books.steps)
        self.reviews = Reviews(self.config, run.name, self.goal, self.books, self.average, self._save_best)
        if resume and (best := run.load_best()) is not None:
            self.reviews.best = float(best.info.get("merit", best.info.get("mean", -math.inf)))

    # Before the curtain ----------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        found = self.run.load_latest({key: _plain(getattr(self.config, key)) for key in HELD_FIXED})
        if found is None:
            return
        for name, why in found.skipped.items():
            self.say(f"checkpoint {name} was skipped: {why}")
        self.algorithm.parameters.restore(found.weights, found.state.get("parameters"))
        self.algorithm.restore(found.state.get("algorithm"))
        self.books.restore(found.state.get("books"), found.version)
        if self.scheme.plays_here and "player" in found.state.values:
            self.play_state = found.state.get("player")
        if "front" in found.state.values:
            self.front_state = found.state.get("front")
        self.saved_s = self.books.seconds_before
        self.say(f"resumed at {found.steps:,} steps, version {found.version}")

    def _player(self) -> Player | None:
        if not self.scheme.plays_here:
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

    def _stage(self) -> Stage:
        commons = None
        if self.scheme.shares_vector:
            seats = len(self.scheme.parts(self.config))
            commons = Commons.create(self.algorithm.parameters, seats, steps=self.books.steps)
        return Stage(
            self.config, self.config.share or self.run.name, self.goal, self.books.life, self.run.path / "stage",
            commons,
            Region(reserve("troupe-replay", self.replay_bytes)) if self.replay_bytes else None,
        )  # fmt: skip

    def _cast(self, stage: Stage) -> Cast:
        parts = self.scheme.parts(self.config)
        if self.config.via == "memory":
            return SerialCast(stage, parts)
        weights = self.algorithm.parameters.vector.numpy().nbytes + 4096 + 64 * len(parts)
        topics = dict(self.scheme.topics(weights))
        if transport(self.config.via) == "rabbitmq":
            from troupe import front  # brings pika, which few runs need

            tries = self.run.path / "tries.json"
            self.front = front.Front(self.config, stage.run, topics, self.shape.nbytes(), tries, self.front_state)
        return ProcessCast(
            stage, parts, logs=self.run.logs, shape=self.shape, topics=topics, weights_bytes=weights,
            on_event=self.heard.put, supervisor=self.supervisor, learner=self.front,
        )  # fmt: skip

    # The loop --------------------------------------------------------------------------------------------------------

    def perform(self, view: panel.Panel | None) -> Outcome:
        """From the first process to the last."""
        with self.signals.caught(), self._stage() as stage:
            cast, player = self._cast(stage), None
            try:
                player = self._player()
                cast.wait_ready(START_TIMEOUT_S)
                self._raise_curtain(stage)
                with view or nullcontext():
                    return self._keep_house(cast, player, stage)
            except TroupeError as e:
                raise _users_own(e) from e
            finally:
                if self.front:
                    self.front.failed = sys.exc_info()[0] is not None
                cast.stop(STOP_TIMEOUT_S)
                if player:
                    player.envs.close()
                self._drain_events()
                if self.journal:
                    self.journal.close()

    def _raise_curtain(self, stage: Stage) -> None:
        """Everybody is in place: the training clock starts."""
        journal = self.run.journal()
        self.journal = EventFiles(journal, self.run.path / "tensorboard") if self.config.tensorboard else journal
        self.books.begin()
        if stage.commons:
            stage.commons.begin(self.books.seconds_before)
        self.write(
            "start", command_to_first_step_s=round(_process_age_s(), 3), life=self.books.life, steps=self.books.steps
        )
        for kind, fields in self.early:
            self.write(kind, **fields)
        if self.front:
            place = stage.run, self.goal, self.books.life
            task = describe(self.config, *place, self.algorithm, self.spaces, self.front.link())
            self.front.invite(task, self.config.workers, self.write, self.say)

    def _keep_house(self, cast: Cast, player: Player | None, stage: Stage) -> Outcome:
        company = Company(
            self.config, stage.run, self.algorithm, self.books, rollout_steps(self.config), player,
            cast.learner, self.shape, stage.commons, *([self.front.pace] if self.front else []),
        )  # fmt: skip
        self.refresh = company.refresh
        checked = 0.0
        for _ in self.scheme.main(company):
            cast.turn()
            self.average.follow(self.books.steps)
            now = time.monotonic()
            if now - checked < HOUSEKEEPING_S and not self.goal.spent(self.books.steps, self.books.seconds()):
                continue
            checked = now
            self._drain_events()
            if self.front:
                self.front.attend()
            self.reviews.hear(cast.desk)
            if self.signals.number:
                return self._end(f"interrupted by {signal.Signals(self.signals.number).name}", player)
            if self.reviews.solved:
                return self._end("solved", player)
            if self.goal.spent(self.books.steps, self.books.seconds()):
                return self._end_with_a_review(cast, player)
            self.reviews.ask_if_due(cast.desk)
            if self.books.seconds() - self.saved_s >= self.config.checkpoint_every_s:
                self._save(player)
            self.books.tick(self.front.figures if self.front else None)
        raise TroupeError("the main role ended by itself")

    def _end_with_a_review(self, cast: Cast, player: Player | None) -> Outcome:
        """The budget is spent: the training clock stops, and the final weights get their figure."""
        self.books.tick()
        self.books.stop()
        self.say("evaluating the final weights")

        def wait() -> bool:
            cast.turn()
            self._drain_events()
            return not self.signals.number

        self.reviews.last_of_all(cast.desk, wait, FINAL_EVALUATION_S)
        return self._end("solved" if self.reviews.solved else "limit", player)

    def _end(self, reason: str, player: Player | None) -> Outcome:
        seconds, solved = self.books.seconds(), self.reviews.solved
        met = bool(solved) or (reason == "limit" and self.goal.score is None)
        code = 0 if met else 128 + self.signals.number if self.signals.number else 3
        self._save(player)
        self.write(
            "end", reason=reason, steps=self.books.steps, seconds=seconds, exit_code=code, version=self.books.version,
            steps_per_s=self.books.steps / seconds if seconds else 0.0, ledger=self.books.ledger,
            **({"carrier": self.front.figures()} if self.front else {}),
        )  # fmt: skip
        return Outcome(str(self.run.path), met, reason, code, self.books.steps, seconds, solved or self.reviews.last)

    # What is kept ----------------------------------------------------------------------------------------------------

    def _info(self) -> dict[str, Any]:
        return {key: _plain(getattr(self.config, key)) for key in HELD_FIXED}

    def _save(self, player: Player | None) -> None:
        self.refresh()
        parameters, state = self.algorithm.parameters, State()
        state.put("parameters", parameters.state())
        state.put("algorithm", self.algorithm.state())
        state.put("books", self.books.state())
        if player is not None:
            state.put("player", player.state())
        if self.front:
            state.put("front", self.front.state())
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
                    self.reviews.lost()

    def status(self) -> panel.Status:
        """For the panel, from its own thread."""
        b, c = self.books, self.config
        score = self.goal.score
        return panel.Status(
            run=self.run.name, algo=c.algo, scheme=c.scheme, env=c.env, workers=c.workers, steps=b.steps,
            goal=str(self.goal), progress=None if score is not None else b.progress(), return_mean=b.mean(),
            return_windows=list(b.means), evaluation=self.reviews.last, steps_per_s=b.steps_per_s,
            waiting_on=b.waiting_on(),
            divisions={name: panel.Division(**division.shares()) for name, division in list(b.divisions.items())},
            lag_median=b.lag(0.5), lag_p95=b.lag(0.95), events=list(self.events), elapsed_s=b.seconds(),
        )  # fmt: skip


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


def _process_age_s() -> float:
    """Seconds since the command was given: what the user has waited."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
