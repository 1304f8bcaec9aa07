"""The Python API, of the same shape as the command line.

import troupe

outcome = troupe.train("CartPole-v1", seed=1, fresh=True, name="mine")
agent = troupe.load("mine")
action = agent.act(observation)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from troupe.build import build_algorithm, env_spec
from troupe.checkpoints import Checkpoint
from troupe.config import HELD_FIXED, Config, to_dict
from troupe.envs import as_observation, make_reference, to_action
from troupe.errors import ConfigError, RunDirError, UserError
from troupe.launch import Outcome
from troupe.launch import train as launch
from troupe.prepare import prepare
from troupe.resolve import flat as flat
from troupe.resolve import resolve
from troupe.roles.evaluator import Evaluation, evaluate, evaluation_seeds
from troupe.rundir import RunDir, runs_root
from troupe.seeding import Seeds
from troupe.supervisor import Supervisor
from troupe.types import Array

__all__ = ["Agent", "Outcome", "load", "resume", "train"]


def train(env: str, *, fresh: bool = False, show: bool = False, **options: Any) -> Outcome:
    """Train an agent; `options` are those of `troupe train --help`, with underscores. The same name resumes."""
    return train_config(resolve({"env": env, **options}), given={"env", *options}, fresh=fresh, show=show)


def train_config(
    config: Config, *, given: Iterable[str], fresh: bool, show: bool, supervisor: Supervisor | None = None
) -> Outcome:
    """Train what `config` says; a run of that name goes on with its own config, changed by what was `given`."""
    name = config.name or free_name(config)
    exists = (runs_root() / name / "manifest.json").exists()
    if exists and not fresh:
        known = set(given) - {"name"}
        return resume(
            name,
            show=show,
            supervisor=supervisor,
            **{key: value for key, value in flat(config).items() if key in known},
        )
    config = resolve({**flat(config), "name": name})
    prepared = prepare(config)  # whatever can be refused is refused here, before anything is on disk
    with RunDir.create(name, fresh=fresh) as run:
        try:
            run.write_config(to_dict(config))
            run.write_manifest(prepared.facts())
            return launch(prepared, run, resume=False, show=show, supervisor=supervisor)
        except (UserError, OSError):
            if not exists and run.load_latest() is None:  # it never began: nothing stays behind
                shutil.rmtree(run.path, ignore_errors=True)
            raise


def resume(name: str, *, show: bool = False, supervisor: Supervisor | None = None, **changes: Any) -> Outcome:
    """Go on with a run where its newest valid checkpoint stands."""
    run = RunDir.open(name)
    before = resolve(flat_dict(run))
    config = changed(run.name, before, changes)
    prepared = prepare(config)
    with run:
        run.write_config(to_dict(config))
        return launch(prepared, run, resume=True, show=show, supervisor=supervisor)


def changed(name: str, before: Config, changes: Mapping[str, Any], *, strict: bool = True) -> Config:
    """The config of the run `name` with `changes`; ConfigError where its weights could not go on with them."""
    merged = {**flat(before), **changes}
    for key in ("env", "algo"):  # first, since with another algorithm the other options would not be known
        _check_fixed(name, key, getattr(before, key), merged[key])
    config = resolve(merged, strict=strict)
    for key in HELD_FIXED:
        _check_fixed(name, key, flat(before)[key], flat(config)[key])
    return config


def _check_fixed(name: str, key: str, before: Any, after: Any) -> None:
    if before != after:
        raise ConfigError(
            f"the run {name} was made with {key} = {before!r}: it cannot go on with {after!r}; "
            "take another --name, or --fresh to start again"
        )


def flat_dict(run: RunDir) -> dict[str, Any]:
    """A run's stored config as flat options."""
    values = run.read_config()
    return {**{k: v for k, v in values.items() if k != "hyper"}, **values.get("hyper", {})}


def free_name(config: Config) -> str:
    """The first of env-algo-1, env-algo-2... that no run has."""
    text = f"{config.env}-{config.algo}".lower()
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in text).lstrip("-_.")[-100:]
    number = 1
    while (runs_root() / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"


class Agent:
    """A trained agent: its network with the weights of one checkpoint."""

    def __init__(self, config: Config, checkpoint: Checkpoint) -> None:
        torch.set_num_threads(1)
        self.config, self.checkpoint = config, checkpoint
        env = make_reference(env_spec(config))
        self.observation_space, self.action_space = env.observation_space, env.action_space
        env.close()
        self._algorithm = build_algorithm(config, self.observation_space, self.action_space)
        self._algorithm.parameters.load_weights(checkpoint.weights, checkpoint.version)
        self._convert = to_action(self.action_space)
        self._rng = np.random.default_rng()

    def act(self, observation: Any, *, greedy: bool = True) -> Any:
        """The action for one observation, or the actions for a batch of them."""
        array = as_observation(observation, self.observation_space)
        shape = self.observation_space.shape or ()
        if array.shape not in (shape, (*array.shape[:1], *shape)):
            raise ConfigError(
                f"an observation of {self.config.env} is {list(shape)}, or a batch of them, not {list(array.shape)}"
            )
        one = array.shape == shape
        actions: Array = self._algorithm.act(array[None] if one else array, self._rng, greedy=greedy).actions
        taken = self._convert(actions)
        return taken[0] if one else taken

    def evaluate(self, episodes: int = 100, *, seed: int | None = None, greedy: bool = True) -> Evaluation:
        """Play whole episodes on the reference environment, from seeds that training never uses."""
        rng = Seeds(self.config.seed if seed is None else seed).stream("eval command")
        spec = env_spec(self.config)
        seeds = evaluation_seeds(rng, episodes)
        return evaluate(self._algorithm, lambda: make_reference(spec), seeds, rng, greedy=greedy)


def load(run: str | os.PathLike[str], *, which: str = "best") -> Agent:
    """A run's agent: its best evaluated weights, or the newest with which="latest"; where one is absent, the other."""
    if which not in ("best", "latest"):
        raise ConfigError(f"which={which!r}: there are 'best' and 'latest'")
    found = RunDir.open(run)
    first, second = (found.load_best, found.load_latest) if which == "best" else (found.load_latest, found.load_best)
    checkpoint = first() or second()
    if checkpoint is None:
        raise RunDirError(f"the run {found.path} has no checkpoint yet: let it train for a moment")
    return Agent(resolve(flat_dict(found)), checkpoint)
