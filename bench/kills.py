"""Kill a worker with SIGKILL every few seconds while Troupe trains, and measure what that costs.

    python bench/kills.py --every-s 5 --for-s 60 --out bench/results/kills.json

Exits with 1 unless the goal was reached, every killed worker was replaced, and no replacement took over 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPLACED_WITHIN_S = 3.0
SLICE_S = 0.1


def journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal that may be growing."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def worker_pids(events: list[dict[str, Any]]) -> dict[str, int]:
    """The actors that are ready now."""
    alive: dict[str, int] = {}
    for event in events:
        if event["kind"] == "part" and event["part"].startswith("actor"):
            if event["what"] == "ready":
                alive[event["part"]] = event["pid"]
            elif event["what"] == "lost":
                alive.pop(event["part"], None)
    return alive


def replacements(events: list[dict[str, Any]]) -> list[float]:
    """Seconds from each loss of a worker to its replacement's being ready to play."""
    lost: dict[str, float] = {}
    seconds = []
    for event in events:
        if event["kind"] == "part" and event["what"] == "lost":
            lost[event["part"]] = event["at_s"]
        elif event["kind"] == "part" and event["what"] == "ready" and event["part"] in lost:
            seconds.append(event["at_s"] - lost.pop(event["part"]))
    return seconds


def kill_while_it_trains(train: subprocess.Popen[bytes], path: Path, given: argparse.Namespace) -> int:
    """One of the workers, at random, every `every_s`; how many."""
    rng, killed, start = random.Random(given.seed), 0, time.monotonic()
    while not worker_pids(journal(path)) and train.poll() is None:
        time.sleep(SLICE_S)
    due = time.monotonic() + given.every_s
    while train.poll() is None and time.monotonic() - start < given.for_s + given.every_s:
        time.sleep(SLICE_S)
        alive = worker_pids(journal(path))
        if time.monotonic() >= due and alive:
            os.kill(alive[rng.choice(sorted(alive))], signal.SIGKILL)
            killed += 1
            due += given.every_s
    return killed


def main() -> int:
    """Train, kill, count."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--env", default="LunarLander-v3")
    options.add_argument("--goal", type=float, default=200.0)
    options.add_argument("--every-s", type=float, default=5.0)
    options.add_argument("--for-s", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    troupe = str(Path(sys.executable).with_name("troupe"))
    minutes = (given.for_s + given.every_s) / 60
    command = ["train", given.env, "--name", "kills", "--seed", str(given.seed), "--until", f"minutes={minutes:.4g}"]
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as runs:
        environment = os.environ | {"TROUPE_RUNS": runs}
        path = Path(runs) / "kills" / "metrics.jsonl"
        with subprocess.Popen([troupe, *command], env=environment, stdin=subprocess.DEVNULL) as train:
            killed = kill_while_it_trains(train, path, given)
        events = journal(path)
    seconds = replacements(events)
    evals = [event for event in events if event["kind"] == "eval" and event["complete"]]
    record = {
        "command": " ".join(["troupe", *command]), "killed": killed, "replaced": len(seconds),
        "replaced_s_median": statistics.median(seconds) if seconds else None,
        "replaced_s_max": max(seconds, default=None),
        "exit_code": train.returncode, "final_mean": evals[-1]["mean"] if evals else None,
        "reached_goal_at_s": next((event["t"] for event in evals if event["mean"] >= given.goal), None),
        "steps": next((e["steps"] for e in reversed(events) if e["kind"] == "end"), None),
        "ledger": next((e["ledger"] for e in reversed(events) if "ledger" in e), None),
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    good = record["reached_goal_at_s"] is not None and len(seconds) == killed > 0 and max(seconds) <= REPLACED_WITHIN_S
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
