"""troupe doctor: what is here, how fast it is, and what to set."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import time

import numpy as np
import torch

from troupe import envs
from troupe.build import build_algorithm
from troupe.resolve import resolve
from troupe.rundir import package_versions, runs_root

EXTRAS = {
    "fast": ("envpool", "EnvPool, environments stepped in C++"),
    "box2d": ("Box2D", "LunarLander and its kin"),
    "video": ("imageio_ffmpeg", "troupe play to a file"),
    "tensorboard": ("tensorboard", "event files"),
    "atari": ("ale_py", "Atari games"),
    "mujoco": ("mujoco", "MuJoCo tasks"),
    "ray": ("ray", "Ray clusters"),
    "plots": ("matplotlib", "charts of troupe compare"),
}
MEASURE_S = 1.0


def report(env: str) -> str:
    """The whole report as text."""
    torch.set_num_threads(1)
    lines = [*_versions(), *_machine(), *_parts(), *_speeds(env)]
    return "\n".join(lines)


def _versions() -> list[str]:
    versions = {name: version for name, version in package_versions().items() if version}
    return ["versions   " + " · ".join(f"{name} {version}" for name, version in versions.items())]


def _machine() -> list[str]:
    free = shutil.disk_usage(runs_root().resolve().parent if not runs_root().exists() else runs_root()).free
    memfd = "ok" if hasattr(os, "memfd_create") else "missing: temporary files are used instead"
    return [
        f"machine    {os.cpu_count()} cores · {platform.system()} {platform.machine()} · shared memory {memfd}",
        f"runs       {runs_root().resolve()} · {free / 1e9:.1f} GB free",
    ]


def _parts() -> list[str]:
    lines: list[str] = []
    for extra, (module, what) in EXTRAS.items():
        found = importlib.util.find_spec(module)
        here = found is not None and found.origin is not None  # a mere folder of that name has no origin
        lines.append(f"{'optional' if not lines else '':<10} {extra:<12} {'ok     ' if here else 'missing'} {what}"
                     + ("" if here else f": pip install 'troupe[{extra}]'"))  # fmt: skip
    return lines


def _speeds(env: str) -> list[str]:
    config = resolve({"env": env})
    spec = envs.EnvSpec(env)
    batch, cores = 64, os.cpu_count() or 1
    made = envs.make(spec, batch, rng=np.random.default_rng(0), threads=cores)
    algorithm = build_algorithm(config, made.observation_space, made.action_space)
    observations, rng = made.reset(), np.random.default_rng(0)
    actions = algorithm.act(observations, rng).actions
    steps = _per_second(lambda: made.step(actions)) * batch
    calls = _per_second(lambda: algorithm.act(observations, rng))
    made.close()
    back_end = "EnvPool" if envs.envpool_has(spec) else "Gymnasium"
    lines = [
        f"speed      {env}: {steps:,.0f} environment steps/s with {back_end} ({batch} environments, {cores} threads) · "
        f"policy {calls:,.0f} calls/s of {batch} = {calls * batch:,.0f} actions/s"
    ]
    workers = 1 if back_end == "EnvPool" else max(1, cores - 1)
    limit = "environments" if steps < calls * batch else "the policy network"
    lines.append(
        f"to set     {limit} limit the speed here: "
        f"troupe train {env} --workers {workers} --envs {config.envs // workers * workers}"
    )
    if back_end == "Gymnasium":
        lines.append(
            "           EnvPool may be many times faster where it has the environment: pip install 'troupe[fast]'"
        )
    return lines


def _per_second(call: object) -> float:
    assert callable(call)
    begin, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < MEASURE_S:
        call()
        count += 1
    return count / elapsed
