"""Measure bare stepping speed with random actions: EnvPool against Gymnasium, nothing learned."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import envpool
import gymnasium as gym
import numpy as np

ENVIRONMENTS = ["LunarLander-v3", "CartPole-v1"]
ENVPOOL_SIZES = [64, 256]
THREADS = 2
GYMNASIUM_ENVS = 16
WARM_UP = 20  # calls before the clock starts


def calls_per_s(step: Callable[[], Any], seconds: float) -> float:
    """Call `step` for so many seconds and return the calls per second."""
    for _ in range(WARM_UP):
        step()
    calls, began = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < seconds:
        step()
        calls += 1
    return calls / elapsed_s


def envpool_steps_per_s(env_id: str, envs: int, seconds: float, rng: np.random.Generator) -> float:
    """Return the environment steps per second of EnvPool's synchronous mode."""
    pool = envpool.make_gymnasium(env_id, num_envs=envs, num_threads=THREADS, seed=1)
    actions = rng.integers(pool.action_space.n, size=(1000, envs))  # [call, env], drawn before the clock starts
    pool.reset()
    calls = iter(range(sys.maxsize))
    rate = calls_per_s(lambda: pool.step(actions[next(calls) % 1000]), seconds) * envs
    pool.close()
    return rate


def gymnasium_steps_per_s(env_id: str, envs: int, seconds: float, rng: np.random.Generator) -> float:
    """Return the environment steps per second of Gymnasium's SyncVectorEnv in this one process."""
    vector = gym.make_vec(env_id, num_envs=envs, vectorization_mode="sync")
    actions = rng.integers(vector.single_action_space.n, size=(1000, envs))  # type: ignore[attr-defined]
    vector.reset(seed=1)
    calls = iter(range(sys.maxsize))
    rate = calls_per_s(lambda: vector.step(actions[next(calls) % 1000]), seconds) * envs
    vector.close()
    return rate


def measure(seconds: float) -> dict[str, dict[str, float]]:
    """Return environment -> way of stepping -> steps per second."""
    rng = np.random.default_rng(1)
    rates: dict[str, dict[str, float]] = {}
    for env_id in ENVIRONMENTS:
        rates[env_id] = {
            f"envpool {envs} envs, {THREADS} threads": envpool_steps_per_s(env_id, envs, seconds, rng)
            for envs in ENVPOOL_SIZES
        }
        gymnasium_name = f"gymnasium {GYMNASIUM_ENVS} envs, 1 process"
        rates[env_id][gymnasium_name] = gymnasium_steps_per_s(env_id, GYMNASIUM_ENVS, seconds, rng)
    return rates


def main() -> int:
    """Run the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    packages = ("envpool", "gymnasium", "numpy")
    versions = {name: metadata.version(name) for name in packages}
    record = {"peer": "bare", "seconds": args.seconds, "steps_per_s": measure(args.seconds), "versions": versions}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["steps_per_s"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
