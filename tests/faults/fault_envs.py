"""Environments that fail on purpose, imported by name in the processes of the runs under test."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces

from troupe.types import Array

EPISODE = 50  # steps
EVERY = 400  # environment steps of a process before it looks whether a fault is due


def raising() -> NoReturn:
    raise ValueError("the pole is gone")


def hanging() -> NoReturn:
    while True:
        time.sleep(60)


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": raising,
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(4),
    "segfault": lambda: ctypes.string_at(0),
    "hang": hanging,
}


class Walk(gymnasium.Env[Array, np.int64]):
    """Pays 1 for action 1, whatever happens: quick to step, and easy to learn."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._look(), float(action == 1), False, self._steps >= EPISODE, {}

    def _look(self) -> Array:
        return np.array([self._steps / EPISODE, self.np_random.uniform(-1, 1)], np.float32)


class Scheduled(Walk):
    """Each fault of `plan` ("raise+exit+hang") happens once, in one process, and leaves a note of when and to whom."""

    stepped = 0  # by all environments of this process

    def __init__(self, plan: str, notes: str) -> None:
        super().__init__()
        self._plan, self._notes = plan.split("+"), Path(notes)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        Scheduled.stepped += 1
        if Scheduled.stepped % EVERY == 0:
            for order, fault in enumerate(self._plan):
                if self._claim(f"{order}-{fault}"):
                    FAULTS[fault]()
        return super().step(action)

    def _claim(self, name: str) -> bool:
        """Whether the fault is ours: the first to make the file has it."""
        try:
            fd = os.open(self._notes / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        os.write(fd, f"{os.getpid()} {time.monotonic()}".encode())
        os.close(fd)
        return True


class Always(Walk):
    """Fails in every `where` ("reset" or "step"), in every process."""

    def __init__(self, fault: str, where: str) -> None:
        super().__init__()
        self._fault, self._where = FAULTS[fault], where

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        if self._where == "reset":
            self._fault()
        return super().reset(seed=seed)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._where == "step":
            self._fault()
        return super().step(action)


class Brood(Walk):
    """Has a child of its own in each process, and one that left the process's session."""

    bred = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        if not Brood.bred:
            Brood.bred = True
            subprocess.Popen(["sleep", "1000"])
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return super().reset(seed=seed)


class Numbered(Walk):
    """Pays once, at the end of an episode: its own number among those of its process, and after the point how many
    episodes it has ended. So whoever reads the returns sees each one that came twice, or never."""

    made = 0  # of this process

    def __init__(self) -> None:
        super().__init__()
        Numbered.made += 1
        self._me, self._ended = Numbered.made, 0

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        self._ended += truncated
        return observation, truncated * (self._me + self._ended / 1000), terminated, truncated, info
