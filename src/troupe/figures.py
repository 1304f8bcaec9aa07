"""The figures of one run, read from its journal, and their spread over several runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from troupe.journal import Journal

ENDS: Final = ("solved", "limit")  # reasons of an end that was meant; any other run did not get to its own
ENOUGH_FOR_QUARTILES: Final = 5  # runs


@dataclass(frozen=True)
class Figures:
    """What one run came to, over all its training."""

    reason: str  # one of ENDS
    seconds: float  # of training: from the first environment step to the end
    steps: int  # of environments
    episodes: int
    score: float | None  # mean of the last evaluation
    score_sd: float | None  # and the spread of its episodes
    lag_median: float | None  # updates between acting and learning: the median over the run's progress lines
    lag_p95: float | None
    shares: Mapping[str, float]  # of all processes' time, by what it went into
    curve: Sequence[tuple[float, float]] = field(default=(), repr=False)  # (seconds, mean return of the window)

    @property
    def steps_per_s(self) -> float | None:
        return self.steps / self.seconds if self.seconds else None

    @property
    def episode_s(self) -> float | None:
        """Seconds of training per episode, all workers together."""
        return self.seconds / self.episodes if self.episodes else None


def read_figures(metrics: Path) -> Figures | None:
    """The figures of the run whose journal this is; None unless it got to an end that was meant.

    A line that a killed process left torn is skipped, and so is a journal that is not there.
    """
    end: dict[str, Any] | None = None
    last: dict[str, Any] = {}
    episodes, score, score_sd = 0, None, None
    lags: dict[str, list[float]] = {"lag_median": [], "lag_p95": []}
    curve: list[tuple[float, float]] = []
    for line in Journal.read(metrics):
        match line.get("kind"):
            case "start":
                end = None  # a later life of the run goes on from an earlier end
            case "episodes":
                episodes += len(line["returns"])
            case "progress":
                last = line
                for name, values in lags.items():
                    values += [line[name]] if line.get(name) is not None else []
                if line.get("return_mean") is not None:
                    curve.append((line["t"], line["return_mean"]))
            case "eval":
                score, score_sd = line.get("mean"), line.get("sd")
            case "end":
                end = line
    if end is None or end.get("reason") not in ENDS:
        return None
    median, p95 = (statistics.median(values) if values else None for values in lags.values())
    shares = time_shares(last.get("workers", {}))
    return Figures(end["reason"], end["seconds"], end["steps"], episodes, score, score_sd, median, p95, shares, curve)


def time_shares(workers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Each part's share of the time of all processes, which lived equally long; the silent ones are left out."""
    told = [{part: v for part, v in parts.items() if part != "steps"} for parts in workers.values()]
    told = [parts for parts in told if sum(parts.values()) > 0]
    names = dict.fromkeys(name for parts in told for name in parts)
    return {name: statistics.fmean(parts.get(name, 0.0) for parts in told) for name in names}


@dataclass(frozen=True)
class Spread:
    """A figure over several runs. Where `bound` is ">" or "<", the true median lies beyond the one here."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float] | None = None
    bound: str = ""
    high_open: bool = False  # some run was cut off by its limit: the highest is at least `high`

    def speed_up(self, time: Spread) -> Spread | None:
        """How many times as fast as this time another `time` is; None where both were cut off by a limit."""
        if (self.bound and time.bound) or not time.low:
            return None
        first, third = time.quartiles or (0.0, 0.0)
        quartiles = (self.median / third, self.median / first) if time.quartiles else None
        bound = ">" if self.bound else "<" if time.bound else ""
        return Spread(self.median / time.median, self.median / time.high, self.median / time.low, quartiles, bound)


def spread(values: Sequence[float], cut_off: Sequence[bool] = ()) -> Spread | None:
    """Median, range and, with enough of them, quartiles; None of nothing.

    A value that is `cut_off` is a lower bound: what it stands for is larger. If the median is among them, the median
    of the bounds is given, which the true one is at least.
    """
    if not values:
        return None
    cut = list(cut_off) or [False] * len(values)
    known = sorted(math.inf if c else v for v, c in zip(values, cut, strict=True))
    bounds = sorted(values)
    is_bound = math.isinf(quantile(known, 0.5))
    quartiles = None
    if len(values) >= ENOUGH_FOR_QUARTILES:
        first, third = (quantile(known, q) for q in (0.25, 0.75))
        if not math.isinf(third):
            quartiles = (first, third)
    median = quantile(bounds if is_bound else known, 0.5)
    return Spread(median, bounds[0], bounds[-1], quartiles, ">" if is_bound else "", any(cut))


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted numbers, in a straight line between neighbours; infinite next to an infinite one."""
    at = q * (len(ordered) - 1)
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    return below if below == above else below + (above - below) * (at - math.floor(at))
