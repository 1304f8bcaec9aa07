"""DQN's environment steps per second in one process, beside Stable-Baselines3's with the same network, batch and
train frequency; the two take turns.

    bench/peers/setup.sh && python bench/dqn_speed.py --out bench/results/dqn_speed.json

Two settings: those of Troupe's preset for LunarLander-v3, where stepping, replay and bookkeeping weigh as much as the
arithmetic, and those of Stable-Baselines3's model zoo, where a gradient of 256x256 for every step is nearly all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from plan import LUNAR, REPO, default_troupe_python

SETTINGS: dict[str, dict[str, Any]] = {
    "128x128, batch 128, a gradient every 4 steps": {"width": 128, "every": 4},
    "256x256, batch 128, a gradient every step": {"width": 256, "every": 1},
}
BATCH, STARTS = 128, 200


def troupe(width: int, every: int, seconds: float, seed: int) -> float:
    """Steps per second of `troupe train --scheme local`, on one thread."""
    command = [
        str(Path(default_troupe_python()).with_name("troupe")), "train", LUNAR, "--algo", "dqn", "--scheme", "local",
        "--net", f"{width}x{width}", "--batch", f"{BATCH}", "--train-every", f"{every}", "--learning-starts",
        f"{STARTS}", "--env-threads", "1", "--seed", f"{seed}", "--until", f"minutes={seconds / 60:g}",
        "--eval-episodes", "2", "--eval-every-s", "1000", "--name", "speed", "--quiet",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as runs:
        subprocess.run(command, cwd=REPO, env=os.environ | {"TROUPE_RUNS": runs}, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, (Path(runs) / "speed" / "metrics.jsonl").read_text().splitlines())
        return next(float(line["steps_per_s"]) for line in lines if line["kind"] == "end")


def sb3(width: int, every: int, seconds: float, seed: int) -> float:
    """The same of Stable-Baselines3: as many gradients as Troupe makes for as many steps."""
    model = {
        "train_freq": 4, "gradient_steps": 4 // every, "batch_size": BATCH, "learning_starts": STARTS,
        "policy_kwargs": {"net_arch": [width, width]},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as folder:
        out = Path(folder) / "sb3.json"
        command = [
            ".venv-sb3/bin/python", "bench/peers/sb3_run.py", "--algo", "dqn", "--env", LUNAR, "--seed", f"{seed}",
            "--cap-s", f"{seconds:g}", "--no-evaluate", "--model", json.dumps(model), "--out", str(out),
        ]  # fmt: skip
        subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(out.read_text())["steps_per_s"])


def main() -> int:
    """Every setting, the two in turn."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    figures: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        rates = [
            (troupe(**setting, seconds=given.seconds, seed=seed), sb3(**setting, seconds=given.seconds, seed=seed))
            for seed in range(1, given.rounds + 1)
        ]
        figures[name] = {
            "troupe": [round(mine) for mine, _ in rates], "sb3": [round(theirs) for _, theirs in rates],
            "ratio": round(statistics.median(mine / theirs for mine, theirs in rates), 2),
        }  # fmt: skip
        print(name, json.dumps(figures[name]), flush=True)
    given.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
