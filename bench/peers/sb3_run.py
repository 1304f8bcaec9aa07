"""Train Stable-Baselines3 with its zoo's published settings until solved, and leave a JSON file.

The settings are those of rl-baselines3-zoo 2.9.2 (https://github.com/DLR-RM/rl-baselines3-zoo), files
hyperparams/ppo.yml, hyperparams/a2c.yml and hyperparams/dqn.yml, entries CartPole-v1 and LunarLander-v3;
none of these entries normalizes observations or rewards.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import Observations, Policy, Referee, new_record, parser, versions
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"ppo": PPO, "a2c": A2C, "dqn": DQN}
FOREVER_STEPS = 1_000_000_000


def lin(initial: float) -> Callable[[float], float]:
    """Return the zoo's `lin_...` schedule: from `initial` down to 0 over `n_timesteps`."""
    return lambda progress_remaining: progress_remaining * initial


@dataclass(frozen=True)
class Zoo:
    """One entry of the zoo's settings."""

    n_envs: int
    n_timesteps: int  # the published budget: the length of every schedule
    model: dict[str, Any] = field(default_factory=dict)


ZOO: dict[tuple[str, str], Zoo] = {
    ("ppo", "CartPole-v1"): Zoo(
        n_envs=8,
        n_timesteps=100_000,
        model={
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": lin(0.001),
            "clip_range": lin(0.2),
        },
    ),
    ("ppo", "LunarLander-v3"): Zoo(
        n_envs=16,
        n_timesteps=1_000_000,
        model={
            "n_steps": 1024,
            "batch_size": 64,
            "gae_lambda": 0.98,
            "gamma": 0.999,
            "n_epochs": 4,
            "ent_coef": 0.01,
        },
    ),
    ("a2c", "CartPole-v1"): Zoo(n_envs=8, n_timesteps=500_000, model={"ent_coef": 0.0}),
    ("a2c", "LunarLander-v3"): Zoo(
        n_envs=8,
        n_timesteps=200_000,
        model={"gamma": 0.995, "n_steps": 5, "learning_rate": lin(0.00083), "ent_coef": 0.00001},
    ),
    ("dqn", "CartPole-v1"): Zoo(
        n_envs=1,
        n_timesteps=50_000,
        model={
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "gamma": 0.99,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
    ("dqn", "LunarLander-v3"): Zoo(
        n_envs=1,
        n_timesteps=100_000,
        model={
            "learning_rate": 6.3e-4,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 0,
            "gamma": 0.99,
            "target_update_interval": 250,
            "train_freq": 4,
            "gradient_steps": -1,
            "exploration_fraction": 0.12,
            "exploration_final_eps": 0.1,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
}


def has_schedule(zoo: Zoo) -> bool:
    """Say whether a setting runs down to 0 over the budget, so that training past it would do nothing."""
    return any(callable(value) for value in zoo.model.values())


def build(args: argparse.Namespace, zoo: Zoo) -> BaseAlgorithm:
    """Make the algorithm as the zoo does."""
    vec_env_cls = SubprocVecEnv if args.vec == "subproc" else DummyVecEnv
    settings = {**zoo.model, **args.model}
    if args.algo == "dqn":  # exploration ends after the same number of steps, in a run without a last step
        settings["exploration_fraction"] *= zoo.n_timesteps / FOREVER_STEPS
    envs = make_vec_env(args.env, n_envs=zoo.n_envs, seed=args.seed, vec_env_cls=vec_env_cls)
    return ALGORITHMS[args.algo]("MlpPolicy", envs, seed=args.seed, device="cpu", **settings)


def greedy(model: BaseAlgorithm) -> Policy:
    """Return the model's deterministic policy."""

    def act(observations: Observations) -> Any:
        return model.predict(observations, deterministic=True)[0]

    return act


class Watch(BaseCallback):
    """Hands episodes to the referee, and asks it between two updates whether to go on."""

    def __init__(self, referee: Referee, policy: Policy) -> None:
        super().__init__()
        self.referee = referee
        self.policy = policy
        self.steps = 0  # over all rounds; SB3's own counter starts again with each schedule

    def _on_training_start(self) -> None:
        self.referee.start()

    def _on_rollout_start(self) -> None:
        self.referee.look(self.steps, self.policy)  # fresh after the update before

    def _on_step(self) -> bool:
        self.steps += self.training_env.num_envs
        for info in self.locals["infos"]:
            if "episode" in info:
                self.referee.recent.append(float(info["episode"]["r"]))
        return not self.referee.over


def train(model: BaseAlgorithm, zoo: Zoo, referee: Referee) -> None:
    """Train the published budget, again and again from the start of its schedules, until over."""
    policy = greedy(model)
    watch = Watch(referee, policy)
    while not referee.over:
        model.learn(zoo.n_timesteps if has_schedule(zoo) else FOREVER_STEPS, callback=watch)
        if not referee.over:
            referee.look(watch.steps, policy, force=True)  # the schedule's end is the policy's best moment


def main() -> int:
    """Run the command line."""
    options = parser("sb3", sorted(ALGORITHMS))
    options.add_argument("--vec", choices=["dummy", "subproc"], default="dummy", help="the zoo's default is dummy")
    options.add_argument("--model", type=json.loads, default={}, help="settings over the zoo's, as JSON")
    args = options.parse_args()
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    record = new_record("sb3", args)
    record.torch_threads = torch.get_num_threads()
    record.versions = versions("stable_baselines3", "gymnasium", "torch", "numpy")
    is_dqn = args.algo == "dqn"  # its training episodes hold 4-10 % random actions: ask less of them
    margin = 0.1 * record.goal if args.env == "CartPole-v1" else 30.0
    referee = Referee(args, record, window=20 if is_dqn else 40, margin=margin + (50.0 if is_dqn else 0.0))
    zoo = ZOO[args.algo, args.env]
    train(build(args, zoo), zoo, referee)
    record.write(args.out)
    print(f"solved={record.solved} train_s={record.train_s:.1f} steps={record.env_steps} {record.steps_per_s:.0f}/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
