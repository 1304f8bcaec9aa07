"""Rollouts, episodes and weights as messages, and back; what arrives is checked against what was agreed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from troupe.errors import BadMessage
from troupe.types import Array, Episodes, Message, Rollout, Scalar

_ROLLOUT = tuple(name for name in Rollout.__slots__ if name != "version")
_EPISODES = tuple(name for name in Episodes.__slots__ if name not in ("version", "steps"))
_DTYPES = {
    **dict.fromkeys(("terminated", "truncated", "valid"), np.dtype(bool)),
    **dict.fromkeys(("log_probs", "rewards", "credits", "episode_returns", "returns"), np.dtype(np.float32)),
    **dict.fromkeys(("final_index", "episode_lengths", "lengths"), np.dtype(np.int64)),
}


Bounds: TypeAlias = tuple[tuple[str, int, int], ...]  # array, the lowest and the highest that may be in it
MOST_REST_S: Final = 60.0  # that an actor rests after a message, whatever it is asked to
MOST_ROLLOUTS: Final = 100  # that it sifts for one, likewise


class Cargo(Protocol):
    """What the messages that bring experience look like; anything else is refused before it is learned from."""

    def unpack(self, message: Message) -> Rollout | Episodes:
        """What is in `message`; BadMessage names what is not as agreed."""

    def nbytes(self) -> int:
        """The most bytes that one of them can take."""


def pack(
    played: Rollout | Episodes, *, run: str, sender: str, incarnation: int, sequence: int, meta: Mapping[str, Scalar]
) -> Message:
    """Experience on its way to the learner."""
    if isinstance(played, Rollout):
        return pack_rollout(played, run=run, sender=sender, incarnation=incarnation, sequence=sequence, meta=meta)
    arrays = {name: getattr(played, name) for name in _EPISODES}
    return Message(
        "episodes", run, sender, incarnation, sequence, played.version, {**meta, "steps": played.steps}, arrays
    )


def pack_rollout(
    rollout: Rollout, *, run: str, sender: str, incarnation: int, sequence: int, meta: Mapping[str, Scalar]
) -> Message:
    """A rollout on its way to the learner."""
    arrays = {name: getattr(rollout, name) for name in _ROLLOUT}
    return Message("rollout", run, sender, incarnation, sequence, rollout.version, meta, arrays)


@dataclass(frozen=True)
class RolloutShape:
    """What a rollout of this run looks like; anything else is refused before it is learned from."""

    steps: int
    batch: int
    observation: tuple[int, ...]
    observation_dtype: str
    action: tuple[int, ...]
    bounds: Bounds = ()  # of what is discrete

    def unpack(self, message: Message) -> Rollout:
        """The rollout in `message`; BadMessage names the array that is not as agreed."""
        grid = (self.steps, self.batch)
        expected = {
            "observations": (self.steps + 1, self.batch, *self.observation),
            "actions": (*grid, *self.action),
            **dict.fromkeys(("log_probs", "rewards", "terminated", "truncated", "valid"), grid),
        }
        _check_names(message, "a rollout", _ROLLOUT)
        _check_shapes(message, expected)
        _check_dtypes(message, self.observation_dtype, continuous=bool(self.action))
        self._check_finals(message)
        _check_agree(message, "episode_returns", "episode_lengths")
        _check_values(message, self.bounds)
        return Rollout(**dict(message.arrays), version=message.version)

    def _check_finals(self, message: Message) -> None:
        index, finals = message.arrays["final_index"], message.arrays["final_observations"]
        if index.ndim != 2 or index.shape[1] != 2 or finals.shape != (len(index), *self.observation):
            raise BadMessage(f"{message.sender}: final_index {list(index.shape)} and final_observations do not agree")
        if len(index) and not ((index >= 0) & (index < (self.steps, self.batch))).all():
            raise BadMessage(f"{message.sender}: final_index points outside the rollout")

    def nbytes(self) -> int:
        """The most bytes that such a rollout can take, every step ending an episode."""
        cell, action = _cell_bytes(self.observation, self.observation_dtype), _cell_bytes(self.action, "int64")
        grid = self.steps * self.batch
        return (grid + self.batch) * cell + grid * (action + 11 + cell + 16 + 12) + 65_536


@dataclass(frozen=True)
class EpisodesShape:
    """What a message of episodes looks like: at most `steps` steps of them, and as many episodes told of."""

    steps: int
    observation: tuple[int, ...]
    observation_dtype: str
    action: tuple[int, ...]
    bounds: Bounds = ()

    def unpack(self, message: Message) -> Episodes:
        """The episodes in `message`; BadMessage names what is not as agreed."""
        _check_names(message, "a message of episodes", _EPISODES)
        arrays, who = message.arrays, message.sender
        count = len(arrays["actions"]) if arrays["actions"].ndim else 0
        if not 0 < count <= self.steps:
            raise BadMessage(f"{who}: {count} steps of episodes, where 1 to {self.steps} were agreed")
        expected = {"observations": (count, *self.observation), "actions": (count, *self.action), "credits": (count,)}
        _check_shapes(message, expected)
        _check_dtypes(message, self.observation_dtype, continuous=bool(self.action))
        _check_agree(message, "returns", "lengths")
        _check_agree(message, "episode_returns", "episode_lengths")
        _check_values(message, self.bounds)
        lengths, steps = arrays["lengths"], message.meta.get("steps")
        if (lengths < 1).any() or (lengths > count).any() or lengths.sum() != count:
            raise BadMessage(f"{who}: the lengths of its episodes do not sum to the {count} steps of them")
        if len(arrays["episode_lengths"]) > self.steps:
            told = len(arrays["episode_lengths"])
            raise BadMessage(f"{who}: {told} episodes are told of, where at most {self.steps} were agreed")
        if (arrays["episode_lengths"] < 1).any():
            raise BadMessage(f"{who}: an episode of no length")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise BadMessage(f"{who}: {steps!r} is no number of steps that were played")
        return Episodes(**dict(arrays), version=message.version, steps=steps)

    def nbytes(self) -> int:
        """The most bytes that such a message can take; of episodes that are only told of there may be as many again."""
        cell, action = _cell_bytes(self.observation, self.observation_dtype), _cell_bytes(self.action, "int64")
        return self.steps * (cell + action + 4 + 12 + 12) + 65_536


def _check_names(message: Message, what: str, names: Iterable[str]) -> None:
    if set(message.arrays) != set(names):
        raise BadMessage(f"{message.sender}: {what} has the arrays {sorted(names)}, not {sorted(message.arrays)}")


def _check_shapes(message: Message, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if message.arrays[name].shape != shape:
            raise BadMessage(f"{message.sender}: {name} is {list(message.arrays[name].shape)}, not {list(shape)}")


def _check_dtypes(message: Message, observation_dtype: str, *, continuous: bool) -> None:
    agreed = {
        **_DTYPES,
        **dict.fromkeys(("observations", "final_observations"), np.dtype(observation_dtype)),
        "actions": np.dtype(np.float32 if continuous else np.int64),
    }
    for name, array in message.arrays.items():
        if array.dtype != agreed[name]:
            raise BadMessage(f"{message.sender}: {name} are {array.dtype}, not {agreed[name]}")


def _check_agree(message: Message, returns: str, lengths: str) -> None:
    one, other = message.arrays[returns], message.arrays[lengths]
    if one.ndim != 1 or one.shape != other.shape:
        raise BadMessage(f"{message.sender}: {returns} {list(one.shape)} and {lengths} do not agree")


def _check_values(message: Message, bounds: Bounds) -> None:
    """An action that there is not would end the learner, as would a time that is none."""
    _check_finite(message)
    for name, lowest, highest in bounds:
        array = message.arrays.get(name)
        if array is not None and array.size and not lowest <= array.min() <= array.max() <= highest:
            found = f"{array.min()} to {array.max()}"
            raise BadMessage(f"{message.sender}: {name} are {found}, where there are {lowest} to {highest}")
    for name, value in message.meta.items():
        if name.endswith("_s") and (isinstance(value, bool | str) or not 0.0 <= value < 2**53):
            raise BadMessage(f"{message.sender}: {name} is {value!r}, which is no time")


def _check_finite(message: Message) -> None:
    for name, array in message.arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadMessage(f"{message.sender}: {name} holds a number that is not finite")


def _cell_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def pack_weights(weights: Array, run: str, sender: str, version: int, meta: Mapping[str, Scalar]) -> Message:
    """Weights on their way down. `meta` says how many messages of each sender are in them, and "progress" how much of
    the training is done, since those who only play have schedules too."""
    return Message("weights", run, sender, version=version, meta=meta, arrays={"weights": weights})


def check_weights(message: Message, run: str, count: int) -> None:
    """Nothing but `count` weights of `run` passes: who plays trusts a learner beyond a broker no more than it them."""
    _check_names(message, "a publication of weights", ("weights",))
    weights, who = message.arrays["weights"], message.sender
    if message.run != run:
        raise BadMessage(f"{who}: weights of run {message.run!r}, this is {run!r}")
    if weights.shape != (count,) or weights.dtype != np.float32:
        raise BadMessage(f"{who}: weights are {list(weights.shape)} {weights.dtype}, not {[count]} float32")
    _check_finite(message)
    for name, most in (("progress", 1.0), ("rest_s", MOST_REST_S)):
        value = message.meta.get(name, 0.0)
        if isinstance(value, bool | str) or not 0.0 <= value <= most:
            raise BadMessage(f"{who}: {name} is {value!r}, not 0 to {most:g}")
    rollouts = message.meta.get("rollouts", 1)
    if type(rollouts) is not int or not 1 <= rollouts <= MOST_ROLLOUTS:
        raise BadMessage(f"{who}: rollouts is {rollouts!r}, not 1 to {MOST_ROLLOUTS}")
