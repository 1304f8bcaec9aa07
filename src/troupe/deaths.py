"""Deaths of processes: how one ended, in a sentence, and the end of those whose keeper is gone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from troupe.forkwire import Exited


def cause(report: Exited, tail: str) -> str:
    """One sentence on how a process ended."""
    if report.signal:
        try:
            return f"killed by {signal.Signals(report.signal).name}"
        except ValueError:
            return f"killed by signal {report.signal}"
    lines = tail.rstrip().splitlines()
    if report.code and "Traceback (most recent call last):" in tail:
        return f"exit code {report.code}: {lines[-1]}"
    return f"exit code {report.code}" + ("" if report.code else ", before the run was over")


def kill_group_and_wait(pid: int, timeout_s: float) -> None:
    """For the children of a fork server that is no more; a dead one's successor may only write once it is dead."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.002)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
