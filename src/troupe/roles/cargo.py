"""Rollouts and weights as messages, and back; what arrives is checked against what was agreed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from troupe.errors import BadMessage
from troupe.types import Array, Message, Rollout, Scalar

_ARRAYS = tuple(name for name in Rollout.__slots__ if name != "version")
_DTYPES = {
    **dict.fromkeys(("terminated", "truncated", "valid"), "bool"),
    **dict.fromkeys(("log_probs", "rewards", "episode_returns"), "float32"),
    **dict.fromkeys(("final_index", "episode_lengths"), "int64"),
}


def pack_rollout(
    rollout: Rollout, *, run: str, sender: str, incarnation: int, sequence: int, meta: Mapping[str, Scalar]
) -> Message:
    """A rollout on its way to the learner."""
    arrays = {name: getattr(rollout, name) for name in _ARRAYS}
    return Message("rollout", run, sender, incarnation, sequence, rollout.version, meta, arrays)


@dataclass(frozen=True)
class RolloutShape:
    """What a rollout of this run looks like; anything else is refused before it is learned from."""

    steps: int
    batch: int
    observation: tuple[int, ...]
    observation_dtype: str
    action: tuple[int, ...]

    def unpack(self, message: Message) -> Rollout:
        """The rollout in `message`; BadMessage names the array that is not as agreed."""
        grid = (self.steps, self.batch)
        expected = {
            "observations": (self.steps + 1, self.batch, *self.observation),
            "actions": (*grid, *self.action),
            **dict.fromkeys(("log_probs", "rewards", "terminated", "truncated", "valid"), grid),
        }
        if set(message.arrays) != set(_ARRAYS):
            raise BadMessage(
                f"{message.sender}: a rollout has the arrays {sorted(_ARRAYS)}, not {sorted(message.arrays)}"
            )
        for name, shape in expected.items():
            if message.arrays[name].shape != shape:
                raise BadMessage(f"{message.sender}: {name} is {list(message.arrays[name].shape)}, not {list(shape)}")
        for name, array in message.arrays.items():
            if str(array.dtype) not in self._dtypes(name):
                raise BadMessage(f"{message.sender}: {name} are {array.dtype}, not {' or '.join(self._dtypes(name))}")
        self._check_finals(message)
        returns, lengths = message.arrays["episode_returns"], message.arrays["episode_lengths"]
        if returns.ndim != 1 or returns.shape != lengths.shape:
            raise BadMessage(
                f"{message.sender}: episode_returns {list(returns.shape)} and episode_lengths do not agree"
            )
        for name, array in message.arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadMessage(f"{message.sender}: {name} holds a number that is not finite")
        return Rollout(**dict(message.arrays), version=message.version)

    def _dtypes(self, name: str) -> tuple[str, ...]:
        if name in ("observations", "final_observations"):
            return (self.observation_dtype,)
        if name == "actions":
            return ("float32",) if self.action else ("int64",)
        return (_DTYPES[name],)

    def _check_finals(self, message: Message) -> None:
        index, finals = message.arrays["final_index"], message.arrays["final_observations"]
        if index.ndim != 2 or index.shape[1] != 2 or finals.shape != (len(index), *self.observation):
            raise BadMessage(f"{message.sender}: final_index {list(index.shape)} and final_observations do not agree")
        if len(index) and not ((index >= 0) & (index < (self.steps, self.batch))).all():
            raise BadMessage(f"{message.sender}: final_index points outside the rollout")

    def nbytes(self) -> int:
        """The most bytes that such a rollout can take, every step ending an episode."""
        cell = int(np.prod(self.observation, dtype=np.int64)) * np.dtype(self.observation_dtype).itemsize
        action = int(np.prod(self.action, dtype=np.int64)) * 8
        grid = self.steps * self.batch
        return (grid + self.batch) * cell + grid * (action + 11 + cell + 16 + 12) + 65_536


def pack_weights(
    weights: Array, *, run: str, version: int, learned: Mapping[str, int], progress: float = 0.0
) -> Message:
    """Weights on their way down; `learned` says how many rollouts of each sender are in them, `progress` how much of
    the training is done, since those who only play have schedules too."""
    meta = {**learned, "progress": progress}
    return Message("weights", run, "learner", version=version, meta=meta, arrays={"weights": weights})
