"""The run's append-only record, one JSON object a line: what was measured and when."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from troupe.errors import RunDirError
from troupe.types import Json

FLUSH_S: Final = 0.5  # what a crash may cost, and how often a failing disk is tried again
HELD_LINES: Final = 10_000  # kept in memory while the disk is full; beyond it the oldest are lost, and counted
TAIL_BYTES: Final = 1 << 16


class Journal:
    """Writes lines to `path`. Never raises because of the disk: see `failing`, `failures` and `lost`.

    Each line carries `t`, seconds since the run's start by a monotonic clock. A journal that exists already goes on
    where its last line stood, so that pauses between resumes do not count.
    """

    def __init__(
        self,
        path: Path,
        *,
        flush_s: float = FLUSH_S,
        held_lines: int = HELD_LINES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.failing = False  # the last write to the disk failed; it is tried again every flush_s
        self.failures = 0  # writes to the disk that failed
        self.lost = 0  # lines given up because too many waited
        self._flush_s = flush_s
        self._held_lines = held_lines
        self._clock = clock
        self._lines: deque[bytes] = deque()
        self._lock = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            last_t, self._torn = _end(self._fd, path)
        except OSError as e:
            raise RunDirError(
                f"cannot open the journal {path}: {e.strerror or e}; check its rights and the disk"
            ) from e
        self._start = clock() - last_t
        self._flushed = clock()

    def now(self) -> float:
        """Seconds since the run's start."""
        return self._clock() - self._start

    def write(self, kind: str, **fields: Json) -> None:
        """Add one line, on the disk within about `flush_s` of activity. NaN and infinity become null."""
        own = {"t": round(self.now(), 6), "kind": kind}
        line = _encode(own | fields | own)  # first in the line, and no field can replace them
        with self._lock:
            self._lines.append(line)
            full = len(self._lines) > self._held_lines and not self.failing  # a burst, not a full disk
            if full or self._clock() - self._flushed >= self._flush_s:
                self._flush()
            if len(self._lines) > self._held_lines:
                self._lines.popleft()
                self.lost += 1

    def flush(self) -> None:
        """Write what waits, if the disk takes it."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Flush and close. Lines the disk still refuses are counted in `lost`."""
        with self._lock:
            if self._fd < 0:
                return
            self._flush()
            self.lost += len(self._lines)
            self._lines.clear()
            fd, self._fd = self._fd, -1
            try:
                os.close(fd)
            except OSError:
                self.failures += 1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def read(path: Path) -> JournalReader:
        """The lines of `path`, oldest first."""
        return JournalReader(path)

    def _flush(self) -> None:
        self._flushed = self._clock()
        if self._fd < 0:
            return
        try:
            while self._lines:
                # A line that was cut short stays as a torn line, ended here, and is written again whole.
                line = b"\n" + self._lines[0] if self._torn else self._lines[0]
                written = os.write(self._fd, line)  # one line, one write: O_APPEND keeps lines of several writers whole
                self._torn = written < len(line) and (self._torn or written > 0)
                if written < len(line):
                    raise OSError("short write")
                self._lines.popleft()
            self.failing = False
        except OSError:
            self.failing = True
            self.failures += 1


class JournalReader:
    """Iterates over the whole lines of a journal; `skipped` counts the lines that are torn or no JSON object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0

    def __iter__(self) -> Iterator[dict[str, Json]]:
        self.skipped = 0
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below, after the generator's last line
        except FileNotFoundError:
            return
        with file:
            for line in file:
                record = _decode(line)
                if record is None:
                    self.skipped += 1
                else:
                    yield record


def _end(fd: int, path: Path) -> tuple[float, bool]:
    """The time of the last whole line, and whether the file ends within a line."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, TAIL_BYTES, max(0, size - TAIL_BYTES))
    torn = bool(tail) and not tail.endswith(b"\n")
    for line in reversed(tail.split(b"\n")):
        if (last_t := _time(_decode(line))) is not None:
            return last_t, torn
    if size <= TAIL_BYTES:
        return 0.0, torn
    return max((t for record in JournalReader(path) if (t := _time(record)) is not None), default=0.0), torn


def _time(record: Mapping[str, Json] | None) -> float | None:
    t = record.get("t") if record else None
    return float(t) if isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t < math.inf else None


def _decode(line: bytes) -> dict[str, Json] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _encode(record: Mapping[str, Json]) -> bytes:
    try:
        text = json.dumps(record, default=_default, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError):  # NaN or infinity in it, or a key that is not text: rare, so the slow way
        text = json.dumps(_clean(record), separators=(",", ":"))
    return text.encode() + b"\n"


def _default(value: object) -> Json:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return str(value)  # a journal that ends a run over an odd value is worth less than the text of it


def _clean(value: Json) -> Json:
    """`value` in plain JSON, null for what is not finite."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return _clean(_default(value))
