"""Goals and limits: what ends a run, and how far it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from troupe.config import nearest
from troupe.errors import ConfigError
from troupe.types import Array

_KINDS = ("solved", "score", "consecutive", "steps", "minutes")


@dataclass(frozen=True)
class Goal:
    """A score for an evaluation to reach, and limits; with limits alone, reaching one is the goal."""

    score: float | None = None  # of the mean, or of every episode where so many in a row are asked for
    steps: int | None = None
    seconds: float | None = None
    consecutive: int | None = None  # evaluation episodes

    def merit(self, returns: Array, *, complete: bool) -> float:
        """How good an evaluation was: its mean, or how many episodes in a row reached the score."""
        if self.consecutive is None or self.score is None:
            return float(np.mean(returns)) if complete else -math.inf
        failed = np.flatnonzero(returns < self.score)
        return float(failed[0]) if len(failed) else float(len(returns))

    def met(self, returns: Array, *, complete: bool) -> bool:
        """Whether an evaluation reached the score."""
        wanted = self.consecutive if self.consecutive is not None else self.score
        return complete and self.score is not None and self.merit(returns, complete=complete) >= (wanted or 0.0)

    def spent(self, steps: int, seconds: float) -> bool:
        """Whether a limit has been reached."""
        return (self.steps is not None and steps >= self.steps) or (
            self.seconds is not None and seconds >= self.seconds
        )

    def progress(self, steps: int, seconds: float, horizon: int) -> float:
        """0 to 1: the share of the budget that is used; while a score is the goal, of the horizon."""
        if self.score is not None:
            return min(1.0, steps / horizon)
        used = [steps / self.steps] if self.steps else []
        used += [seconds / self.seconds] if self.seconds else []
        return min(1.0, max(used, default=0.0))

    def __str__(self) -> str:
        what = f"{self.consecutive} episodes in a row" if self.consecutive else "mean"
        parts = [f"{what} >= {self.score:g}"] if self.score is not None else []
        parts += [f"{self.steps:,} steps"] if self.steps else []
        parts += [f"{self.seconds / 60:g} minutes"] if self.seconds else []
        return " or ".join(parts)


def parse_goal(text: str, solved_at: float | None) -> Goal:
    """`solved,minutes=10` -> Goal; `solved_at` is what solved means for this environment.

    `consecutive=10` asks for 10 episodes in a row at the score, instead of their mean.
    """
    score, steps, seconds, consecutive = None, None, None, None
    for part in text.split(","):
        kind, _, value = part.strip().partition("=")
        if kind not in _KINDS:
            raise ConfigError(
                f"--until {part}: that is no goal{nearest(kind, _KINDS)} (known: solved, score=S, consecutive=N, "
                "steps=N, minutes=M)"
            )
        if kind == "solved":
            score = _solved_at(part, solved_at)
            continue
        number = _number(part, value)
        if kind == "score":
            score = number
        elif number <= 0 or (kind != "minutes" and number < 1):
            raise ConfigError(f"--until {part}: the limit must be above 0")
        elif kind == "consecutive":
            consecutive = int(number)
        elif kind == "steps":
            steps = int(number)
        else:
            seconds = number * 60
    if consecutive and score is None:
        score = _solved_at(text, solved_at)
    return Goal(score, steps, seconds, consecutive)


def _solved_at(part: str, score: float | None) -> float:
    if score is None:
        raise ConfigError(f"--until {part}: this environment names no score that counts as solved; give --solved-at S")
    return score


def _number(part: str, value: str) -> float:
    try:
        number = float(value.replace("_", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--until {part}: {value!r} is not a number; write for example {part.split('=')[0]}=10")
    return number
