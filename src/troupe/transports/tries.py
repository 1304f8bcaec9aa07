"""Which messages ended the process that was given them: one that does so again and again is put aside."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

TRIES: Final = 4  # times that a message comes again; this one puts it aside, the others give it to a learner
_KEPT: Final = 64  # messages that are remembered


class Tries:
    """How often a message that came again was begun. Kept in a file: who dies of it can tell nobody.

    Only what is in hand is counted, so what waits behind a message that kills is not blamed for it; and a message
    that comes for the first time costs nothing. The file outlives the process, and need not outlive the machine.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._begun: dict[str, int] = {}  # message -> times that it came again and was begun
        if path is not None:
            with suppress(OSError, ValueError, TypeError, AttributeError):
                self._begun = {str(key): int(count) for key, count in json.loads(path.read_text()).items()}

    def begin(self, key: str) -> bool:
        """The message `key` came again and would be begun now: whether it may be."""
        count = self._begun.pop(key, 0) + 1  # the newest stands last
        if count >= TRIES:
            self._write()
            return False
        self._begun[key] = count
        while len(self._begun) > _KEPT:
            del self._begun[next(iter(self._begun))]
        self._write()
        return True

    def done(self, key: str) -> None:
        """It was finished, and did no harm."""
        if self._begun.pop(key, 0):
            self._write()

    def _write(self) -> None:
        """Where that fails, a message that kills is put aside later, or never."""
        if self._path is None:
            return
        with suppress(OSError):
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text(json.dumps(self._begun))
            os.replace(new, self._path)
