"""--env-delay-ms: every step of the vector waits once, and nothing but the time is different."""

from __future__ import annotations

import time

import numpy as np
import pytest

from troupe.build import build_algorithm, build_player, env_spec
from troupe.config import Config
from troupe.envs import DelayedEnvironments, make_reference
from troupe.errors import ConfigError
from troupe.resolve import check_pairs, resolve
from troupe.roles.learn import learn
from troupe.schemes.exchange import apply_here
from troupe.types import Array, Rollout

STEPS = 16


def config(delay_ms: float, backend: str = "gymnasium", **more: object) -> Config:
    small = {"algo": "a3c", "scheme": "local", "envs": 8, "rollout_steps": STEPS, "net": "8"}
    return resolve({"env": "CartPole-v1", "backend": backend, "env_delay_ms": delay_ms, **small, **more})


def learned(config: Config, rollouts: int) -> tuple[float, list[Rollout], Array]:
    """Seconds spent in the environments, what was played, and the weights after learning from it."""
    env = make_reference(env_spec(config))
    algorithm = build_algorithm(config, env.observation_space, env.action_space)
    player = build_player(config, 0, 0)
    played = []
    for _ in range(rollouts):
        played.append(player.play(algorithm, STEPS))
        algorithm.remember(played[-1])
        learn(algorithm, apply_here)
    player.envs.close()
    return player.env_s, played, algorithm.parameters.weights()


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_each_step_of_the_vector_waits_once(backend: str) -> None:
    delay_ms, rollouts = 5.0, 2
    seconds, _, _ = learned(config(delay_ms, backend), rollouts)
    waits_s = rollouts * STEPS * delay_ms / 1000  # one wait for all 8 environments
    assert waits_s <= seconds < 8 * waits_s


def test_what_is_played_and_learned_is_the_same() -> None:
    _, plain, weights = learned(config(0.0), 3)
    _, delayed, again = learned(config(2.0), 3)
    for one, other in zip(plain, delayed, strict=True):
        for name in ("observations", "actions", "rewards", "terminated", "truncated", "valid", "episode_returns"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_array_equal(weights, again)


def test_open_episodes_are_rebuilt_behind_a_delay() -> None:
    first = build_player(config(1.0), 0, 0)
    algorithm = build_algorithm(config(1.0), first.envs.observation_space, first.envs.action_space)
    first.play(algorithm, 5)
    state = first.state()
    expected = first.play(algorithm, 5)
    second = build_player(config(1.0), 0, 7)
    assert second.restore(state)
    np.testing.assert_array_equal(second.play(algorithm, 5).observations, expected.observations)


def test_every_step_is_a_sign_of_life_however_long_the_wait() -> None:
    beats: list[float] = []
    player = build_player(config(20.0), 0, 0, beat=lambda steps: beats.append(time.monotonic()))
    algorithm = build_algorithm(config(20.0), player.envs.observation_space, player.envs.action_space)
    player.play(algorithm, 4)
    assert len(beats) == 4
    assert np.diff(beats).min() >= 0.02


def test_the_reference_environment_is_not_delayed() -> None:
    assert not isinstance(make_reference(env_spec(config(1000.0))), DelayedEnvironments)
    begin = time.monotonic()
    env = make_reference(env_spec(config(1000.0)))
    env.reset(seed=0)
    env.step(0)
    assert time.monotonic() - begin < 1.0


def test_a_delay_that_would_count_as_a_hang_is_refused() -> None:
    check_pairs(config(10_000.0))
    with pytest.raises(ConfigError, match="--env-delay-ms 60000 is not below --step-timeout-s 60, so every step would"):
        check_pairs(config(60_000.0))
    check_pairs(config(60_000.0, step_timeout_s=90.0))
    with pytest.raises(ConfigError, match=r"env_delay_ms -1\.0 is wrong"):
        config(-1.0)
