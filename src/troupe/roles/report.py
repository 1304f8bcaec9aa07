"""Report: what a worker elsewhere tells the books, and how the main process listens to it.

A worker that learns keeps its experience to itself; what travels is what a person wants to know of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from troupe.errors import BadMessage
from troupe.ports import HeadLedger, Mailbox, Seat
from troupe.types import Array, Episodes, Message, Metrics, Rollout

EVERY_S = 0.1  # seconds between two reports; all that happened in between is in the next one


@dataclass
class Report:
    """What one worker did since its last report."""

    rollouts: int = 0
    steps: int = 0
    gradients: int = 0
    applied: int = 0
    refused: int = 0  # not finite, or too long
    returns: list[Array] = field(default_factory=list)
    lengths: list[Array] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # versions, one a rollout
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    metrics: Metrics = field(default_factory=dict)  # of the newest rollout

    def pack(self, *, run: str, sender: str, incarnation: int, sequence: int) -> Message:
        """The report on its way."""
        meta = {
            "rollouts": self.rollouts, "steps": self.steps, "gradients": self.gradients, "applied": self.applied,
            "refused": self.refused,
            **{f"s.{part}": seconds for part, seconds in self.seconds.items()},
            **{f"m.{name}": value for name, value in self.metrics.items()},
        }  # fmt: skip
        arrays = {
            "returns": np.concatenate(self.returns) if self.returns else np.zeros(0, np.float32),
            "lengths": np.concatenate(self.lengths) if self.lengths else np.zeros(0, np.int64),
            "lags": np.asarray(self.lags, np.float32),
        }
        return Message("report", run, sender, incarnation, sequence, meta=meta, arrays=arrays)

    @classmethod
    def unpack(cls, message: Message) -> Report:
        """The report in `message`; BadMessage where it is none."""
        meta, arrays = message.meta, message.arrays
        try:
            counts = {name: int(meta[name]) for name in ("rollouts", "steps", "gradients", "applied", "refused")}
            returns, lengths, lags = arrays["returns"], arrays["lengths"], arrays["lags"]
        except (KeyError, ValueError) as e:
            raise BadMessage(f"{message.sender}: a report without a sound {e}") from e
        if returns.shape != lengths.shape or returns.ndim != 1 or not np.isfinite(returns).all():
            raise BadMessage(f"{message.sender}: returns {list(returns.shape)} and lengths of a report do not agree")
        return cls(
            **counts, returns=[returns], lengths=[lengths], lags=lags.tolist(),
            seconds={key[2:]: float(value) for key, value in meta.items() if key.startswith("s.")},
            metrics={key[2:]: float(value) for key, value in meta.items() if key.startswith("m.")},
        )  # fmt: skip


class Reporter:
    """The Ledger of a worker in a process of its own."""

    def __init__(
        self, mailbox: Mailbox, seat: Seat, progress: Callable[[], float], *, run: str,
        name: str, incarnation: int, timeout_s: float,
    ) -> None:  # fmt: skip
        self._mailbox, self._seat, self.progress = mailbox, seat, progress
        self._run, self._name, self._incarnation, self._timeout_s = run, name, incarnation, timeout_s
        self._sequence = 0
        self._open = Report()
        self._sent_s = time.monotonic()

    def played(self, played: Rollout | Episodes, message: Message | None = None) -> None:
        """Count a rollout."""
        self._seat.played(played.steps)
        report = self._open
        report.rollouts += 1
        report.steps += played.steps
        if len(played.episode_returns):
            report.returns.append(played.episode_returns)
            report.lengths.append(played.episode_lengths)

    def learned(self, metrics: Metrics) -> None:
        """Keep the metrics; their mean lag is one sample."""
        report, gradients = self._open, metrics.get("gradients", 0.0)
        report.gradients += round(gradients)
        report.applied += round(gradients * metrics.get("applied", 1.0))
        report.refused += round(gradients * metrics.get("refused", 0.0))
        if "lag" in metrics:
            report.lags.append(metrics["lag"])
        report.metrics = metrics
        if time.monotonic() - self._sent_s >= EVERY_S:
            self.send()

    def spent(self, what: str, seconds: float) -> None:
        """Time went into `what`."""
        self._open.seconds[what] += seconds

    def rejected(self, message: Message, why: str) -> None:
        """Nothing is sent to a worker, so there is nothing to refuse."""
        raise AssertionError("a worker that learns receives no experience")

    def settle(self) -> None:
        """The budget is spent, and the books may be waiting for what is open."""
        if self._open.rollouts:
            self.send()

    def send(self) -> None:
        """All that is open goes to the main process."""
        report, self._open = self._open, Report()
        self._sequence += 1
        message = report.pack(run=self._run, sender=self._name, incarnation=self._incarnation, sequence=self._sequence)
        begin = time.perf_counter()
        self._mailbox.send("learner", message, timeout_s=self._timeout_s)
        self._seat.reported()
        self._sent_s = time.monotonic()
        self._open.seconds["send"] += time.perf_counter() - begin


def refusal(message: Message) -> tuple[str, str, int]:
    """Whose gradients a server refused, why, and how many; BadMessage where it does not say."""
    who, why, count = (message.meta.get(name) for name in ("who", "why", "count"))
    if not (isinstance(who, str) and isinstance(why, str) and isinstance(count, int)):
        raise BadMessage(f"{message.sender}: a refusal that does not say of whom, why and how many")
    return who, why, count


def listen(mailbox: Mailbox, ledger: HeadLedger, *, run: str, refresh: Callable[[], None]) -> Iterator[None]:
    """The main process, where workers learn: each turn one report, or a short wait for one."""
    while True:
        message = mailbox.receive(timeout_s=0.1)
        refresh()
        if message is not None:
            try:
                if message.run != run:
                    raise BadMessage(f"{message.sender} works for run {message.run!r}, this is {run!r}")
                if message.kind == "refused":
                    ledger.refused(message.sender, *refusal(message))
                else:
                    ledger.reported(message.sender, Report.unpack(message))
            except BadMessage as e:
                ledger.rejected(message, str(e))
        yield
