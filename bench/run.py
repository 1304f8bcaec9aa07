"""Run the whole benchmark, one job after another, and write its results as JSON and as a Markdown table."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import table
from plan import FIGURES, LUNAR, RAW, REPO, RESULTS, Job, Options, default_troupe_python, jobs

SETTLE_S = 3.0  # between jobs, so that one job's last processes do not slow the next one down


def options_from(args: argparse.Namespace) -> Options:
    """Return the choices of the command line."""
    figures = tuple(args.figures.split(",")) if args.figures else FIGURES
    if unknown := sorted(set(figures) - set(FIGURES)):
        raise SystemExit(f"unknown figure {unknown[0]!r}; there are {', '.join(FIGURES)}")
    return Options(
        figures=figures,
        only=tuple(args.only.split(",")) if args.only else (),
        seeds=args.seeds,
        rllib_seeds=args.rllib_seeds,
        cap_s=args.cap_s,
        cartpole_cap_s=args.cartpole_cap_s,
        rllib_cap_s=args.rllib_cap_s,
        quality_at_s=tuple(int(at_s) for at_s in args.quality_at.split(",")),
        troupe_python=args.troupe_python,
    )


def load(job: Job) -> dict[str, Any] | None:
    """Return what the job left when it was last run with the same command, or None."""
    path = REPO / job.out
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record if record.get("job", {}).get("command") == list(job.command) else None


def is_done(record: dict[str, Any] | None) -> bool:
    """Say whether a job need not be run again; a failed one is tried again."""
    return record is not None and "error" not in record


def is_lost(job: Job, planned: list[Job], seeds: int) -> bool:
    """Say whether the contender's median is known to lie beyond the cap, whatever this seed brings."""
    if job.cap_s is None or job.contender == "troupe":
        return False
    rivals = [load(other) for other in planned if (other.figure, other.contender) == (job.figure, job.contender)]
    unsolved = sum(record is not None and record.get("solved") is False for record in rivals)
    return job.figure in ("lunar", "cartpole") and unsolved > seeds // 2


def command_of(job: Job, out: Path) -> list[str]:
    """Return the job's whole command."""
    if job.figure == "memory":
        return [sys.executable, "bench/memory.py", "--out", str(out), "--", *job.command]
    return [*job.command, "--out", str(out)]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a job and its children, gently first."""
    for stop in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            return


def execute(job: Job) -> str | None:
    """Run a job to its end; return what went wrong, or None."""
    log = REPO / RAW / f"{job.id}.log"
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as runs, log.open("wb") as output:
        variables = os.environ | {name: value or runs for name, value in job.variables.items()}
        try:
            process = subprocess.Popen(
                command_of(job, job.out), cwd=REPO, env=variables, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as problem:
            return f"cannot start {job.command[0]}: {problem.strerror}"
        try:
            code = process.wait(timeout=2 * job.expected_s + 60)
        except subprocess.TimeoutExpired:
            end_group(process)
            return f"no end after {2 * job.expected_s + 60:.0f} s"
        except BaseException:
            end_group(process)
            raise
    return None if code == 0 else f"exit {code}; see {RAW / log.name}"


def run(job: Job) -> dict[str, Any]:
    """Run a job, add how it was run to its file, and return what it left."""
    path = REPO / job.out
    path.unlink(missing_ok=True)
    load_before, began = os.getloadavg()[0], time.perf_counter()
    error = execute(job)
    if error is None and not path.exists():
        error = "it left no result"
    record: dict[str, Any] = {"error": error} if error else json.loads(path.read_text())
    record["job"] = {
        "command": list(job.command),
        "took_s": round(time.perf_counter() - began, 1),
        "load_before": round(load_before, 2),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return record


def outcome(record: dict[str, Any]) -> str:
    """Return one line on what a job brought."""
    if "error" in record:
        return f"FAILED: {record['error']}"
    if "train_s" in record:
        solved = "solved" if record["solved"] else "not solved"
        return f"{solved}, {record['train_s']:.1f} s, {record['env_steps']:,} steps"
    return "done"


def run_all(planned: list[Job], seeds: int, again: bool) -> None:
    """Run what is not done yet, one job after another."""
    if again:
        for job in planned:
            (REPO / job.out).unlink(missing_ok=True)
    for number, job in enumerate(planned, start=1):
        head = f"[{number}/{len(planned)}] {job.id}"
        if is_done(load(job)):
            print(f"{head}: kept from before", flush=True)
        elif is_lost(job, planned, seeds):
            print(f"{head}: not run, the median is known to lie beyond the cap", flush=True)
        else:
            print(f"{head} ...", end=" ", flush=True)
            print(outcome(run(job)), flush=True)
            time.sleep(SETTLE_S)


def machine() -> dict[str, Any]:
    """Describe the machine without naming it."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib, 1),
        "system": platform.system(),
    }


def write_results(options: Options, planned: list[Job], date: str) -> Path:
    """Write the JSON file and the table of everything that is done; return the table's path."""
    records = {job.id: record for job in planned if (record := load(job)) is not None}
    missing = [job.id for job in planned if job.id not in records]
    results = {
        "date": date,
        "machine": machine(),
        "seeds": options.seeds,
        "caps_s": {"lunar": options.cap_s, "cartpole": options.cartpole_cap_s, "rllib": options.rllib_cap_s},
        "not_run": missing,
        "records": records,
    }
    (REPO / RESULTS / f"{date}.json").write_text(json.dumps(results, indent=1) + "\n")
    path = RESULTS / f"{date}.md"
    (REPO / path).write_text(table.markdown(results, planned))
    return path


def parse() -> argparse.Namespace:
    """Read the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", help="contenders: troupe, sb3, sb3-ppo, sb3-a2c, sb3-dqn, rllib, ...")
    options.add_argument("--figures", help=", ".join(FIGURES))
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--cap-s", type=float, default=240.0, help=f"training seconds on {LUNAR}")
    options.add_argument("--cartpole-cap-s", type=float, default=60.0)
    options.add_argument("--rllib-cap-s", type=float, default=120.0)
    options.add_argument("--rllib-seeds", type=int, default=1)
    options.add_argument("--quality-at", default="110", help="training seconds after which quality is measured")
    options.add_argument("--again", action="store_true", help="run again what is done already")
    options.add_argument("--list", action="store_true", help="only say what would be run, and how long at most")
    options.add_argument("--troupe-python", default=default_troupe_python(), help="the Python Troupe is installed in")
    options.add_argument("--date", default=datetime.date.today().isoformat(), help="name of the result files")
    return options.parse_args()


def main() -> int:
    """Run the command line."""
    args = parse()
    options = options_from(args)
    planned = jobs(options)
    if args.list:
        for job in planned:
            state = "done" if is_done(load(job)) else f"{job.expected_s:4.0f} s at most"
            print(f"{job.id:34} {state:14}  {' '.join(job.command)}")
        left_s = sum(job.expected_s + SETTLE_S for job in planned if not is_done(load(job)))
        print(f"{len(planned)} jobs, at most {left_s / 60:.0f} minutes left")
        return 0
    (REPO / RAW).mkdir(parents=True, exist_ok=True)
    try:
        run_all(planned, options.seeds, args.again)
    finally:
        print(f"table: {write_results(options, planned, args.date)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
