"""Random search for a preset: draw options, train on a few seeds, keep those that reach the goal soonest.

    python bench/tune.py LunarLander-v3 ppo --minutes 20 --goal 205 --from 170 --seed 1 --out tune.jsonl

A draw is given up at its first seed that fails, so bad ones cost little. The search evaluates greedily on EnvPool,
which is fast; what a preset is finally measured on is the reference environment, by `bench/run.py`. Time is the
process's own CPU time without evaluations, since other things may run beside it; `play` and `learn` are told apart
because actor-learner overlaps them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from troupe.build import build_algorithm, build_player, rollout_steps
from troupe.config import Config
from troupe.resolve import resolve
from troupe.roles.learn import learn
from troupe.schemes.exchange import apply_here

SHARED: dict[str, list[Any]] = {
    "envs": [16, 32, 64, 128],
    "activation": ["relu", "tanh"],
    "horizon": [50_000, 100_000, 300_000, 600_000, 1_000_000],
    "learning_rate": [5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3],
    "gamma": [0.98, 0.99, 0.995, 0.999],
    "reward_scale": [0.01, 0.02, 0.03, 0.1],
    "entropy": [0.0, 0.003, 0.01],
    "max_gradient_norm": [0.5, 1.0],
    "value_weight": [0.5, 1.0],
}
SPACES: dict[str, dict[str, list[Any]]] = {
    "ppo": {
        **SHARED, "rollout_steps": [32, 64, 128], "minibatch": [256, 512, 1024], "epochs": [4, 6, 8, 10],
        "lam": [0.9, 0.95, 0.98], "clip": [0.2, 0.3],
    },
    "impala": {
        **SHARED, "rollout_steps": [16, 32, 64], "minibatch": [128, 256, 512, 1024], "passes": [1, 2, 4],
        "lam": [0.9, 0.95, 1.0],
    },
    "a3c": {**SHARED, "rollout_steps": [5, 8, 16, 32], "optimiser": ["adam", "rmsprop"]},
    "dqn": {
        "envs": [16, 32, 64], "rollout_steps": [8, 16], "activation": ["relu"],
        "net": ["64x64", "128x128", "256x128", "256x256"], "batch": [64, 128, 256, 512],
        "train_every": [4.0, 8.0, 16.0, 32.0], "learning_rate": [5e-4, 1e-3, 2e-3, 3e-3],
        "learning_rate_end": [0.1, 0.3], "gamma": [0.98, 0.99, 0.995], "n_step": [1, 3, 5],
        "target_every": [50, 100, 200, 400, 800], "epsilon_end": [0.01, 0.03, 0.1], "epsilon_spread": [0.0, 1.0],
        "exploration": [0.1, 0.2, 0.4], "reward_scale": [0.01, 0.03, 0.1], "max_gradient_norm": [1.0, 10.0],
        "double": [True, False], "horizon": [50_000, 100_000, 200_000, 400_000],
    },
    "elite": {
        "envs": [16, 64, 128], "rollout_steps": [32, 64], "activation": ["relu"], "quantile": [0.6, 0.7, 0.8, 0.9],
        "round_episodes": [50, 100, 200], "window_episodes": [500, 1000, 2000], "gradients": [20, 40, 80, 120],
        "batch": [512, 1024], "better_steps": [1.0, 0.7, 0.5, 0.3], "gamma": [0.98, 0.99, 0.995],
        "learning_rate": [5e-4, 1e-3, 2e-3], "learning_rate_end": [0.1, 0.3], "horizon": [1_000_000, 4_000_000],
    },
}  # fmt: skip


def evaluate(algorithm: Any, env: str, episodes: int = 100) -> tuple[float, float]:
    """Greedy, one episode in each of `episodes` environments."""
    import envpool

    pool = envpool.make_gymnasium(env, num_envs=episodes, num_threads=1, seed=777_777)
    observations, _ = pool.reset()
    returns, ended, rng = np.zeros(episodes), np.zeros(episodes, bool), np.random.default_rng(0)
    while not ended.all():
        actions = algorithm.act(np.asarray(observations, np.float32), rng, greedy=True).actions
        observations, rewards, terminated, truncated, _ = pool.step(actions.astype(np.int32))
        returns += rewards * ~ended
        ended |= terminated | truncated
    pool.close()
    return float(returns.mean()), float(returns.std())


def trial(config: Config, given: argparse.Namespace) -> dict[str, Any]:
    """Train with one rollout of lag, as actor-learner does, until the goal or the limit."""
    player = build_player(config, 0, 0)
    algorithm = build_algorithm(config, player.envs.observation_space, player.envs.action_space)
    lag = min(1, algorithm.lag_rollouts)
    waiting, returns, play_s, learn_s, steps, next_look = [], [], 0.0, 0.0, 0, 0
    looks: list[tuple[int, int, int]] = []
    while play_s + learn_s < given.limit_s:
        algorithm.anneal(min(1.0, steps / config.horizon))
        begin = time.process_time()
        rollout = player.play(algorithm, rollout_steps(config))
        play_s += time.process_time() - begin
        steps += rollout.steps
        returns = [*returns, *rollout.episode_returns.tolist()][-100:]
        waiting.append(rollout)
        if len(waiting) > lag:
            begin = time.process_time()
            kept = algorithm.sift(waiting.pop(0))
            if kept is not None:
                algorithm.remember(kept)
                learn(algorithm, apply_here)
            learn_s += time.process_time() - begin
        if len(returns) == 100 and np.mean(returns) > given.trigger and steps >= next_look:
            mean, sd = evaluate(algorithm, config.env)
            looks.append((steps, round(mean), round(sd)))
            next_look = steps + given.every
            if mean >= given.goal:
                break
    player.envs.close()
    done = bool(looks) and looks[-1][1] >= given.goal
    return {"ok": done, "steps": steps, "play_s": round(play_s, 2), "learn_s": round(learn_s, 2), "looks": looks[-3:]}


def draw(rng: random.Random, env: str, algo: str, fixed: dict[str, Any]) -> dict[str, Any]:
    """Random options that make sense together."""
    while True:
        options = {name: rng.choice(values) for name, values in SPACES[algo].items()} | fixed
        if options.get("minibatch", 0) <= options["envs"] * options["rollout_steps"] <= 16_384:
            return {**options, "env": env, "algo": algo, "scheme": "local", "env_threads": 1}


def main() -> None:
    """Search, one JSON line a draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("algo", choices=list(SPACES))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--goal", type=float, required=True)
    parser.add_argument("--from", dest="trigger", type=float, required=True, help="training mean that calls for a look")
    parser.add_argument("--every", type=int, default=20_000, help="steps between two looks")
    parser.add_argument("--limit-s", type=float, default=16.0, help="CPU seconds of one seed")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="of the search")
    parser.add_argument("--fix", type=json.loads, default={}, help="options to hold, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rng, end = random.Random(given.seed), time.monotonic() + 60 * given.minutes
    while time.monotonic() < end:
        options = draw(rng, given.env, given.algo, given.fix)
        config = resolve(options)
        results = []
        for seed in range(1, given.seeds + 1):
            results.append(trial(msgspec.structs.replace(config, seed=seed), given))
            if not results[-1]["ok"]:
                break
        with given.out.open("a") as file:
            solved = sum(result["ok"] for result in results)
            file.write(json.dumps({"solved": solved, "options": options, "results": results}) + "\n")


if __name__ == "__main__":
    main()
