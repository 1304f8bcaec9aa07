"""A rollout is what happened, step by step, and episodes are counted exactly wherever a rollout's border falls."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from troupe.envs import Environments, EnvSpec, make
from troupe.roles.play import Player
from troupe.types import Array, Decision, Rollout, Step

ENDS = (1, 4, 7, 23)


class Walk(gymnasium.Env[Array, np.int64]):
    """Its observation is the sum of what was done so far, its reward depends on both; ends at step `end`."""

    def __init__(self, end: int) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.end, self.t, self.total, self.episode = end, 0, 0, 0

    def see(self) -> Array:
        return np.array([self.total + 1000 * self.episode], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.t, self.total, self.episode = 0, 0, self.episode + 1
        return self.see(), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.total += int(action)
        ended, even = self.t == self.end, self.episode % 2 == 0
        return self.see(), float(action) + 0.1 * self.t, ended and even, ended and not even, {}


class Chooser:
    """Its actions depend on what it sees and on the random stream."""

    def __init__(self) -> None:
        self.parameters = SimpleNamespace(version=7)

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        actions = (observations[:, 0].astype(np.int64) + rng.integers(3, size=len(observations))) % 3
        return Decision(actions, -actions.astype(np.float32))


ALGORITHM: Any = Chooser()


def player(mode: AutoresetMode, seed: int = 0) -> Player:
    vector = SyncVectorEnv([lambda end=end: Walk(end) for end in ENDS], autoreset_mode=mode)  # type: ignore[misc]
    rng = np.random.default_rng(0) if mode is AutoresetMode.DISABLED else None
    return Player(Environments(vector, "walk", len(ENDS), mode, rng=rng), np.random.default_rng(seed))


class Literal:
    """The same, one environment and one step at a time."""

    def __init__(self, mode: AutoresetMode) -> None:
        self.next_step = mode is AutoresetMode.NEXT_STEP
        self.envs = [Walk(end) for end in ENDS]
        self.now = [env.reset()[0] for env in self.envs]
        self.over = [False] * len(ENDS)
        self.rng = np.random.default_rng(0)
        self.open: list[list[float]] = [[] for _ in ENDS]

    def play(self, steps: int) -> dict[str, list[Any]]:
        names = ("observations", "actions", "rewards", "terminated", "truncated", "valid", "final_index")
        out: dict[str, list[Any]] = {name: [] for name in (*names, "final_observations", "returns", "lengths")}
        for t in range(steps):
            out["observations"].append(np.stack(self.now))
            actions = ALGORITHM.act(np.stack(self.now), self.rng).actions
            rows: list[tuple[float, bool, bool, bool]] = []
            for i, env in enumerate(self.envs):
                if self.next_step and self.over[i]:
                    self.now[i], self.over[i] = env.reset()[0], False
                    rows.append((0.0, False, False, False))
                    continue
                self.now[i], reward, terminated, truncated, _ = env.step(actions[i])
                rows.append((reward, terminated, truncated, True))
                self.open[i].append(float(np.float32(reward)))
                if not (terminated or truncated):
                    continue
                out["returns"].append(sum(self.open[i]))
                out["lengths"].append(len(self.open[i]))
                self.open[i] = []
                self.over[i] = True
                if not self.next_step:
                    out["final_index"].append((t, i))
                    out["final_observations"].append(self.now[i])
                    self.now[i] = env.reset()[0]
            out["actions"].append(actions)
            for i, name in enumerate(("rewards", "terminated", "truncated", "valid")):
                out[name].append([row[i] for row in rows])
        out["observations"].append(np.stack(self.now))
        return out


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_rollout_is_what_a_literal_loop_finds(mode: AutoresetMode) -> None:
    one, literal = player(mode), Literal(mode)
    for steps in (1, 5, 3, 30):
        rollout, expected = one.play(ALGORITHM, steps), literal.play(steps)
        for name in ("observations", "actions", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(rollout, name), np.array(expected[name]), err_msg=name)
        np.testing.assert_array_equal(rollout.rewards, np.array(expected["rewards"], np.float32))
        np.testing.assert_array_equal(rollout.log_probs, -rollout.actions.astype(np.float32))
        np.testing.assert_array_equal(rollout.final_index, np.array(expected["final_index"]).reshape(-1, 2))
        np.testing.assert_array_equal(
            rollout.final_observations, np.array(expected["final_observations"], np.float32).reshape(-1, 1)
        )
        np.testing.assert_allclose(rollout.episode_returns, expected["returns"], rtol=1e-6)
        assert rollout.episode_lengths.tolist() == expected["lengths"]
        assert rollout.version == 7
        assert rollout.steps == int(np.sum(expected["valid"]))
        kinds = {name: getattr(rollout, name).dtype.name for name in ("rewards", "log_probs", "actions", "final_index")}
        assert kinds == {"rewards": "float32", "log_probs": "float32", "actions": "int64", "final_index": "int64"}


def episodes(*rollouts: Rollout) -> list[tuple[float, int]]:
    return [(float(r), int(n)) for p in rollouts for r, n in zip(p.episode_returns, p.episode_lengths, strict=True)]


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("border", [1, 2, 5, 9])
def test_episodes_are_counted_across_the_borders_of_rollouts(mode: AutoresetMode, border: int) -> None:
    whole = player(mode).play(ALGORITHM, 90)
    one = player(mode)
    parts = [one.play(ALGORITHM, border) for _ in range(90 // border)]
    found, expected = episodes(*parts), episodes(whole)
    assert found == expected[: len(found)]
    assert {n for _, n in found} == set(ENDS)
    np.testing.assert_array_equal(np.concatenate([p.rewards for p in parts]), whole.rewards[: len(parts) * border])


def test_what_a_reset_step_is_paid_belongs_to_no_episode() -> None:
    one = player(AutoresetMode.NEXT_STEP)
    plain = one.envs.step

    def paid(actions: Array) -> Step:
        step = plain(actions)
        return replace(step, rewards=np.where(step.valid, step.rewards, 1000.0).astype(np.float32))

    one.envs.step = paid  # type: ignore[method-assign]
    expected = player(AutoresetMode.NEXT_STEP).play(ALGORITHM, 30)
    np.testing.assert_array_equal(one.play(ALGORITHM, 30).episode_returns, expected.episode_returns)


def test_a_rollout_stays_as_it_was_when_the_next_is_played() -> None:
    one = player(AutoresetMode.NEXT_STEP)
    first = one.play(ALGORITHM, 6)
    copies = {name: getattr(first, name).copy() for name in Rollout.__slots__ if name != "version"}
    second = one.play(ALGORITHM, 6)
    for name, array in copies.items():
        np.testing.assert_array_equal(getattr(first, name), array)
    np.testing.assert_array_equal(second.observations[0], first.observations[-1])


def test_every_step_is_a_sign_of_life() -> None:
    beats: list[int] = []
    vector = SyncVectorEnv([lambda: Walk(5)] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    environments = Environments(vector, "walk", 3, AutoresetMode.NEXT_STEP)
    Player(environments, np.random.default_rng(0), beat=beats.append).play(ALGORITHM, 4)
    assert beats == [3] * 4


def test_play_goes_on_bit_for_bit_from_its_state() -> None:
    def fresh(seed: int) -> Player:
        spec = EnvSpec("CartPole-v1", backend="gymnasium")
        return Player(make(spec, 3, rng=np.random.default_rng(seed)), np.random.default_rng(seed + 1))

    class Random(Chooser):
        def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
            return Decision(rng.integers(2, size=len(observations)), np.zeros(len(observations), np.float32))

    algorithm: Any = Random()
    one = fresh(1)
    one.play(algorithm, 33)
    state = one.state()
    expected = one.play(algorithm, 150)
    other = fresh(50)
    assert other.restore(state)
    found = other.play(algorithm, 150)
    for name in Rollout.__slots__:
        if name != "version":
            assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name
    assert len(found.episode_returns) > 3


def test_where_episodes_cannot_be_rebuilt_they_begin_anew_with_nothing_earned() -> None:
    one = player(AutoresetMode.NEXT_STEP)
    one.play(ALGORITHM, 3)
    state = one.state()
    other = player(AutoresetMode.NEXT_STEP, seed=9)
    assert not other.restore(state)
    rollout = other.play(ALGORITHM, 30)
    assert set(rollout.episode_lengths.tolist()) == set(ENDS)
    assert other.rng.bit_generator.state != one.rng.bit_generator.state
    again = player(AutoresetMode.NEXT_STEP)
    again.restore(state)
    assert again.rng.bit_generator.state == one.rng.bit_generator.state
