"""Transitions: what replay keeps of a rollout, each over up to n steps of one episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from troupe.types import Array, Rollout


@dataclass(frozen=True, slots=True)
class Transitions:
    """N transitions; the value of a pair is R + discount * V(next observation)."""

    observations: Array  # [N, ...]
    actions: Array  # [N] int64
    returns: Array  # [N] float32, R: the discounted rewards of the k steps
    next_observations: Array  # [N, ...], after the k steps; where the episode was truncated, its true last one
    discounts: Array  # [N] float32, gamma^k; 0 where the task ended

    def __len__(self) -> int:
        return len(self.returns)


def n_step_transitions(rollout: Rollout, *, n: int, gamma: float, reward_scale: float = 1.0) -> Transitions:
    """One transition for each valid step, in the order of time; a window stops where its episode or the rollout does.

    So the last steps of a rollout look fewer than n steps ahead. That is as unbiased as n, and needs no memory of what
    whose rollout was before: rollouts of many actors may come in any order.
    """
    length = len(rollout.rewards)
    ended = rollout.terminated | rollout.truncated
    goes_on = np.zeros_like(ended)  # step t + 1 is of the same episode and of this rollout
    goes_on[:-1] = ~ended[:-1] & rollout.valid[1:]
    rewards = rollout.rewards * np.float32(reward_scale)
    returns, steps = rewards.copy(), np.ones(ended.shape, np.int64)
    reaches = goes_on.copy()  # the window that begins at t holds step t + k
    for k in range(1, min(n, length)):
        returns[:-k] += np.float32(gamma**k) * rewards[k:] * reaches[:-k]
        steps[:-k] += reaches[:-k]
        reaches[:-k] &= goes_on[k:]
    begin, lane = np.nonzero(rollout.valid)
    steps = steps[begin, lane]
    last = begin + steps - 1
    alive = ~rollout.terminated[last, lane]
    return Transitions(
        rollout.observations[begin, lane],
        rollout.actions[begin, lane],
        returns[begin, lane],
        _successors(rollout, last, lane),
        (gamma ** np.arange(n + 1)).astype(np.float32)[steps] * alive,
    )


def _successors(rollout: Rollout, t: Array, b: Array) -> Array:
    """What really followed step t of environment b: the row below, or the final observation kept beside the rows."""
    following: Array = rollout.observations[t + 1, b]
    if len(rollout.final_index):
        beside = np.full(rollout.rewards.shape, -1)
        beside[rollout.final_index[:, 0], rollout.final_index[:, 1]] = np.arange(len(rollout.final_index))
        row = beside[t, b]
        following[row >= 0] = rollout.final_observations[row[row >= 0]]
    return following
