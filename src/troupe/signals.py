"""SIGINT and SIGTERM: a first one asks for an orderly end, a second one forces it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_TIMEOUT_S = 9.0  # after a first signal everything is over by then, whatever hangs


class Signals:
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
