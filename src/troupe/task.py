"""Task: what a learner tells a machine that wants to play for it, and what that machine checks before it does."""

from __future__ import annotations

from typing import Any

import msgspec

from troupe import __version__
from troupe.build import build_algorithm, env_spec
from troupe.config import Config, convert, to_dict
from troupe.envs import make_reference
from troupe.errors import BadMessage, ConfigError
from troupe.goal import Goal
from troupe.ports import Algorithm
from troupe.types import Json


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Plain values, for they come from a broker: nothing here is trusted before `accept` has looked at it."""

    run: str
    config: dict[str, Any]
    goal: Goal
    life: int  # how often the run was resumed
    version: str  # of Troupe
    fingerprint: str  # of the network
    observation: str  # the spaces, in Gymnasium's words
    action: str
    link: dict[str, Json]  # what a worker connects with, but for the address and its own name
    rank: int  # of the first of the machine's workers


def describe(
    config: Config,
    run: str,
    goal: Goal,
    life: int,
    algorithm: Algorithm,
    spaces: tuple[str, str],
    link: dict[str, Json],
) -> Task:
    """What this learner wants played."""
    plain = {**to_dict(config), "via": "", "name": ""}  # the address is the machine's own, and it may hold a password
    return Task(
        run=run, config=plain, goal=goal, life=life, version=__version__, fingerprint=algorithm.parameters.fingerprint,
        observation=spaces[0], action=spaces[1], link=link, rank=0,
    )  # fmt: skip


def read(text: str) -> Task:
    """The task in a message; BadMessage where it is none."""
    try:
        return msgspec.json.decode(text, type=Task)
    except msgspec.MsgspecError as e:
        raise BadMessage(f"a task that cannot be read: {e}") from e


def accept(task: Task, allowed: frozenset[str]) -> Config:
    """The task's config, where this machine can play it; ConfigError says what stands against it.

    An environment or a network named as module:Class is code, and code that a message names is only run where the
    person at this machine `allowed` its package.
    """
    if task.version != __version__:
        raise ConfigError(f"run {task.run} is led by Troupe {task.version}, this is {__version__}: install the same")
    config: Config = convert(Config, task.config, f"run {task.run}")
    for what, name in (("env", config.env), ("net", config.net)):
        package = name.partition(":")[0].partition(".")[0]
        if ":" in name and package not in allowed:
            raise ConfigError(
                f"run {task.run} wants {what} {name}, which is code of this machine: allow it with --allow {package}"
            )
    env = make_reference(env_spec(config))
    try:
        found = {"observation space": str(env.observation_space), "action space": str(env.action_space)}
        algorithm = build_algorithm(config, env.observation_space, env.action_space)
    finally:
        env.close()
    found["network"] = algorithm.parameters.fingerprint
    wanted = {"observation space": task.observation, "action space": task.action, "network": task.fingerprint}
    for what, mine in found.items():
        if mine != wanted[what]:
            raise ConfigError(
                f"run {task.run} has the {what} {wanted[what]}, but {config.env} on this machine gives {mine}: "
                "install the same versions of its packages"
            )
    return config
