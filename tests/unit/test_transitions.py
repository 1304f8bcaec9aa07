"""n-step transitions against a slow, literal version, whatever way episodes end and wherever rollouts are cut."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from troupe.envs import Environments
from troupe.roles.play import Player
from troupe.transitions import Transitions, n_step_transitions
from troupe.types import Array, Decision, Rollout

BATCH, STEPS, GAMMA = 3, 7, 0.9
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class Counting(gymnasium.Env[Array, Any]):
    """An observation is (episode, step); an episode is terminated or truncated by turns, after 1 to 9 steps."""

    observation_space: spaces.Space[Any] = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(4)

    def __init__(self, number: int) -> None:
        self.episode, self.number = 100 * number, number

    def reset(self, **more: Any) -> tuple[Array, dict[str, Any]]:
        self.episode, self.now = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.now += 1
        over = self.now == 1 + (self.episode * 5 + self.number) % 9
        last = over and self.episode % 2 == 0
        return self._seen(), 10.0 * self.episode + self.now + action, last, over and not last, {}

    def _seen(self) -> Array:
        return np.array([self.episode, self.now], np.float32)


class AnyAction:
    """Chooses at random."""

    parameters = type("Version", (), {"version": 0})()

    def act(self, observations: Array, rng: np.random.Generator, **more: Any) -> Decision:
        return Decision(rng.integers(4, size=len(observations)), np.zeros(len(observations), np.float32))


def played(mode: AutoresetMode, count: int) -> list[Rollout]:
    vector = SyncVectorEnv([lambda i=i: Counting(i) for i in range(BATCH)], autoreset_mode=mode)  # type: ignore[misc]
    player = Player(Environments(vector, "counting", BATCH, mode), np.random.default_rng(1))
    algorithm: Any = AnyAction()
    return [player.play(algorithm, STEPS) for _ in range(count)]


def literally(rollout: Rollout, n: int, scale: float) -> list[tuple[Any, ...]]:
    """Step by step, as one would say it."""
    finals = {
        (int(t), int(b)): seen for (t, b), seen in zip(rollout.final_index, rollout.final_observations, strict=True)
    }
    found = []
    for t in range(STEPS):
        for b in range(BATCH):
            if not rollout.valid[t, b]:
                continue
            total, discount, at = 0.0, 1.0, t
            while True:
                total += discount * scale * float(rollout.rewards[at, b])
                discount *= GAMMA
                over = bool(rollout.terminated[at, b] or rollout.truncated[at, b])
                if over or at - t + 1 == n or at + 1 == STEPS or not rollout.valid[at + 1, b]:
                    break
                at += 1
            following = finals.get((at, b), rollout.observations[at + 1, b])
            discount = 0.0 if rollout.terminated[at, b] else discount
            found.append((rollout.observations[t, b], rollout.actions[t, b], total, following, discount))
    return found


def assert_equal(got: Transitions, expected: list[tuple[Any, ...]]) -> None:
    assert len(got) == len(expected) > 0
    observations, actions, returns, following, discounts = zip(*expected, strict=True)
    np.testing.assert_array_equal(got.observations, np.stack(observations))
    np.testing.assert_array_equal(got.actions, np.stack(actions))
    np.testing.assert_allclose(got.returns, np.array(returns), rtol=1e-5)
    np.testing.assert_array_equal(got.next_observations, np.stack(following))
    np.testing.assert_allclose(got.discounts, np.array(discounts), rtol=1e-6)
    assert got.returns.dtype == got.discounts.dtype == np.float32


@pytest.mark.parametrize("n", [1, 2, 3, STEPS, 50])
@pytest.mark.parametrize("mode", MODES)
def test_transitions_are_what_one_would_say_step_by_step(mode: AutoresetMode, n: int) -> None:
    for rollout in played(mode, 6):
        assert_equal(n_step_transitions(rollout, n=n, gamma=GAMMA, reward_scale=0.5), literally(rollout, n, scale=0.5))


@pytest.mark.parametrize("mode", MODES)
def test_no_transition_leaves_its_episode_and_each_leads_forward_in_it(mode: AutoresetMode) -> None:
    """Told from the observations alone, which say their episode and step."""
    windows, stops = set(), 0
    for rollout in played(mode, 20):
        made = n_step_transitions(rollout, n=3, gamma=GAMMA)
        ahead = made.next_observations - made.observations
        assert (ahead[:, 0] == 0).all()
        assert ((ahead[:, 1] >= 1) & (ahead[:, 1] <= 3)).all()
        going = made.discounts > 0
        np.testing.assert_allclose(made.discounts[going], GAMMA ** ahead[going, 1], rtol=1e-6)
        windows |= set(ahead[:, 1].tolist())
        stops += int((~going).sum())
        assert len(made) == rollout.steps, "a transition for each step that was one"
    assert windows == {1, 2, 3} and stops > 20


def test_a_truncated_episode_is_bootstrapped_from_its_own_last_observation() -> None:
    for mode in MODES:
        ends = []
        for rollout in played(mode, 20):
            made = n_step_transitions(rollout, n=1, gamma=GAMMA)
            last = (
                made.next_observations[:, 1] == 1 + (made.observations[:, 0] * 5 + made.observations[:, 0] // 100) % 9
            )
            truncated = last & (made.observations[:, 0] % 2 == 1)
            ends += (made.discounts[truncated] == np.float32(GAMMA)).tolist()
            assert (made.discounts[last & ~truncated] == 0).all()
        assert len(ends) > 10 and all(ends), mode


def test_steps_that_were_ignored_at_random_break_windows_as_well() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        ends, valid = rng.random((2, STEPS, BATCH)) < 0.15, rng.random((STEPS, BATCH)) < 0.7
        index = np.argwhere(ends.any(0) & valid)
        rollout = Rollout(
            observations=rng.normal(size=(STEPS + 1, BATCH, 2)).astype(np.float32),
            actions=rng.integers(4, size=(STEPS, BATCH)), log_probs=np.zeros((STEPS, BATCH), np.float32),
            rewards=rng.normal(size=(STEPS, BATCH)).astype(np.float32), terminated=ends[0], truncated=ends[1],
            valid=valid, final_index=index, final_observations=rng.normal(size=(len(index), 2)).astype(np.float32),
            version=0,
        )  # fmt: skip
        made = n_step_transitions(rollout, n=4, gamma=GAMMA)
        expected = literally(rollout, 4, 1.0)
        assert len(made) == len(expected)
        np.testing.assert_allclose(made.returns, [e[2] for e in expected], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(made.next_observations, np.stack([e[3] for e in expected]))
        np.testing.assert_allclose(made.discounts, [e[4] for e in expected], rtol=1e-5)
