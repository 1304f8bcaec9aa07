"""Run Troupe by its command line and leave the same JSON file that the peers' runners leave."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

GOALS = {"LunarLander-v3": 200.0, "CartPole-v1": 475.0}
NAME = "bench"
GOOD = [  # for an agent as good as it gets rather than soon: more experience, and each step used less often
    *("--epochs", "4", "--rollout-steps", "128", "--minibatch", "2048", "--average", "0.05"),
]
PACKAGES = ("troupe", "gymnasium", "torch", "numpy", "envpool")


def troupe_command() -> str:
    """Return the `troupe` beside this Python, or the one on the path."""
    beside = Path(sys.executable).with_name("troupe")
    found = str(beside) if beside.exists() else shutil.which("troupe")
    if found is None:
        raise SystemExit("no `troupe` command: install the repository into this Python first (pip install -e .)")
    return found


def installed_versions() -> dict[str, str]:
    """Return the versions of Troupe and of what it runs on, as far as they are installed (EnvPool is optional)."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def read_metrics(run_dir: Path) -> dict[str, Any]:
    """Read a run's metrics.jsonl. The one place that knows Troupe's file format; times are seconds since its start."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]  # a cut-off last line is left out

    def last(kind: str) -> dict[str, Any]:
        return next((event for event in reversed(events) if event.get("kind") == kind), {})

    start, solved, end = last("start"), last("solved"), last("end")
    evals = [event for event in events if event.get("kind") == "eval"]
    finish = solved or end
    return {
        "solved": bool(solved),
        "train_s": finish.get("taken_s", finish.get("t", 0.0)),  # when the weights were there that solved it
        "wall_s": finish.get("t", 0.0),  # when that was known: evaluations run inside Troupe's own clock
        "env_steps": finish.get("steps", 0),
        "steps_per_s": end.get("steps_per_s", 0.0),
        "command_to_first_step_s": start.get("command_to_first_step_s"),
        "best_mean": max((event["mean"] for event in [*evals, solved] if "mean" in event), default=None),
        "evals": [
            {"train_s": e.get("t"), **{key: e.get(key) for key in ("steps", "mean", "sd", "episodes", "complete")}}
            for e in evals
        ],
        "end_reason": end.get("reason"),
    }


def train_command(args: argparse.Namespace) -> list[str]:
    """Return the training command; the cap becomes Troupe's own time limit."""
    minutes = f"minutes={args.cap_s / 60:g}"
    until = minutes if args.no_stop or args.quality_episodes else f"solved,{minutes}"
    goal = ["--solved-at", f"{args.goal:g}"] if args.goal is not None else []
    good = GOOD if args.quality_episodes else []
    command = ["train", args.env, "--name", NAME, "--fresh", "--seed", str(args.seed), "--until", until]
    return [troupe_command(), *command, *goal, *good]


def measure_quality(episodes: int, environment: dict[str, str]) -> dict[str, Any]:
    """Evaluate the finished run over many fresh episodes."""
    command = [troupe_command(), "eval", NAME, "--episodes", str(episodes), "--json"]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return figures


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train in a run folder of its own and return the record."""
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as runs:
        environment = os.environ | {"TROUPE_RUNS": runs}
        command = train_command(args)
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
        if code not in (0, 3):  # 3: the budget was spent before it was solved, which is a result too
            raise SystemExit(f"{' '.join(command)} ended with exit code {code}")
        record: dict[str, Any] = {"peer": "troupe", "algo": "default", "env": args.env, "seed": args.seed}
        record |= {"goal": GOALS[args.env] if args.goal is None else args.goal, "cap_s": args.cap_s}
        record |= read_metrics(Path(runs) / NAME)
        if args.quality_episodes:
            record["quality"] = {f"{args.cap_s:g}": measure_quality(args.quality_episodes, environment)}
        record["versions"] = installed_versions()
        record["command"] = " ".join(["troupe", *command[1:]])
    return record


def main() -> int:
    """Run the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--env", choices=sorted(GOALS), required=True)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--goal", type=float, help="default: Troupe's own, the environment's reward threshold")
    options.add_argument("--cap-s", type=float, default=300.0)
    options.add_argument("--no-stop", action="store_true", help="train until the cap even when solved")
    options.add_argument("--quality-episodes", type=int, default=0, help="train until the cap, then evaluate so many")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    record = run(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"solved={record['solved']} train_s={record['train_s']:.1f} steps={record['env_steps']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
