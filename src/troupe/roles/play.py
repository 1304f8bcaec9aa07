"""Play: step many environments with one network call, and keep what happened as a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from troupe.ports import Algorithm, Environments
from troupe.seeding import rng_state, set_rng_state
from troupe.types import Array, Rollout, State


class Player:
    """Environments, where they stand, and what their open episodes have earned so far."""

    def __init__(
        self, envs: Environments, rng: np.random.Generator, *, beat: Callable[[int], None] = lambda steps: None
    ) -> None:
        self.envs = envs
        self.rng = rng
        self.beat = beat  # called with the environment steps of each call: a sign of life
        self.env_s = 0.0  # seconds inside the environments
        self._now: Array | None = None  # o[t], [B, ...]
        self._returns = np.zeros(envs.batch, np.float64)
        self._lengths = np.zeros(envs.batch, np.int64)

    def play(self, algorithm: Algorithm, steps: int) -> Rollout:
        """`steps` steps of every environment with the weights at hand."""
        if self._now is None:
            self._now = self.envs.reset()
        now, batch = self._now, self.envs.batch
        seen = np.empty((steps + 1, *now.shape), now.dtype)
        rewards, log_probs = np.empty((steps, batch), np.float32), np.empty((steps, batch), np.float32)
        terminated, truncated, valid = (np.empty((steps, batch), bool) for _ in range(3))
        actions: list[Array] = []
        finals: list[Array] = []
        final_index: list[Array] = []
        ended: list[tuple[Array, Array]] = []
        for t in range(steps):
            seen[t] = now
            decision = algorithm.act(now, self.rng)
            begin = time.perf_counter()
            step = self.envs.step(decision.actions)
            self.env_s += time.perf_counter() - begin
            actions.append(decision.actions)
            log_probs[t] = decision.log_probs
            rewards[t], terminated[t], truncated[t], valid[t] = (
                step.rewards,
                step.terminated,
                step.truncated,
                step.valid,
            )
            if len(step.final_index):
                finals.append(step.final_observations)
                final_index.append(np.stack([np.full_like(step.final_index, t), step.final_index], 1))
            ended.append(self._count(step.rewards, step.terminated | step.truncated, step.valid))
            now = step.observations
            self.beat(batch)
        seen[steps] = self._now = now
        return Rollout(
            observations=seen, actions=np.stack(actions), log_probs=log_probs, rewards=rewards,
            terminated=terminated, truncated=truncated, valid=valid,
            final_index=np.concatenate(final_index) if finals else np.zeros((0, 2), np.int64),
            final_observations=np.concatenate(finals) if finals else np.zeros((0, *now.shape[1:]), now.dtype),
            version=algorithm.parameters.version,
            episode_returns=np.concatenate([r for r, _ in ended]),
            episode_lengths=np.concatenate([n for _, n in ended]),
        )  # fmt: skip

    def _count(self, rewards: Array, ended: Array, valid: Array) -> tuple[Array, Array]:
        """Add a step to the open episodes; returns and lengths of those that ended."""
        self._returns += rewards * valid
        self._lengths += valid
        if not ended.any():
            return _NONE_ENDED
        returns, lengths = self._returns[ended].astype(np.float32), self._lengths[ended]
        self._returns[ended], self._lengths[ended] = 0.0, 0
        return returns, lengths

    def state(self) -> State:
        """The random stream, and where every episode stands if the environments can be rebuilt."""
        state = State({"returns": self._returns.copy(), "lengths": self._lengths.copy()}, {"rng": rng_state(self.rng)})
        open_episodes = self.envs.state() if self._now is not None else None
        if open_episodes is not None:
            state.put("open", open_episodes)
        return state

    def restore(self, state: State) -> bool:
        """Stand again where `state` was taken; False where all episodes begin anew instead."""
        set_rng_state(self.rng, state.values["rng"])
        if "open" not in state.values:
            return False
        self._now = self.envs.restore(state.get("open"))
        self._returns, self._lengths = state.arrays["returns"].copy(), state.arrays["lengths"].copy()
        return True


_NONE_ENDED = (np.zeros(0, np.float32), np.zeros(0, np.int64))
