"""What every algorithm promises, whatever kind of action it chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces

from troupe.algos import ALGORITHMS
from troupe.build import build_algorithm
from troupe.errors import ConfigError
from troupe.ports import Algorithm
from troupe.resolve import hyper_class, resolve
from troupe.roles.learn import learn
from troupe.roles.play import Player
from troupe.schemes.exchange import apply_here
from troupe.types import Array, Rollout, State, Step

BATCH, STEPS = 8, 16
OBSERVATION = spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "continuous": spaces.Box(-2.0, 2.0, (2,), np.float32),
}
SMALL = {  # where the algorithm has the option
    "rollout_steps": STEPS, "minibatch": 128, "epochs": 2, "passes": 2,
    "batch": 32, "learning_starts": 64, "train_every": 8.0, "target_every": 10, "replay_size": 300,
    "round_episodes": 8, "gradients": 4,
}  # fmt: skip
CLIP = {"elite": 0.02}  # a norm that gradients exceed; rewards make it no larger where they only choose whom to imitate
ACTS_BY_VALUE = {"dqn"}  # plays the action of the highest value, so it takes no continuous ones
BANDIT = {"discrete": (150, 0.02), "continuous": (400, 0.003)}  # gradients within which it must be learned, step size


def make(
    algo: str, action: spaces.Space[Any], observation: spaces.Space[Any] = OBSERVATION, **options: Any
) -> Algorithm:
    own = {field.name for field in msgspec.structs.fields(hyper_class(algo))}
    small = {key: value for key, value in SMALL.items() if key in own}
    config = resolve({"env": "none", "algo": algo, "envs": BATCH, "net": "16x16", **small, **options})
    return build_algorithm(config, observation, action)


class Noise:
    """Environments that answer at random; every way in which an episode can end occurs."""

    batch = BATCH
    observation_space: Any = None  # whoever makes the agent knows them
    action_space: Any = None

    def __init__(self, seed: int, *, scale: float = 1.0) -> None:
        self._rng, self._scale = np.random.default_rng(seed), scale

    def reset(self) -> Array:
        return self._rng.uniform(-1, 1, (BATCH, 3)).astype(np.float32)

    def step(self, actions: Array) -> Step:
        terminated, truncated = self._rng.random((2, BATCH)) < 0.1
        valid = self._rng.random(BATCH) < 0.9
        index = np.flatnonzero((terminated | truncated) & valid)
        rewards = self._rng.normal(size=BATCH).astype(np.float32) * self._scale
        return Step(self.reset(), rewards, terminated, truncated, valid, index, self.reset()[: len(index)])

    def state(self) -> None:
        return None

    def restore(self, state: State) -> Array:
        raise NotImplementedError

    def close(self) -> None: ...


def rollouts(algorithm: Algorithm, count: int, *, scale: float = 1.0) -> list[Rollout]:
    player = Player(Noise(1, scale=scale), np.random.default_rng(2))
    return [player.play(algorithm, STEPS) for _ in range(count)]


def remember(algorithm: Algorithm, rollout: Rollout) -> None:
    """What a worker does with what it played."""
    kept = algorithm.sift(rollout)
    if kept is not None:
        algorithm.remember(kept)


def study(algorithm: Algorithm, given: list[Rollout]) -> Array:
    """Learn from the rollouts, one after another; the weights after it."""
    for i, rollout in enumerate(given):
        algorithm.anneal(i / 100)
        remember(algorithm, rollout)
        learn(algorithm, apply_here)
    return algorithm.parameters.weights()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As every process of a run has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(ALGORITHMS))
def algo(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(ACTIONS))
def action(algo: str, request: pytest.FixtureRequest) -> spaces.Space[Any]:
    if request.param == "continuous":
        refuse_continuous(algo)
    return ACTIONS[request.param]


def refuse_continuous(algo: str) -> None:
    """Not a gap: what the algorithm cannot do it has to say."""
    if algo in ACTS_BY_VALUE:
        with pytest.raises(ConfigError, match=f"{algo} .* are continuous .*: use --algo"):
            make(algo, ACTIONS["continuous"])
        pytest.skip(f"{algo} refuses continuous actions")


def test_actions_are_of_the_space_and_their_log_probabilities_are_the_networks(
    algo: str, action: spaces.Space[Any]
) -> None:
    algorithm = make(algo, action)
    observations = np.random.default_rng(0).uniform(-1, 1, (32, 3)).astype(np.float32)
    decision = algorithm.act(observations, np.random.default_rng(1))
    assert decision.log_probs.shape == (32,) and decision.log_probs.dtype == np.float32
    assert np.isfinite(decision.log_probs).all()
    if isinstance(action, spaces.Discrete):
        assert decision.actions.shape == (32,) and decision.actions.dtype == np.int64
        assert all(action.contains(a) for a in decision.actions)
        assert len(set(decision.actions.tolist())) == 3, "32 draws from a near-uniform policy show all three"
    else:
        assert decision.actions.shape == (32, *(action.shape or ())) and decision.actions.dtype == np.float32
        assert np.isfinite(decision.actions).all()
    if algo in ACTS_BY_VALUE:  # the chance is epsilon's, which is 1 at the start
        np.testing.assert_allclose(decision.log_probs, -math.log(3), rtol=1e-6)
        return
    with torch.no_grad():
        network: Any = algorithm.network
        again, _ = network.log_prob_entropy(torch.from_numpy(observations), torch.from_numpy(decision.actions))
    np.testing.assert_allclose(decision.log_probs, again.numpy(), rtol=1e-5, atol=1e-5)


def test_all_randomness_of_acting_comes_from_the_stream_it_is_given(algo: str, action: spaces.Space[Any]) -> None:
    algorithm = make(algo, action)
    observations = np.random.default_rng(0).uniform(-1, 1, (64, 3)).astype(np.float32)
    first, again, other = (algorithm.act(observations, np.random.default_rng(seed)).actions for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_greedy_acting_draws_nothing_and_takes_the_most_likely(algo: str, action: spaces.Space[Any]) -> None:
    algorithm = make(algo, action)
    observations = np.random.default_rng(0).uniform(-1, 1, (64, 3)).astype(np.float32)
    rng = np.random.default_rng(1)
    before = rng.bit_generator.state
    greedy = algorithm.act(observations, rng, greedy=True)
    assert rng.bit_generator.state == before
    assert np.array_equal(greedy.actions, algorithm.act(observations, np.random.default_rng(7), greedy=True).actions)
    for seed in range(5):
        sampled = algorithm.act(observations, np.random.default_rng(seed))
        assert (greedy.log_probs >= sampled.log_probs - 1e-6).all()


def test_there_is_nothing_to_learn_from_until_there_is_enough(algo: str) -> None:
    algorithm = make(algo, ACTIONS["discrete"])
    assert list(algorithm.batches()) == []
    played = rollouts(algorithm, 2)
    remember(algorithm, played[0])
    assert list(algorithm.batches()), "one rollout of every environment is enough"
    assert list(algorithm.batches()) == [], "and is learned from once"
    remember(algorithm, played[1])
    assert list(algorithm.batches())


def test_a_batch_that_several_rollouts_make_waits_for_the_last(algo: str) -> None:
    if "batch_steps" not in {field.name for field in msgspec.structs.fields(hyper_class(algo))}:
        pytest.skip(f"{algo} learns from each rollout as it comes")  # not a gap: there is no option to test
    algorithm = make(algo, ACTIONS["discrete"], batch_steps=3 * BATCH * STEPS)
    learned = []
    for rollout in rollouts(algorithm, 6):
        remember(algorithm, rollout)
        learned.append(bool(list(algorithm.batches())))
    assert learned == [False, False, True] * 2


def test_a_gradient_is_finite_clipped_and_zero_in_the_padding(algo: str, action: spaces.Space[Any]) -> None:
    clip = CLIP.get(algo, 0.25)
    algorithm = make(algo, action, max_gradient_norm=clip)
    parameters, norms = algorithm.parameters, []
    remember(algorithm, rollouts(algorithm, 1, scale=1000.0)[0])
    before = parameters.weights()
    for batch in algorithm.batches():
        metrics = algorithm.gradient(batch)
        norms.append(metrics["gradient_norm"])
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert torch.isfinite(parameters.gradient).all()
        assert float(parameters.gradient.norm()) <= clip * 1.0001
        assert float(parameters.gradient.norm()) > 0.0
        assert not parameters.gradient[parameters.count :].any()
    assert norms and max(norms) > clip, "rewards of a thousand give a gradient that has to be clipped"
    assert np.array_equal(parameters.weights(), before), "a gradient changes no weight: applying it does"
    assert parameters.version == 0


def test_the_same_rollouts_and_seeds_give_the_same_weights_bit_for_bit(algo: str, action: spaces.Space[Any]) -> None:
    played = rollouts(make(algo, action), 4)
    first, again = (study(make(algo, action), played) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, make(algo, action).parameters.weights()), "and it did learn"
    assert not np.array_equal(first, study(make(algo, action, seed=2), played)), "another seed is another run"


def test_a_state_taken_in_the_middle_goes_on_bit_for_bit(algo: str, action: spaces.Space[Any]) -> None:
    played = rollouts(make(algo, action), 6)
    whole = make(algo, action)
    study(whole, played[:3])
    remember(whole, played[3])  # held, not yet learned from: what waits is part of the state
    state, moments, weights = whole.state(), whole.parameters.state(), whole.parameters.weights()
    values = msgspec.json.decode(msgspec.json.encode(state.values))  # as a checkpoint keeps them
    copied = State({name: array.copy() for name, array in state.arrays.items()}, values)
    learn(whole, apply_here)
    expected = study(whole, played[4:])
    other = make(algo, action, seed=9)
    torch.rand(7)  # whatever else drew from torch's stream
    other.parameters.restore(weights, moments)
    other.restore(copied)
    other.anneal(0.02)
    learn(other, apply_here)
    assert np.array_equal(study(other, played[4:]), expected)
    assert other.parameters.version == whole.parameters.version
    for name, moment in whole.parameters.state().arrays.items():
        assert np.array_equal(other.parameters.state().arrays[name], moment), name


def test_the_step_size_falls_to_its_end_and_never_rises(algo: str) -> None:
    algorithm = make(algo, ACTIONS["discrete"], learning_rate=0.5, learning_rate_end=0.1)
    rates = []
    for progress in np.linspace(0, 1, 11):
        algorithm.anneal(float(progress))
        rates.append(algorithm.parameters.learning_rate)
    assert rates[0] == pytest.approx(0.5) and rates[-1] == pytest.approx(0.05)
    assert all(later < sooner for sooner, later in pairwise(rates))


@dataclass
class Bandit:
    """One state; a step is an episode. Discrete: only the last action pays 1. Continuous: 1 at +1.5, less elsewhere."""

    continuous: bool
    batch: int = 32
    observation_space: Any = None
    action_space: Any = None

    def reset(self) -> Array:
        return np.ones((self.batch, 1), np.float32)

    def pay(self, actions: Array) -> Array:
        if self.continuous:
            paid: Array = np.exp(-((actions[:, 0] - 1.5) ** 2) / 2)
        else:
            paid = actions == 1
        return paid.astype(np.float32)

    def step(self, actions: Array) -> Step:
        yes, no = np.ones(self.batch, bool), np.zeros(self.batch, bool)
        return Step(self.reset(), self.pay(actions), yes, no, yes, np.arange(self.batch), self.reset())

    def state(self) -> None:
        return None

    def restore(self, state: State) -> Array:
        raise NotImplementedError

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", sorted(BANDIT))
def test_the_better_action_of_a_bandit_is_learned(algo: str, kind: str) -> None:
    (gradients, rate), continuous = BANDIT[kind], kind == "continuous"
    if continuous:
        refuse_continuous(algo)
    space: spaces.Space[Any] = spaces.Box(-3.0, 3.0, (1,), np.float32) if continuous else spaces.Discrete(2)
    options = {"learning_rate": rate, "learning_rate_end": 1.0, "envs": 32, "optimiser": "adam"}
    options |= {"exploration": 0.0, "epsilon_end": 0.05} if algo in ACTS_BY_VALUE else {"entropy": 0.0}
    algorithm = make(algo, space, spaces.Box(0.0, 1.0, (1,), np.float32), **options)
    bandit = Bandit(continuous)
    player = Player(bandit, np.random.default_rng(0))
    while algorithm.parameters.version < gradients:
        remember(algorithm, player.play(algorithm, STEPS))
        assert learn(algorithm, apply_here)
    many = np.ones((2000, 1), np.float32)
    paid = bandit.pay(algorithm.act(many, np.random.default_rng(1), greedy=continuous).actions).mean()
    assert paid >= 0.95, f"{algo} earns {paid:.3f} of 1 after {gradients} gradients"
