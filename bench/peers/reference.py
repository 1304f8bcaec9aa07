"""What every peer is measured with: one training clock, one reference evaluation, one result file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

Actions = npt.NDArray[np.int64]
Observations = npt.NDArray[np.float32]
Policy = Callable[[Observations], Actions]  # greedy actions [N] for observations [N, ...]

GOALS = {"LunarLander-v3": 200.0, "CartPole-v1": 475.0}  # Gymnasium's own reward thresholds
EVALUATE_EVERY_S = {"LunarLander-v3": (10.0, 2.0), "CartPole-v1": (1.0, 0.5)}  # in any case; when it looks good
REFERENCE_SEED = 10_000_000  # training seeds are small numbers, so no reference episode repeats one
EPISODES_AT_ONCE = 20  # whole groups, so that short (crashed) episodes are not judged before long ones
MIN_EPISODES = 20


def process_age_s() -> float:
    """Return the seconds since the operating system started this process (Linux)."""
    started_ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")


class TrainingClock:
    """Counts seconds since the first environment step, without the time spent in evaluations."""

    def __init__(self) -> None:
        self.started: float | None = None
        self._evaluating_s = 0.0

    def start(self) -> None:
        """Start at the first environment step; later calls change nothing."""
        if self.started is None:
            self.started = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Seconds since the start, evaluations included."""
        return 0.0 if self.started is None else time.perf_counter() - self.started

    @property
    def train_s(self) -> float:
        """Seconds since the start, evaluations left out: the clock of every figure."""
        return self.wall_s - self._evaluating_s

    def leave_out(self, seconds: float) -> None:
        """Take an evaluation's seconds off the training clock."""
        self._evaluating_s += seconds


@dataclass(frozen=True)
class Evaluation:
    """One reference evaluation, and when on the training clock it was made."""

    train_s: float
    steps: int
    mean: float
    sd: float
    episodes: int
    complete: bool  # False: abandoned, because it could not reach the goal any more


@dataclass
class Record:
    """The JSON file that one run leaves behind; times in seconds."""

    peer: str
    algo: str
    env: str
    seed: int
    goal: float
    cap_s: float
    solved: bool = False
    train_s: float = 0.0  # training clock when solved, or at the end
    wall_s: float = 0.0  # the same moment with evaluations
    env_steps: int = 0
    steps_per_s: float = 0.0
    command_to_first_step_s: float = 0.0
    best_mean: float | None = None  # best complete or abandoned evaluation
    evals: list[Evaluation] = field(default_factory=list)
    quality: dict[str, Any] = field(default_factory=dict)  # train seconds -> {mean, sd, episodes}
    torch_threads: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    command: str = field(default_factory=lambda: " ".join(["python", *sys.argv]))

    def write(self, path: Path) -> None:
        """Write the record whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of Python and of the named packages."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}


def play_group(env_id: str, policy: Policy, seeds: range) -> list[float]:
    """Play one whole episode per seed, all at once, and return their returns in the order of the seeds."""
    envs = [gym.make(env_id) for _ in seeds]
    observations = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    returns = [0.0] * len(envs)
    running = list(range(len(envs)))
    while running:
        actions = policy(np.stack([observations[i] for i in running]))
        still_running = []
        for i, action in zip(running, actions, strict=True):
            observations[i], reward, terminated, truncated, _ = envs[i].step(int(action))
            returns[i] += float(reward)
            if not (terminated or truncated):
                still_running.append(i)
        running = still_running
    for env in envs:
        env.close()
    return returns


def is_hopeless(returns: list[float], goal: float) -> bool:
    """Say whether even two standard errors above the mean stay below the goal."""
    if len(returns) < MIN_EPISODES:
        return False
    standard_error = float(np.std(returns, ddof=1)) / math.sqrt(len(returns))
    return float(np.mean(returns)) + 2 * standard_error < goal


def reference_returns(
    env_id: str, policy: Policy, first_seed: int, episodes: int = 100, goal: float | None = None
) -> list[float]:
    """Play reference episodes; with a goal, stop early once it is out of reach."""
    returns: list[float] = []
    while len(returns) < episodes and not (goal is not None and is_hopeless(returns, goal)):
        start = first_seed + len(returns)
        returns += play_group(env_id, policy, range(start, start + min(EPISODES_AT_ONCE, episodes - len(returns))))
    return returns


@dataclass(frozen=True)
class Trigger:
    """When to evaluate: training looks good enough, or some time has gone by in any case."""

    threshold: float  # mean training return that asks for an evaluation
    window: int  # newest training episodes in that mean
    always_s: float  # evaluate this often in any case
    apart_s: float  # and never more often than this

    def is_due(self, recent: deque[float], train_s: float, last_s: float) -> bool:
        """Say whether to evaluate now; `last_s` is the training clock at the last evaluation."""
        since_s = train_s - last_s
        looks_good = len(recent) >= self.window and float(np.mean(recent)) >= self.threshold
        return since_s >= self.always_s or (looks_good and since_s >= self.apart_s)


class Referee:
    """Watches one training run: evaluates when due, and says when it is over."""

    def __init__(self, args: argparse.Namespace, record: Record, window: int, margin: float) -> None:
        self.record = record
        self.clock = TrainingClock()
        self.recent: deque[float] = deque(maxlen=window)  # newest training returns
        always_s, apart_s = EVALUATE_EVERY_S[record.env]
        self.trigger = Trigger(record.goal - margin, window, always_s, apart_s)
        self.over = False
        self._evaluates: bool = args.evaluate and not args.quality_at
        self._quality_at: list[float] = sorted(args.quality_at)
        self._quality_episodes: int = args.quality_episodes
        self._last_s = 0.0
        self._played = 0  # reference episodes so far: every evaluation gets fresh seeds

    def start(self) -> None:
        """Note the first environment step."""
        if self.clock.started is None:
            self.record.command_to_first_step_s = process_age_s()
            self.clock.start()

    def look(self, steps: int, policy: Policy, force: bool = False) -> bool:
        """Judge the run between two updates; return True once it is over."""
        train_s = self.clock.train_s
        while self._quality_at and train_s >= self._quality_at[0]:
            self._measure_quality(self._quality_at.pop(0), policy)
        at_cap = train_s >= self.record.cap_s
        if self._evaluates and (force or at_cap or self.trigger.is_due(self.recent, train_s, self._last_s)):
            self._evaluate(steps, policy)
        self.over = self.over or at_cap or self.record.solved
        self._note(steps)
        return self.over

    def _note(self, steps: int) -> None:
        """Bring the record up to date."""
        self.record.train_s, self.record.wall_s = self.clock.train_s, self.clock.wall_s
        self.record.env_steps = steps
        self.record.steps_per_s = steps / max(self.record.train_s, 1e-9)

    def _fresh_seed(self, episodes: int) -> int:
        """Return the first of so many reference seeds that no other evaluation or run uses."""
        first = REFERENCE_SEED + self.record.seed * 1_000_000 + self._played
        self._played += episodes
        return first

    def _evaluate(self, steps: int, policy: Policy) -> None:
        """Play up to 100 reference episodes, off the training clock."""
        began, train_s = time.perf_counter(), self.clock.train_s
        returns = reference_returns(self.record.env, policy, self._fresh_seed(100), 100, self.record.goal)
        mean, sd = float(np.mean(returns)), float(np.std(returns, ddof=1))
        complete = len(returns) == 100
        self.record.evals.append(Evaluation(train_s, steps, mean, sd, len(returns), complete))
        self.record.best_mean = max(mean, self.record.best_mean if self.record.best_mean is not None else -math.inf)
        self.record.solved = complete and mean >= self.record.goal
        self._last_s = train_s
        self.clock.leave_out(time.perf_counter() - began)
        print(f"{train_s:7.1f} s  {steps:9,d} steps  reference {mean:7.1f} +- {sd:.1f} ({len(returns)})", flush=True)

    def _measure_quality(self, at_s: float, policy: Policy) -> None:
        """Play the many episodes of the quality figure, off the training clock."""
        began = time.perf_counter()
        episodes = self._quality_episodes
        returns = reference_returns(self.record.env, policy, self._fresh_seed(episodes), episodes)
        figures = {"mean": float(np.mean(returns)), "sd": float(np.std(returns, ddof=1)), "episodes": episodes}
        self.record.quality[f"{at_s:g}"] = figures
        self.clock.leave_out(time.perf_counter() - began)
        print(f"quality after {at_s:g} s: {figures}", flush=True)


def parser(peer: str, algorithms: list[str]) -> argparse.ArgumentParser:
    """Return the options that every peer's runner takes."""
    options = argparse.ArgumentParser(description=f"Train with {peer} until solved or until the cap.")
    options.add_argument("--algo", choices=algorithms, required=True)
    options.add_argument("--env", choices=sorted(GOALS), required=True)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--goal", type=float, help="default: the environment's own reward threshold")
    options.add_argument("--cap-s", type=float, default=300.0, help="seconds of training, evaluations not counted")
    options.add_argument("--torch-threads", type=int, default=1, help="0 leaves the peer's own default")
    options.add_argument("--no-evaluate", dest="evaluate", action="store_false", help="only train until the cap")
    options.add_argument("--quality-at", type=float, nargs="*", default=[], help="training seconds to measure at")
    options.add_argument("--quality-episodes", type=int, default=500)
    options.add_argument("--out", type=Path, required=True)
    return options


def new_record(peer: str, args: argparse.Namespace) -> Record:
    """Return an empty record for these options."""
    goal = GOALS[args.env] if args.goal is None else args.goal
    return Record(peer, args.algo, args.env, args.seed, goal, args.cap_s)
