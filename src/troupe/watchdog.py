"""Watch the environments that the main process steps itself: nobody else could tell that one of them hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from troupe.ports import Environments
from troupe.types import Array, Step

_LATE_S: Final = 0.5  # on top of the timeout, so that a step that takes just as long as allowed passes


class WatchedEnvironments:
    """`envs`, and a thread that calls `on_hang(verb)` once a call to reset or step has lasted longer than `timeout_s`.

    The hanging call cannot be interrupted, so `on_hang` is to end the process. A hang that holds Python's lock for
    ever, in an extension's own code, is not seen.
    """

    def __init__(self, envs: Environments, timeout_s: float, on_hang: Callable[[str], None]) -> None:
        self.batch, self.state, self.restore = envs.batch, envs.state, envs.restore
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self._envs, self._timeout_s, self._on_hang = envs, timeout_s, on_hang
        self._call: tuple[str, float] | None = None  # what is under way, and since when
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="troupe-watchdog", daemon=True).start()

    def reset(self) -> Array:
        """Begin an episode in every environment."""
        with self._watched("reset"):
            return self._envs.reset()

    def step(self, actions: Array) -> Step:
        """One step of each."""
        with self._watched("step"):
            return self._envs.step(actions)

    def close(self) -> None:
        """Close them; the thread ends."""
        self._closed.set()
        self._envs.close()

    @contextmanager
    def _watched(self, verb: str) -> Iterator[None]:
        self._call = (verb, time.monotonic())
        try:
            yield
        finally:
            self._call = None

    def _watch(self) -> None:
        while not self._closed.wait(min(self._timeout_s, 0.5) / 2):
            call = self._call
            if call is not None and time.monotonic() - call[1] > self._timeout_s + _LATE_S:
                self._on_hang(call[0])
                return
