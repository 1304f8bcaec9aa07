"""Train RLlib on this machine's cores until solved or until the cap, and leave a JSON file.

New API stack, two env runners and a learner in the main process. The CartPole settings are those of RLlib's own
examples (https://github.com/ray-project/ray, rllib/examples/algorithms/ppo/cartpole_ppo.py and
impala/cartpole_impala.py). RLlib publishes no LunarLander settings: PPO gets the discount, lambda and entropy bonus of
rl-baselines3-zoo with RLlib's minibatch of 128, IMPALA the settings of its CartPole example with an entropy bonus.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import torch
from ray._private import ray_constants
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from reference import Observations, Policy, Referee, new_record, parser, versions

OBJECT_STORE_BYTES = 512 * 1024 * 1024

PPO_TRAINING: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"lr": 0.0003, "num_epochs": 6, "vf_loss_coeff": 0.01},
    "LunarLander-v3": {
        "lr": 0.0003,
        "gamma": 0.999,
        "lambda_": 0.98,
        "entropy_coeff": 0.01,
        "num_epochs": 6,
        "train_batch_size_per_learner": 8192,
        "minibatch_size": 128,
        "vf_loss_coeff": 0.5,
        "vf_clip_param": 1e6,  # RLlib's 10 would cut the value loss of returns in the hundreds
        "use_kl_loss": False,
        "clip_param": 0.2,
        "grad_clip": 0.5,
    },
}
IMPALA_TRAINING: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"lr": 0.0005, "vf_loss_coeff": 0.05, "entropy_coeff": 0.0},
    "LunarLander-v3": {"lr": 0.0005, "vf_loss_coeff": 0.05, "entropy_coeff": 0.01, "gamma": 0.995},
}
MODELS: dict[tuple[str, str], DefaultModelConfig] = {
    ("ppo", "CartPole-v1"): DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True),
    ("impala", "CartPole-v1"): DefaultModelConfig(vf_share_layers=True),
    ("ppo", "LunarLander-v3"): DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False),
    ("impala", "LunarLander-v3"): DefaultModelConfig(vf_share_layers=True),
}


def start_ray() -> None:
    """Start Ray on all cores of this machine, reachable from this machine only."""
    ray_constants.ENABLE_RAY_CLUSTER = False  # else Ray turns 127.0.0.1 into an address that others can reach
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
    )


def configure(algo: str, env: str, seed: int) -> AlgorithmConfig:
    """Return the settings for one algorithm and environment."""
    config: AlgorithmConfig
    if algo == "ppo":
        config = PPOConfig().training(**PPO_TRAINING[env])
    else:
        shared = {"train_batch_size_per_learner": 500, "grad_clip": 40.0, "grad_clip_by": "global_norm"}
        config = IMPALAConfig().training(**shared, **IMPALA_TRAINING[env])
    return (
        config.environment(env)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8)
        .learners(num_learners=0)  # in the main process: a process more would only crowd two cores
        .rl_module(model_config=MODELS[algo, env])
        .reporting(metrics_num_episodes_for_smoothing=40, min_time_s_per_iteration=1 if algo == "impala" else None)
        .debugging(seed=seed, log_level="ERROR")
    )


def learner_module(algorithm: Algorithm) -> Any:
    """Return the newest network, as the learner in this process has it."""
    return algorithm.learner_group._learner.module["default_policy"]  # no public way to a local learner's module


def greedy(algorithm: Algorithm) -> Policy:
    """Return the deterministic policy of a copy of the newest weights: IMPALA's learner thread never pauses."""
    module = copy.deepcopy(learner_module(algorithm)).eval()

    def act(observations: Observations) -> Any:
        with torch.no_grad():
            outputs = module.forward_inference({"obs": torch.from_numpy(observations)})
        return outputs["action_dist_inputs"].argmax(dim=-1).numpy()

    return act


def wait_until_ready(algorithm: Algorithm) -> None:
    """Wait for the process that IMPALA's env runners ask for weights: they do not step before it answers."""
    server = getattr(algorithm, "_env_runner_state_server", None)
    if server is not None:
        ray.get(server.pull.remote())


def train(algorithm: Algorithm, referee: Referee) -> None:
    """Train until the referee says it is over."""
    wait_until_ready(algorithm)
    referee.start()
    while not referee.over:
        runners = algorithm.train()["env_runners"]
        mean = runners.get("episode_return_mean", np.nan)
        if not np.isnan(mean):  # already a mean of the newest 40 episodes: fill the window with it
            referee.recent.extend([float(mean)] * (referee.recent.maxlen or 1))
        referee.look(int(runners.get("num_env_steps_sampled_lifetime", 0)), greedy(algorithm))


def main() -> int:
    """Run the command line."""
    args = parser("rllib", ["ppo", "impala"]).parse_args()
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    record = new_record("rllib", args)
    record.torch_threads = torch.get_num_threads()
    record.versions = versions("ray", "gymnasium", "torch", "numpy")
    margin = 0.1 * record.goal if args.env == "CartPole-v1" else 30.0
    start_ray()
    algorithm = configure(args.algo, args.env, args.seed).build_algo()
    train(algorithm, Referee(args, record, window=40, margin=margin))
    record.write(args.out)
    print(f"solved={record.solved} train_s={record.train_s:.1f} steps={record.env_steps} {record.steps_per_s:.0f}/s")
    algorithm.stop()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
