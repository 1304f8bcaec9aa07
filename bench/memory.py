"""Run a command and record the peak memory of all its processes together (Linux).

PSS shares each page out among the processes that map it, so the sum over processes is what the command really takes;
the sum of RSS counts shared pages once per process and is given because most tools show it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SAMPLES_PER_S = 5.0
PROC = Path("/proc")


def parents() -> dict[int, int]:
    """Return every running process and its parent."""
    found: dict[int, int] = {}
    for directory in PROC.iterdir():
        if directory.name.isdigit():
            try:
                fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # ended since the directory was listed
                continue
            found[int(directory.name)] = int(fields[1])
    return found


def tree(root: int, known: set[int]) -> set[int]:
    """Return the running processes below `root`, and those known from before whose parent has gone."""
    parent_of = parents()
    members = {pid for pid in known | {root} if pid in parent_of}
    grew = True
    while grew:
        children = {pid for pid, parent in parent_of.items() if parent in members} - members
        members |= children
        grew = bool(children)
    return members


def rollup_bytes(pid: int) -> tuple[int, int]:
    """Return a process's PSS and RSS in bytes; zeros once it has ended."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("Pss:", "Rss:"))}
    return kib.get("Pss", 0) * 1024, kib.get("Rss", 0) * 1024


def end(members: set[int]) -> None:
    """End the command's processes, also those that left its process group."""
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def watch(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, float]:
    """Sample until the command ends, or end it at the time limit; return the peaks."""
    peak_pss, peak_rss, most, samples = 0, 0, 0, 0
    members: set[int] = set()
    began = time.perf_counter()
    while process.poll() is None:
        members = tree(process.pid, members)
        readings = [rollup_bytes(pid) for pid in members]
        peak_pss = max(peak_pss, sum(pss for pss, _ in readings))
        peak_rss = max(peak_rss, sum(rss for _, rss in readings))
        most, samples = max(most, len(members)), samples + 1
        if time.perf_counter() - began > timeout_s:
            end(members)
        time.sleep(1 / SAMPLES_PER_S)
    mib = 1024 * 1024
    return {
        "peak_pss_mib": round(peak_pss / mib, 1),
        "peak_rss_sum_mib": round(peak_rss / mib, 1),
        "processes": most,
        "samples": samples,
    }


def main() -> int:
    """Run the command line."""
    options = argparse.ArgumentParser(description="Measure the peak memory of a command and all its processes.")
    options.add_argument("--timeout-s", type=float, default=300.0)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    args = options.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    process = subprocess.Popen(command, start_new_session=True)
    peaks = watch(process, args.timeout_s)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(peaks, indent=1) + "\n")
    print(peaks)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
