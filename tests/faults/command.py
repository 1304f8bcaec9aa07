"""A `troupe` command as a test runs it: in a session of its own, watched, and nothing of it may be left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from troupe.journal import Journal
from troupe.types import Json

HERE = Path(__file__).parent
MARK = "TROUPE_TEST_MARK"  # in the environment of everything a run starts, whoever its parent is by now
PATIENCE_S = 60.0  # for what takes seconds, on a machine that may be busy
GONE_S = 2.0  # from the parent's death to the last descendant's


class Run:
    """A `troupe` command in a session of its own, and all that descends from it."""

    def __init__(self, folder: Path, words: list[str], name: str = "run") -> None:
        self.folder, self.name, self.mark = folder, name, uuid.uuid4().hex
        self.path = folder / "runs" / name
        self.log = folder / f"log-{self.mark}"
        environment = {
            **os.environ, "TROUPE_RUNS": str(folder / "runs"), "PYTHONPATH": path_to_here(), MARK: self.mark,
        }  # fmt: skip
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "troupe", *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def said(self) -> str:
        return self.log.read_text()

    def lines(self, kind: str) -> list[dict[str, Json]]:
        return [line for line in Journal.read(self.path / "metrics.jsonl") if line["kind"] == kind]

    def parts(self, what: str) -> list[dict[str, Json]]:
        return [line for line in self.lines("part") if line["what"] == what]

    def until(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.said()}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {self.said()}"
            time.sleep(0.01)

    def alive(self) -> dict[int, str]:
        """Every process that carries our mark, by its command line."""
        found = {}
        needle = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if needle in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def assert_nothing_is_left(self, within_s: float = GONE_S) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"still there after {within_s} s: {left}"

    def signal(self, number: int) -> None:
        """To the whole group, as a terminal does it."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(PATIENCE_S)


def path_to_here() -> str:
    return os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))


Command = Callable[..., Run]
