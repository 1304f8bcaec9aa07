"""Evaluator: play frozen weights on the reference environment with seeds that training never sees."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.envs import as_observation, to_action
from troupe.errors import EnvironmentFault, last_line
from troupe.ports import Algorithm, Mailbox
from troupe.types import Array, Message

UPPER_HALF = 2**31  # training seeds lie below it, evaluation seeds above: they can never meet
ENOUGH_TO_JUDGE = 20  # episodes before an evaluation may be abandoned


@dataclass(frozen=True)
class Evaluation:
    """Scores of whole episodes, in the order they were begun."""

    returns: Array
    lengths: Array
    complete: bool  # false: abandoned, since the goal was out of reach
    seconds: float

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def sd(self) -> float:
        return float(np.std(self.returns, ddof=1)) if len(self.returns) > 1 else 0.0

    @property
    def half_interval(self) -> float:
        """Half of the 95 % interval of the mean (normal approximation)."""
        return 1.96 * self.sd / math.sqrt(len(self.returns))


def evaluation_seeds(rng: np.random.Generator, episodes: int) -> list[int]:
    """One seed per episode, from the half that training never uses."""
    return [int(seed) for seed in UPPER_HALF + rng.choice(UPPER_HALF, size=episodes, replace=False)]


def evaluate(
    algorithm: Algorithm,
    make_env: Callable[[], Any],
    seeds: list[int],
    rng: np.random.Generator,
    *,
    greedy: bool = True,
    give_up_below: float | None = None,
    fail_below: float | None = None,
    lanes: int = 100,
    beat: Callable[[], None] = lambda: None,
) -> Evaluation:
    """One episode per seed, `lanes` of them side by side so that one network call serves all.

    `give_up_below`: stop once the mean is two standard errors under it. Judged on the episodes begun first, all of them
    ended: those that end first would be the short, bad ones. `fail_below`: stop at the first episode under it.
    """
    begin = time.perf_counter()
    returns = np.full(len(seeds), np.nan)
    lengths = np.zeros(len(seeds), np.int64)
    judged = np.zeros(len(seeds), bool)
    waiting = iter(range(len(seeds)))
    envs = [make_env() for _ in range(min(lanes, len(seeds)))]
    space, convert = envs[0].observation_space, to_action(envs[0].action_space)
    try:
        playing = [(episode, env) for env, episode in zip(envs, waiting, strict=False)]
        seen = np.stack([_reset(env, seeds[episode], space) for episode, env in playing])  # [lanes, ...]
        returns[: len(playing)] = 0.0
        while playing:
            beat()
            actions = convert(algorithm.act(seen, rng, greedy=greedy).actions)
            left: list[int] = []  # lanes that play on
            for lane, (episode, env) in enumerate(playing):
                reward, ended = _step(env, actions[lane], seen, lane)
                returns[episode] += reward
                lengths[episode] += 1
                if ended:
                    judged[episode] = True
                    following = next(waiting, None)
                    if following is None:
                        continue
                    playing[lane], returns[following] = (following, env), 0.0
                    seen[lane] = _reset(env, seeds[following], space)
                left.append(lane)
            _check_finite(seen, envs[0], "an observation of step")
            if len(left) < len(playing):
                playing, seen = [playing[lane] for lane in left], seen[left]
            if give_up_below is not None and _hopeless(returns, judged, give_up_below):
                break
            if fail_below is not None and (returns[: _in_order(judged)] < fail_below).any():
                break
    finally:
        for env in envs:
            env.close()
    done = _in_order(judged)
    if fail_below is not None and (returns[:done] < fail_below).any():
        done = int(np.argmax(returns[:done] < fail_below)) + 1
    return Evaluation(returns[:done], lengths[:done], done == len(seeds), time.perf_counter() - begin)


def _in_order(judged: Array) -> int:
    """The longest row of ended episodes from the first."""
    return len(judged) if judged.all() else int(np.argmin(judged))


def _hopeless(returns: Array, judged: Array, goal: float) -> bool:
    ended = _in_order(judged)
    if ended < ENOUGH_TO_JUDGE or ended == len(judged):
        return False
    so_far = returns[:ended]
    return float(so_far.mean() + 2 * so_far.std(ddof=1) / math.sqrt(ended)) < goal


def _reset(env: Any, seed: int, space: Any) -> Array:
    try:
        observation = as_observation(env.reset(seed=seed)[0], space)
    except Exception as e:  # whatever the user's environment may raise becomes one sentence that names it
        raise EnvironmentFault(f"{_name(env)} raised in reset (seed {seed}): {last_line(e)}") from e
    _check_finite(observation, env, f"an observation of reset (seed {seed})")
    return observation


def _step(env: Any, action: Array, seen: Array, lane: int) -> tuple[float, bool]:
    """One step; what is seen next goes into row `lane`, to be checked together with the other rows."""
    try:
        seen[lane], reward, terminated, truncated, _ = env.step(action)
        reward = float(reward)
    except Exception as e:
        raise EnvironmentFault(f"{_name(env)} raised in step: {last_line(e)}") from e
    if not math.isfinite(reward):
        raise EnvironmentFault(f"{_name(env)} returned {reward} in a reward of step")
    return reward, bool(terminated or truncated)


def _check_finite(observations: Array, env: Any, where: str) -> None:
    if observations.dtype.kind == "f" and not np.isfinite(observations).all():
        raise EnvironmentFault(f"{_name(env)} returned a number that is not finite in {where}")


def _name(env: Any) -> str:
    return env.spec.id if getattr(env, "spec", None) else type(env.unwrapped).__name__


def evaluator(
    algorithm: Algorithm,
    make_env: Callable[[], Any],
    mailbox: Mailbox,
    rng: np.random.Generator,
    *,
    run: str,
    incarnation: int,
    greedy: bool,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Each turn: evaluate the newest candidate, or wait a little for one."""
    sequence = 1  # 0 would mean "not numbered"
    while True:
        beat()
        candidate = mailbox.wait_latest("candidate", 0.1)
        if candidate is not None:
            weights, meta = candidate.arrays["weights"], candidate.meta
            algorithm.parameters.load_weights(weights, candidate.version)
            goal, bar = float(meta["give_up_below"]), float(meta.get("fail_below", -math.inf))
            result = evaluate(
                algorithm, make_env, evaluation_seeds(rng, int(meta["episodes"])), rng, greedy=greedy, beat=beat,
                give_up_below=goal if math.isfinite(goal) else None, fail_below=bar if math.isfinite(bar) else None,
            )  # fmt: skip
            answer = Message(
                "evaluation", run, "evaluator", incarnation, sequence, candidate.version,
                {"steps": meta["steps"], "complete": result.complete, "seconds": result.seconds},
                {"weights": weights, "returns": result.returns, "lengths": result.lengths},
            )  # fmt: skip
            mailbox.send("desk", answer, timeout_s=30.0)
            sequence += 1
            gc.collect()  # environments hold themselves in circles: of a hundred landers 10 MB would stay each time
        yield
