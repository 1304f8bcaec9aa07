"""Build what a config names: the algorithm with its network and vector, and the player with its environments."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from gymnasium import spaces

from troupe import envs
from troupe.algos import algorithm_class
from troupe.config import Config
from troupe.episodes import most_steps
from troupe.nets import NetSpec, observation_dtype
from troupe.parameters import Parameters
from troupe.ports import Algorithm
from troupe.replay import ReplayShape, check_fits
from troupe.roles.cargo import Bounds, Cargo, EpisodesShape, RolloutShape
from troupe.roles.play import Player
from troupe.seeding import Seeds
from troupe.types import Place


def env_spec(config: Config) -> envs.EnvSpec:
    """The environment that `config` names."""
    return envs.EnvSpec(config.env, config.env_options, config.backend)


def rollout_steps(config: Config) -> int:
    """Steps each environment plays per rollout."""
    return int(config.hyper["rollout_steps"])


def build_algorithm(
    config: Config,
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    *,
    rank: int = 0,
    replay_memory: Any = None,
) -> Algorithm:
    """The same network in every process, by the one seed; `rank` tells workers apart in what else they draw."""
    seeds = Seeds(config.seed)
    torch.manual_seed(seeds.integer("weights"))  # a user's own module draws its weights from torch's stream
    spec = NetSpec(config.net, config.activation, config.dropout, config.observation_scale)
    kind = algorithm_class(config.algo)
    hyper = msgspec.convert(config.hyper, kind.Config)
    network = kind.make_network(hyper, observation, action, spec)
    parameters = Parameters(network, optimiser=config.optimiser)
    turn_steps = config.envs * rollout_steps(config)
    workers = max(1, config.workers)
    place = Place(rank % workers, workers, config.envs, turn_steps, replay_memory)  # who joins is one more of its kind
    algorithm: Algorithm = kind(hyper, network, parameters, seeds.stream("learn", rank), place)
    return algorithm


def replay_bytes(config: Config, observation: spaces.Space[Any]) -> int:
    """How large a memory all workers must be handed, for `build_algorithm`; 0 where they share no experience."""
    if config.hyper.get("replay") != "global":
        return 0
    dtype = str(np.dtype(observation_dtype(observation)))
    shape = ReplayShape(int(config.hyper["replay_size"]), config.workers, observation.shape or (), dtype)
    check_fits(shape)
    return shape.nbytes()


def build_player(
    config: Config, rank: int, incarnation: int, beat: Callable[[int], None] = lambda steps: None
) -> Player:
    """One worker's share of the environments, seeded by who it is."""
    seeds = Seeds(config.seed)
    threads = config.env_threads or max(1, (os.cpu_count() or 1) // max(1, config.workers))
    rng = seeds.stream("envs", rank, incarnation)
    made = envs.make(env_spec(config), config.lanes, rng=rng, threads=threads)
    delayed = envs.DelayedEnvironments(made, config.env_delay_ms / 1000) if config.env_delay_ms else made
    return Player(delayed, seeds.stream("play", rank, incarnation), beat=beat)


def cargo(config: Config, observation: spaces.Space[Any], action: spaces.Space[Any]) -> Cargo:
    """What every message of this run that brings experience looks like."""
    dtype = str(envs.as_observation(observation.sample(), observation).dtype)
    steps, lanes = rollout_steps(config), config.lanes
    shape = observation.shape or (), dtype, action.shape or ()
    bounds = _bounds(action, "actions") + _bounds(observation, "observations", "final_observations")
    if algorithm_class(config.algo).remembers == "episodes":
        return EpisodesShape(most_steps(lanes, steps, int(config.hyper["episode_steps"])), *shape, bounds)
    return RolloutShape(steps, lanes, *shape, bounds)


def _bounds(space: spaces.Space[Any], *names: str) -> Bounds:
    """What may be in arrays of a discrete `space`."""
    if not isinstance(space, spaces.Discrete):
        return ()
    return tuple((name, int(space.start), int(space.start + space.n) - 1) for name in names)
