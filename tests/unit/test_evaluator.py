"""Evaluation: whole episodes on the reference environment, one per seed, judged fairly."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from troupe.errors import EnvironmentFault
from troupe.roles.evaluator import ENOUGH_TO_JUDGE, Evaluation, evaluate, evaluation_seeds, evaluator
from troupe.transports.memory import MemoryHub
from troupe.types import Array, Decision, Message


class Seeded(gymnasium.Env[Array, np.int64]):
    """An episode's length and score are functions of its seed: length 1 + seed % 7, every reward seed / length."""

    made: ClassVar[list[Seeded]] = []

    def __init__(self, fault: str = "") -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Discrete(4, start=1)
        self.seeds: list[int | None] = []
        self.acted: list[int] = []
        self.closed = False
        self.fault = fault
        self.score: Callable[[int], float] = float
        Seeded.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        assert seed is not None
        self.seeds.append(seed)
        self.seed, self.t, self.length = seed, 0, 1 + seed % 7
        if self.fault == "raise in reset":
            raise ValueError("no level")
        return np.array([seed, math.nan if self.fault == "nan in reset" else 0.0]), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.acted.append(int(action))
        self.t += 1
        if self.fault == "raise in step":
            raise ValueError("no floor")
        reward = math.nan if self.fault == "nan reward" else self.score(self.seed) / self.length
        seen = math.inf if self.fault == "inf in step" else float(self.t)
        return np.array([self.seed, seen]), reward, self.t == self.length, False, {}

    def close(self) -> None:
        self.closed = True


class Player:
    """Greedy takes 1; otherwise it draws."""

    def __init__(self) -> None:
        self.greedy: list[bool] = []
        self.batches: list[int] = []
        self.weights: Any = None
        self.parameters = SimpleNamespace(load_weights=self._load)

    def _load(self, weights: Array, version: int) -> None:
        self.weights = (weights.copy(), version)

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        assert observations.dtype == np.float32  # as in training
        self.greedy.append(greedy)
        self.batches.append(len(observations))
        actions = np.ones(len(observations), np.int64) if greedy else rng.integers(1, 5, size=len(observations))
        return Decision(actions, np.zeros(len(actions), np.float32))


@pytest.fixture(autouse=True)
def forget() -> None:
    Seeded.made.clear()


def run(seeds: list[int], **options: Any) -> tuple[Evaluation, Player]:
    algorithm: Any = Player()
    make_env = options.pop("make_env", Seeded)
    return evaluate(algorithm, make_env, seeds, np.random.default_rng(0), **options), algorithm


@pytest.mark.parametrize("lanes", [1, 3, 32, 100])
@pytest.mark.parametrize("episodes", [1, 2, 33, 50])
def test_one_episode_per_seed_in_the_order_of_the_seeds(lanes: int, episodes: int) -> None:
    seeds = [int(s) for s in np.random.default_rng(1).permutation(1000)[:episodes]]
    result, algorithm = run(seeds, lanes=lanes)
    np.testing.assert_allclose(result.returns, seeds)
    assert result.lengths.tolist() == [1 + seed % 7 for seed in seeds]
    assert result.complete
    assert sorted(s for env in Seeded.made for s in env.seeds if s is not None) == sorted(seeds)
    assert len(Seeded.made) == max(algorithm.batches) == min(lanes, episodes)
    assert all(env.closed for env in Seeded.made)


def test_greedy_takes_the_most_likely_and_sampled_draws() -> None:
    _, algorithm = run(list(range(20)), greedy=True)
    assert set(algorithm.greedy) == {True}
    assert {a for env in Seeded.made for a in env.acted} == {1}
    Seeded.made.clear()
    _, algorithm = run(list(range(20)), greedy=False)
    assert set(algorithm.greedy) == {False}
    assert {a for env in Seeded.made for a in env.acted} == {1, 2, 3, 4}


def test_the_figures_are_the_usual_ones() -> None:
    result = Evaluation(np.array([1.0, 2.0, 3.0, 6.0]), np.ones(4, np.int64), True, 0.0)
    assert result.mean == 3.0
    assert result.sd == pytest.approx(np.sqrt(14 / 3))
    assert result.half_interval == pytest.approx(1.96 * np.sqrt(14 / 3) / 2)
    assert Evaluation(np.array([5.0]), np.ones(1, np.int64), True, 0.0).sd == 0.0


def scored(score: Any) -> Any:
    def make() -> Seeded:
        env = Seeded()
        env.score = score
        return env

    return make


def test_what_is_out_of_reach_is_given_up_after_enough_episodes() -> None:
    result, _ = run(list(range(200)), lanes=8, give_up_below=100.0, make_env=scored(lambda seed: 10.0 + seed % 3))
    assert not result.complete
    assert ENOUGH_TO_JUDGE <= len(result.returns) < 60
    assert len(result.lengths) == len(result.returns)
    np.testing.assert_allclose(result.returns, [10.0 + seed % 3 for seed in range(len(result.returns))])
    assert all(env.closed for env in Seeded.made)


def test_what_is_within_reach_is_played_to_the_end() -> None:
    for goal in (None, -math.inf, 11.0):
        result, _ = run(list(range(60)), lanes=8, give_up_below=goal, make_env=scored(lambda seed: 10.0 + seed % 3))
        assert result.complete
        assert len(result.returns) == 60


def test_giving_up_is_judged_on_the_episodes_begun_first() -> None:
    # 24 fair and short ones; then by turns a long and good one, and a short and bad one, which ends long before it.
    fair, mixed = [7 * i for i in range(24)], [7 * i + 6 * (i % 2 == 0) for i in range(24, 64)]

    def score(seed: int) -> float:
        return 750.0 + seed % 2 if seed in fair else 3000.0 if seed % 7 else -1000.0

    result, _ = run([*fair, *mixed], lanes=64, give_up_below=600.0, make_env=scored(score))
    assert result.complete  # the mean of all is 906: only that of all that ended first, -44, looked hopeless
    assert result.mean > 600.0


@pytest.mark.parametrize("lanes", [1, 8, 100])
def test_the_first_episode_that_fails_is_the_last(lanes: int) -> None:
    def score(seed: int) -> float:
        return 9.0 if seed in (13, 17) else 10.0

    result, _ = run(list(range(60)), lanes=lanes, fail_below=10.0, make_env=scored(score))
    assert not result.complete
    np.testing.assert_allclose(result.returns, [10.0] * 13 + [9.0])
    assert len(result.lengths) == 14 and all(env.closed for env in Seeded.made)
    if lanes < 60:
        assert max(seed for env in Seeded.made for seed in env.seeds if seed is not None) < 13 + 8 * lanes
    result, _ = run(list(range(13)), lanes=lanes, fail_below=10.0, make_env=scored(score))
    assert result.complete and len(result.returns) == 13
    result, _ = run(list(range(14)), lanes=lanes, fail_below=10.0, make_env=scored(score))
    assert result.complete and result.returns[-1] < 10.0, "all were played: complete, and one failed"


def test_a_complete_evaluation_is_complete_however_bad_it_was() -> None:
    result, _ = run(list(range(20)), lanes=32, give_up_below=1e9)
    assert result.complete  # all had ended by the time it could be judged
    assert len(result.returns) == 20


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise in reset", r"Seeded raised in reset \(seed 3\): ValueError: no level"),
        ("raise in step", "Seeded raised in step: ValueError: no floor"),
        ("nan in reset", r"Seeded returned a number that is not finite in an observation of reset \(seed 3\)"),
        ("inf in step", "Seeded returned a number that is not finite in an observation of step"),
        ("nan reward", "Seeded returned nan in a reward of step"),
    ],
)
def test_a_reference_environment_that_fails_is_named(fault: str, sentence: str) -> None:
    with pytest.raises(EnvironmentFault, match=sentence):
        run([3, 4], make_env=lambda: Seeded(fault))
    assert all(env.closed for env in Seeded.made)


def test_seeds_differ_and_depend_on_the_stream_alone() -> None:
    seeds = evaluation_seeds(np.random.default_rng(3), 500)
    assert len(set(seeds)) == 500
    assert seeds == evaluation_seeds(np.random.default_rng(3), 500)
    assert seeds != evaluation_seeds(np.random.default_rng(4), 500)


def test_the_role_answers_each_candidate_once_with_its_own_weights() -> None:
    hub, algorithm = MemoryHub(), Player()
    desk, mine = hub.mailbox("desk"), hub.mailbox("evaluator")
    beats: list[int] = []
    loop = evaluator(
        algorithm, Seeded, mine, np.random.default_rng(0), run="r", incarnation=2, greedy=True,  # type: ignore[arg-type]
        beat=lambda: beats.append(1),
    )  # fmt: skip
    next(loop)
    assert desk.receive(0.0) is None
    weights = np.arange(3, dtype=np.float32)
    for version in (5, 6):
        meta = {"steps": 100 * version, "episodes": 4, "give_up_below": -math.inf}
        arrays = {"weights": weights + version}
        desk.publish("candidate", Message("candidate", "r", "desk", 0, 0, version, meta, arrays))
        next(loop)
        answer = desk.receive(0.0)
        assert answer is not None
        assert (answer.kind, answer.run, answer.incarnation, answer.version) == ("evaluation", "r", 2, version)
        assert (answer.meta["steps"], answer.meta["complete"]) == (100 * version, True)
        np.testing.assert_array_equal(answer.arrays["weights"], weights + version)
        np.testing.assert_array_equal(algorithm.weights[0], weights + version)
        assert answer.arrays["returns"].shape == answer.arrays["lengths"].shape == (4,)
        next(loop)
        assert desk.receive(0.0) is None
    assert len(beats) > 8


def test_nothing_is_left_of_the_environments_of_an_evaluation() -> None:
    hub, algorithm, made = MemoryHub(), Player(), []

    def circular() -> Seeded:
        env = Seeded()
        env.myself = env  # type: ignore[attr-defined]  # as a lander and its contact listener do
        Seeded.made.clear()
        made.append(weakref.ref(env))
        return env

    desk, mine = hub.mailbox("desk"), hub.mailbox("evaluator")
    loop = evaluator(
        algorithm, circular, mine, np.random.default_rng(0), run="r", incarnation=0, greedy=True,  # type: ignore[arg-type]
    )  # fmt: skip
    meta = {"steps": 0, "episodes": 4, "give_up_below": -math.inf}
    gc.disable()
    try:
        desk.publish(
            "candidate", Message("candidate", "r", "desk", 0, 0, 1, meta, {"weights": np.zeros(3, np.float32)})
        )
        next(loop)
    finally:
        gc.enable()
    assert len(made) == 4 and not any(env() for env in made)
