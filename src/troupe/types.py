"""Plain data that crosses boundaries between play, remember, learn and apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Scalar: TypeAlias = bool | int | float | str
Metrics: TypeAlias = dict[str, float]
Json: TypeAlias = Any  # whatever json.dumps takes; checked where it enters


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy chose for B environments, and what learning needs of that later."""

    actions: Array  # [B] int64, or [B, A] float32
    log_probs: Array  # [B] float32, log pi(a|o) under the weights that acted


@dataclass(frozen=True, slots=True)
class Step:
    """What B environments answered.

    `observations` is what the policy sees next. Where an episode ended and the environment was reset in the same
    call, the observation the episode ended with is not in there: it stands in `final_observations`, row i of it
    belonging to environment `final_index[i]`. Where the environment resets one call later, that later step has
    `valid` false: its action was ignored and it is not a transition.
    """

    observations: Array  # [B, ...]
    rewards: Array  # [B] float32
    terminated: Array  # [B] bool: the task ended; its value is 0 from here
    truncated: Array  # [B] bool: only the clock ended; bootstrap from the final observation
    valid: Array  # [B] bool
    final_index: Array  # [n] int64
    final_observations: Array  # [n, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of B environments, played by one version of the weights."""

    observations: Array  # [T + 1, B, ...]; observations[t + 1] follows step t unless that step has a final observation
    actions: Array  # [T, B] or [T, B, A]
    log_probs: Array  # [T, B]
    rewards: Array  # [T, B]
    terminated: Array  # [T, B] bool
    truncated: Array  # [T, B] bool
    valid: Array  # [T, B] bool
    final_index: Array  # [n, 2] int64: (t, b)
    final_observations: Array  # [n, ...]
    version: int  # of the weights that acted
    episode_returns: Array = field(default_factory=lambda: np.zeros(0, np.float32))  # [m], ended in this rollout
    episode_lengths: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # [m]

    @property
    def steps(self) -> int:
        """Environment steps that are transitions."""
        return int(self.valid.sum())


@dataclass(frozen=True, slots=True)
class Episodes:
    """What is worth keeping of m episodes, one after another, and a count of everything that was played beside them."""

    observations: Array  # [N, ...]
    actions: Array  # [N] or [N, A]
    credits: Array  # [N] float32: the discounted rewards from that step to the end
    lengths: Array  # [m] int64: steps kept of each, so they sum to N
    returns: Array  # [m] float32, of each whole episode
    version: int  # of the weights that acted last
    steps: int  # environment steps played since the last message, of whatever episode
    episode_returns: Array  # [k] float32, ended since the last message, kept or not
    episode_lengths: Array  # [k] int64


@dataclass(frozen=True, slots=True)
class Pace:
    """What a learner asks of whoever plays for it, so that no more waits for it than it can use."""

    rollouts: int = 1  # to sift for one message
    rest_s: float = 0.0  # after a message


@dataclass(frozen=True, slots=True)
class Message:
    """What travels: a small typed header and raw arrays."""

    kind: str
    run: str
    sender: str
    incarnation: int = 0  # how often this sender was restarted
    sequence: int = 0  # counts this sender's messages within its incarnation
    version: int = 0  # of the parameters it was made with
    meta: Mapping[str, Scalar] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the company an algorithm works: which worker it is of how many, and what they share."""

    rank: int
    workers: int
    envs: int  # of all workers
    turn_steps: int  # environment steps of one rollout of every worker
    replay_memory: Any = None  # bytes that every worker sees, where they share their experience

    @property
    def lanes(self) -> slice:
        """This worker's environments among those of all."""
        own = self.envs // self.workers
        return slice(self.rank * own, (self.rank + 1) * own)


@dataclass(slots=True)
class State:
    """All that an exact resume needs: arrays for the safetensors file, plain values for the JSON beside it."""

    arrays: dict[str, Array] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)

    def put(self, name: str, part: State) -> None:
        """Store `part` under `name`."""
        self.arrays.update({f"{name}/{key}": array for key, array in part.arrays.items()})
        self.values[name] = part.values

    def get(self, name: str) -> State:
        """The part stored under `name`."""
        prefix = f"{name}/"
        arrays = {key.removeprefix(prefix): a for key, a in self.arrays.items() if key.startswith(prefix)}
        return State(arrays, self.values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)
