"""Environments by name, stepped in batches: EnvPool where it has the id, Gymnasium otherwise, behind one class."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from troupe.errors import ConfigError, EnvironmentFault, MissingExtra, last_line
from troupe.nets import load_object, observation_dtype
from troupe.seeding import rng_state, set_rng_state
from troupe.types import Array, Scalar, State, Step

Backend = Literal["auto", "envpool", "gymnasium"]
_EXTRAS = {"box2d": "box2d", "pygame": "box2d", "swig": "box2d", "mujoco": "mujoco", "ale_py": "atari"}


@dataclass(frozen=True)
class EnvSpec:
    """Which environment: a Gymnasium id, or the user's own `module:Class`, with its keyword arguments."""

    name: str
    options: Mapping[str, Scalar] = field(default_factory=dict)
    backend: Backend = "auto"

    @property
    def own(self) -> bool:
        """Whether it is the user's own class or function."""
        return ":" in self.name and self.name not in gymnasium.registry


def known_ids() -> list[str]:
    """The ids Gymnasium knows, without the ones kept for old versions' sake only."""
    return sorted(gymnasium.registry)


def check_name(spec: EnvSpec) -> None:
    """ConfigError with the nearest name, for an environment that is not there."""
    if spec.own or spec.name in gymnasium.registry:
        return
    near = difflib.get_close_matches(spec.name, known_ids(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "give a Gymnasium id, or your own as module:Class"
    raise ConfigError(f"there is no environment {spec.name!r}: {hint}")


def make_reference(spec: EnvSpec, **more: Any) -> gymnasium.Env[Any, Any]:
    """One environment as Gymnasium makes it: what evaluation, and nothing but it, is measured on."""
    check_name(spec)
    options = {**spec.options, **more}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of environments the user chose are not ours to fail on
            make = load_object(spec.name, "environment") if spec.own else partial(gymnasium.make, spec.name)
            env = make(**options)
    except ConfigError:
        raise
    except (ImportError, gymnasium.error.DependencyNotInstalled) as e:
        raise MissingExtra(f"what {spec.name} needs ({last_line(e)})", _extra(str(e))) from e
    except Exception as e:
        raise EnvironmentFault(f"{spec.name} could not be made: {last_line(e)}") from e
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{spec.name} made a {type(env).__name__}, not a gymnasium.Env")
    return env


def _extra(text: str) -> str:
    return next((extra for word, extra in _EXTRAS.items() if word in text.lower()), "all")


def envpool_has(spec: EnvSpec) -> bool:
    """Whether EnvPool is installed and simulates this very id."""
    if spec.own or spec.options or spec.backend == "gymnasium" or importlib.util.find_spec("envpool") is None:
        return False
    return spec.name in _envpool().list_all_envs()


def _envpool() -> Any:
    logging.getLogger("absl").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("envpool")


def make(spec: EnvSpec, batch: int, *, rng: np.random.Generator, threads: int = 1) -> Environments:
    """`batch` environments of one kind; `rng` seeds every episode where the back end lets us."""
    check_name(spec)
    if envpool_has(spec):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = _envpool().make_gymnasium(
                spec.name, num_envs=batch, num_threads=min(threads, batch), seed=int(rng.integers(2**31 - batch))
            )
        return Environments(pool, spec.name, batch, AutoresetMode.NEXT_STEP)
    if spec.backend == "envpool":
        if importlib.util.find_spec("envpool") is None:
            raise MissingExtra("EnvPool", "fast")
        raise ConfigError(f"EnvPool cannot simulate {spec.name} as asked: use --backend gymnasium")
    vector = SyncVectorEnv([lambda: make_reference(spec)] * batch, autoreset_mode=AutoresetMode.DISABLED)
    return Environments(vector, spec.name, batch, AutoresetMode.DISABLED, rng=rng)


class Environments:
    """A vector environment of either library, with one meaning of `Step` for all autoreset modes.

    With `rng`, every episode begins from a seed of its own, so that open episodes can be rebuilt from their seed and
    their actions; that needs single environments that are reset one by one (AutoresetMode.DISABLED).
    """

    def __init__(
        self, vector: Any, name: str, batch: int, mode: AutoresetMode, *, rng: np.random.Generator | None = None
    ) -> None:
        self.batch = batch
        self.mode = mode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # EnvPool makes its spaces here; what they round is not the user's doing
            self.observation_space: spaces.Space[Any] = vector.single_observation_space
            self.action_space: spaces.Space[Any] = vector.single_action_space
        self._vector, self._name, self._rng = vector, name, rng
        self._ended = np.zeros(batch, bool)
        self._all_valid = np.ones(batch, bool)
        self._history = _OpenEpisodes(batch) if rng is not None else None
        self._convert = to_action(self.action_space)
        shape = self.observation_space.shape or ()
        self._no_finals = (np.zeros(0, np.int64), np.zeros((0, *shape), observation_dtype(self.observation_space)))

    def reset(self) -> Array:
        """Begin an episode in every environment."""
        self._ended = np.zeros(self.batch, bool)
        if self._history is None:
            return self._checked(self._call("reset", self._vector.reset)[0], "reset")
        seeds = self._history.begin(np.arange(self.batch), self._seeds(self.batch))
        return self._checked(self._call("reset", lambda: self._vector.reset(seed=seeds))[0], "reset")

    def step(self, actions: Array) -> Step:
        """One step of each environment."""
        taken = self._convert(actions)
        observations, rewards, terminated, truncated, info = self._call("step", lambda: self._vector.step(taken))
        observations = self._checked(observations, "step")
        rewards = np.asarray(rewards, np.float32)
        if not np.isfinite(rewards).all():
            raise EnvironmentFault(self._not_finite("a reward", rewards, "step"))
        valid, self._ended = (
            ~self._ended if self.mode is AutoresetMode.NEXT_STEP else self._all_valid,
            np.asarray(terminated | truncated),
        )
        index, finals = self._no_finals
        if self._history is not None:
            self._history.acted(taken)
        if self.mode is not AutoresetMode.NEXT_STEP and self._ended.any():
            index = np.flatnonzero(self._ended)
            if self.mode is AutoresetMode.SAME_STEP:
                finals = np.stack([np.asarray(info["final_obs"][i]) for i in index]).astype(observations.dtype)
            else:
                finals = observations[index]
                observations = self._reset_some(index)
            self._checked(finals, "step")
        return Step(observations, rewards, np.asarray(terminated), np.asarray(truncated), valid, index, finals)

    def _reset_some(self, index: Array) -> Array:
        """Begin anew where an episode ended, and nowhere else."""
        options = {"reset_mask": self._ended.copy()}
        seeds = None if self._history is None else self._history.begin(index, self._seeds(len(index)))
        return self._checked(self._call("reset", lambda: self._vector.reset(seed=seeds, options=options))[0], "reset")

    def _seeds(self, count: int) -> Array:
        assert self._rng is not None
        return self._rng.integers(2**31, size=count)

    def _call(self, verb: str, call: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about spaces and deprecations: said once, at the start
                return call()
        except (
            Exception,
            SystemExit,
        ) as e:  # whatever the user's environment may raise becomes one sentence that names it
            raise EnvironmentFault(f"{self._name} raised in {verb}: {last_line(e)}") from e

    def _checked(self, observations: Any, verb: str) -> Array:
        array = np.asarray(observations)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise EnvironmentFault(self._not_finite("an observation", array, verb))
        return array

    def _not_finite(self, what: str, array: Array, verb: str) -> str:
        where = np.argwhere(~np.isfinite(array))[0]
        return (
            f"{self._name} returned {array[tuple(where)]} in {what} of {verb} (environment {where[0]} of {self.batch})"
        )

    def state(self) -> State | None:
        """The seed of each open episode and the actions taken in it so far."""
        if self._history is None or self._rng is None:
            return None
        state = self._history.state()
        state.values["rng"] = rng_state(self._rng)
        return state

    def restore(self, state: State) -> Array:
        """Play every open episode again up to where it stood."""
        assert self._history is not None and self._rng is not None
        set_rng_state(self._rng, state.values["rng"])
        seeds, actions = self._history.restore(state)
        observations = self._checked(self._call("reset", lambda: self._vector.reset(seed=seeds))[0], "reset").copy()
        for i, (env, past) in enumerate(zip(self._vector.envs, actions, strict=True)):
            for action in past:
                observations[i] = self._call("step", partial(env.step, action))[0]
        self._ended = np.zeros(self.batch, bool)
        return observations

    def close(self) -> None:
        self._vector.close()


class DelayedEnvironments:
    """`envs`, each step of which waits `delay_s` longer: a stand-in for a heavy simulator, or for a device.

    One wait serves the whole batch, as if every environment had a device of its own and all of them answered side by
    side. The wait takes no core. Seeds, actions and all that follows from them stay as they were.
    """

    def __init__(self, envs: Environments, delay_s: float) -> None:
        self.batch, self.state, self.restore = envs.batch, envs.state, envs.restore
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.reset, self.close = envs.reset, envs.close
        self._envs, self._delay_s = envs, delay_s

    def step(self, actions: Array) -> Step:
        """One step of each environment, and the wait."""
        time.sleep(self._delay_s)
        return self._envs.step(actions)


class _OpenEpisodes:
    """Seed and actions of the episode that each environment is in."""

    def __init__(self, batch: int) -> None:
        self._seeds = [0] * batch
        self._begun = np.zeros(batch, np.int64)  # index into the rows of actions
        self._rows: list[Array] = []
        self._dropped = 0

    def begin(self, index: Array, seeds: Array) -> list[int | None]:
        """Episodes begin in `index`; the list of seeds that a vector reset takes."""
        taken: list[int | None] = [None] * len(self._seeds)
        for i, seed in zip(index, seeds, strict=True):
            taken[i] = self._seeds[i] = int(seed)
        self._begun[index] = self._dropped + len(self._rows)
        return taken

    def acted(self, actions: Array) -> None:
        self._rows.append(actions.copy())
        if len(self._rows) >= 4096:  # amortised: drop what no open episode needs
            needless = int(self._begun.min()) - self._dropped
            del self._rows[:needless]
            self._dropped += needless

    def state(self) -> State:
        first = int(self._begun.min()) - self._dropped
        rows = self._rows[first:]
        actions = np.stack(rows) if rows else np.zeros((0, len(self._seeds)), np.int64)
        begun = (self._begun - self._dropped - first).tolist()
        return State({"actions": actions}, {"seeds": list(self._seeds), "begun": begun})

    def restore(self, state: State) -> tuple[list[int], list[list[Any]]]:
        self._seeds = [int(s) for s in state.values["seeds"]]
        self._begun = np.asarray(state.values["begun"], np.int64)
        self._rows, self._dropped = list(state.arrays["actions"]), 0
        return self._seeds, [[row[i] for row in self._rows[b:]] for i, b in enumerate(self._begun)]


def as_observation(value: Any, space: spaces.Space[Any]) -> Array:
    """An observation in the dtype that networks are fed."""
    return np.asarray(value, observation_dtype(space))


def to_action(space: spaces.Space[Any]) -> Callable[[Array], Array]:
    """From what a policy gives to what the environment takes: its dtype, and within its bounds."""
    if isinstance(space, spaces.Box):
        low, high, dtype = space.low, space.high, space.dtype
        return lambda actions: np.clip(actions, low, high).astype(dtype)
    return lambda actions: actions.astype(space.dtype)
