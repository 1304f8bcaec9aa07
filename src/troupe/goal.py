"""Goals and limits: what ends a run, and how far it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from troupe.config import nearest
from troupe.errors import ConfigError

_KINDS = ("solved", "score", "steps", "minutes")


@dataclass(frozen=True)
class Goal:
    """An evaluation mean to reach, and limits; with limits alone, reaching one is the goal."""

    score: float | None = None
    steps: int | None = None
    seconds: float | None = None

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
        parts = [f"mean >= {self.score:g}"] if self.score is not None else []
        parts += [f"{self.steps:,} steps"] if self.steps else []
        parts += [f"{self.seconds / 60:g} minutes"] if self.seconds else []
        return " or ".join(parts)


def parse_goal(text: str, solved_at: float | None) -> Goal:
    """`solved,minutes=10` -> Goal; `solved_at` is what solved means for this environment."""
    score, steps, seconds = None, None, None
    for part in text.split(","):
        kind, _, value = part.strip().partition("=")
        if kind not in _KINDS:
            raise ConfigError(
                f"--until {part}: that is no goal{nearest(kind, _KINDS)} (known: solved, score=S, steps=N, minutes=M)"
            )
        if kind == "solved":
            if solved_at is None:
                raise ConfigError(
                    "--until solved: this environment names no score that counts as solved; give --solved-at S"
                )
            score = solved_at
            continue
        number = _number(part, value)
        if kind == "score":
            score = number
        elif number <= 0 or (kind == "steps" and number < 1):
            raise ConfigError(f"--until {part}: the limit must be above 0")
        elif kind == "steps":
            steps = int(number)
        else:
            seconds = number * 60
    return Goal(score, steps, seconds)


def _number(part: str, value: str) -> float:
    try:
        number = float(value.replace("_", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--until {part}: {value!r} is not a number; write for example {part.split('=')[0]}=10")
    return number
