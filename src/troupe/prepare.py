"""Prepare: everything that can be built and refused before a run leaves anything on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from troupe.build import build_algorithm, cargo, env_spec, replay_bytes
from troupe.config import Config
from troupe.envs import make_reference
from troupe.goal import Goal, parse_goal
from troupe.ports import Algorithm
from troupe.resolve import check_pairs
from troupe.roles.cargo import Cargo
from troupe.schemes.parameter_server import cuts


@dataclass(frozen=True)
class Prepared:
    """What was built of a config that makes sense."""

    config: Config
    goal: Goal
    algorithm: Algorithm
    shape: Cargo
    spaces: tuple[str, str]  # of observations and actions, in Gymnasium's words
    replay_bytes: int  # of the experience that all workers share; 0 where each keeps its own

    def facts(self) -> dict[str, Any]:
        """What the manifest says of it: the seed, and the whole network."""
        c, parameters = self.config, self.algorithm.parameters
        return {
            "seed": c.seed, "env": c.env, "algo": c.algo, "scheme": c.scheme, "parameters": parameters.count,
            "network": str(self.algorithm.network).splitlines(), "fingerprint": parameters.fingerprint,
        }  # fmt: skip


def prepare(config: Config) -> Prepared:
    """Build the agent and check everything that `config` asks for."""
    torch.set_num_threads(1)
    check_pairs(config)
    env = make_reference(env_spec(config))
    try:
        threshold = getattr(env.spec, "reward_threshold", None)
        goal = parse_goal(config.until, config.solved_at if config.solved_at is not None else threshold)
        algorithm = build_algorithm(config, env.observation_space, env.action_space)
        cuts(len(algorithm.parameters.vector), config.shards)  # refuses more than there are weights for
        shape = cargo(config, env.observation_space, env.action_space)
        spaces = str(env.observation_space), str(env.action_space)
        return Prepared(config, goal, algorithm, shape, spaces, replay_bytes(config, env.observation_space))
    finally:
        env.close()
