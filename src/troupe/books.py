"""The books of a run: what was played and learned, where the time went, and whether every message is accounted for."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from troupe.goal import Goal
from troupe.roles.report import Report
from troupe.types import Array, Episodes, Json, Message, Metrics, Rollout, Scalar, State

WINDOW = 100  # episodes of the training mean that is shown and that calls for an evaluation
PROGRESS_S = 1.0  # between two progress lines of the journal
PARTS = ("play", "wait", "learn", "send", "exchange", "parse")  # exchange: at a lock, for a server, for everybody


class Pages(Protocol):
    """Where lines are written: the run's journal, or nothing in a test."""

    def write(self, kind: str, **fields: Json) -> None: ...


@dataclass
class Division:
    """Where one process's time went, in seconds."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def shares(self) -> dict[str, float]:
        """The same as fractions of the whole."""
        total = sum(self.seconds.values())
        return {part: self.seconds[part] / total if total else 0.0 for part in PARTS}


class Books:
    """The Ledger of the main process. Steps and time go on over resumes."""

    def __init__(self, pages: Pages, goal: Goal, horizon: int, *, me: str = "learner") -> None:
        self.pages, self.goal, self.horizon, self.me = pages, goal, horizon, me
        self.steps = 0  # environment steps that were learned from, over all workers and lives
        self.seconds_before = 0.0  # training time of earlier lives of this run
        self.life = 0  # how often this run was resumed
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.episodes = 0
        self.means: deque[float] = deque(maxlen=60)  # window means, a second apart
        self.lags: deque[float] = deque(maxlen=500)  # versions between the weights that acted and those that learned
        self.ledger = {"messages": 0, "trained": 0, "rejected": 0}
        self.gradients_refused = 0  # by servers, or where they were made
        self.divisions: dict[str, Division] = defaultdict(Division)
        self.contributed: dict[str, int] = defaultdict(int)
        self.version = 0
        self.losses: Metrics = {}
        self.steps_per_s = 0.0
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._marks: deque[tuple[float, int]] = deque(maxlen=6)  # (seconds, steps), a second apart
        self._before: dict[str, dict[str, float]] = {}
        self._distrusted: dict[str, int] = {}  # worker -> publications that it refused
        self._next_line = 0.0

    # What roles tell -------------------------------------------------------------------------------------------------

    def played(self, played: Rollout | Episodes, message: Message | None = None) -> None:
        """Count it; the episodes that ended go into the journal, each one."""
        sender = message.sender if message else self.me
        steps = played.steps
        self.steps += steps
        self.contributed[sender] += steps
        if message:
            self.ledger["messages"] += 1
            self.ledger["trained"] += 1
            self.lags.append(self.version - played.version)
            for part in ("play", "wait", "send"):
                self.divisions[sender].seconds[part] += float(message.meta.get(f"{part}_s", 0.0))
            self._distrust(sender, message.meta.get("refused"))
        self._tell_episodes(sender, played.episode_returns, played.episode_lengths)

    def _distrust(self, sender: str, refused: Scalar | None) -> None:
        if isinstance(refused, int) and refused > self._distrusted.get(sender, 0):
            self._distrusted[sender] = refused
            self.pages.write("event", text=f"{sender} refused {refused} publications that were no weights of this run")

    def reported(self, sender: str, report: Report) -> None:
        """What a worker did that learns by itself."""
        self.steps += report.steps
        self.contributed[sender] += report.steps
        self.ledger["messages"] += report.rollouts
        self.ledger["trained"] += report.rollouts
        self.lags.extend(report.lags)
        for part, seconds in report.seconds.items():
            self.divisions[sender].seconds[part] += seconds
        self.losses = report.metrics or self.losses
        if report.refused:
            self.refused(
                sender, sender, "its gradients are not finite, or longer than clipping leaves them", report.refused
            )
        for returns, lengths in zip(report.returns, report.lengths, strict=True):
            self._tell_episodes(sender, returns, lengths)

    def refused(self, by: str, who: str, why: str, count: int) -> None:
        """Gradients of a worker that a server, or the worker itself, would not have."""
        self.gradients_refused += count
        self.pages.write("refused", by=by, worker=who, why=why, count=count)

    def _tell_episodes(self, sender: str, returns: Array, lengths: Array) -> None:
        if len(returns):
            rounded = [round(float(r), 3) for r in returns]
            self.window.extend(rounded)
            self.episodes += len(rounded)
            self.pages.write("episodes", steps=self.steps, worker=sender, returns=rounded, lengths=lengths.tolist())

    def rejected(self, message: Message, why: str) -> None:
        """A message that will not be learned from."""
        self.ledger["messages"] += 1
        self.ledger["rejected"] += 1
        self.pages.write("rejected", worker=message.sender, sequence=message.sequence, why=why)

    def learned(self, metrics: Metrics) -> None:
        """Keep the newest metrics for the next progress line."""
        self.version += round(metrics.get("gradients", 0.0) * metrics.get("applied", 1.0))  # a refused one is no update
        self.losses = metrics

    def spent(self, what: str, seconds: float) -> None:
        """Time of the main process."""
        self.divisions[self.me].seconds[what] += seconds

    def progress(self) -> float:
        """0 to 1, for the schedules."""
        return self.goal.progress(self.steps, self.seconds(), self.horizon)

    # What the house asks ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The curtain rises: the training clock starts here."""
        self._begun = time.monotonic()

    def stop(self) -> None:
        """The training clock stops: what follows is not training."""
        self._ended = time.monotonic()

    def seconds(self) -> float:
        """Training time, over all lives of the run."""
        return self.seconds_before + (self._ended or time.monotonic()) - self._begun

    def mean(self) -> float | None:
        """The mean return of the last training episodes."""
        return float(np.mean(self.window)) if self.window else None

    def waiting_on(self) -> str:
        """What limits the speed now, in words."""
        recent = [self._before[self.me]] if self.me in self._before else list(self._before.values())
        if not recent:
            return ""
        part = max(PARTS, key=lambda p: sum(shares[p] for shares in recent))
        words = {"learn": "learning", "send": "sending", "exchange": "each other", "parse": "parsing"}
        return words.get(part, "environments")

    def tick(self, carrier: Callable[[], dict[str, Json]] | None = None) -> None:
        """Once a second: a progress line; `carrier` gives the figures of what carries messages to other machines."""
        now = self.seconds()
        if now < self._next_line:
            return
        self._next_line = now + PROGRESS_S
        self._marks.append((now, self.steps))
        then, before = self._marks[0]
        elapsed = now - then
        self.steps_per_s = (self.steps - before) / elapsed if elapsed > 0 else self.steps / now if now > 0 else 0.0
        mean = self.mean()
        if mean is not None:
            self.means.append(mean)
        self._before = {name: division.shares() for name, division in self.divisions.items()}
        self.pages.write(
            "progress", steps=self.steps, version=self.version, episodes=self.episodes, return_mean=mean,
            return_window=len(self.window), steps_per_s=round(self.steps_per_s, 1), progress=round(self.progress(), 4),
            lag_median=self.lag(0.5), lag_p95=self.lag(0.95), waiting_on=self.waiting_on(), ledger=dict(self.ledger),
            workers={n: {**_rounded(s), "steps": self.contributed.get(n, 0)} for n, s in self._before.items()},
            metrics=_rounded(self.losses), gradients_refused=self.gradients_refused,
            **({"carrier": carrier()} if carrier else {}),
        )  # fmt: skip

    def lag(self, quantile: float) -> float | None:
        """Versions between acting and learning."""
        return float(np.quantile(self.lags, quantile)) if self.lags else None

    def state(self) -> State:
        """Counters and the window, for a checkpoint."""
        values: dict[str, Any] = {
            "steps": self.steps, "seconds": self.seconds(), "episodes": self.episodes, "window": list(self.window),
            "life": self.life, "ledger": dict(self.ledger), "contributed": dict(self.contributed),
            "gradients_refused": self.gradients_refused,
        }  # fmt: skip
        return State({}, values)

    def restore(self, state: State, version: int) -> None:
        """Go on counting; this is the next life of the run."""
        v = state.values
        self.steps, self.episodes, self.seconds_before = v["steps"], v["episodes"], v["seconds"]
        self.window.extend(v["window"])
        self.ledger.update(v["ledger"])
        self.contributed.update(v["contributed"])
        self.gradients_refused = v.get("gradients_refused", 0)  # of a run from before there were servers
        self.life, self.version = v["life"] + 1, version


def _rounded(numbers: Metrics) -> Metrics:
    return {name: float(f"{value:.5g}") for name, value in numbers.items()}
