"""Deep Q-learning's own parts: the loss by hand, the target network's age, who explores how much, what is owed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces

from troupe.algos.dqn import DQN, Batch, DQNConfig, lane_epsilons
from troupe.build import build_algorithm, replay_bytes
from troupe.errors import ConfigError, TroupeError
from troupe.nets import NetSpec, QNetwork
from troupe.parameters import Parameters
from troupe.resolve import check_pairs, resolve
from troupe.roles.learn import learn
from troupe.schemes.exchange import apply_here
from troupe.types import Place, Rollout

OBSERVATION = spaces.Box(-1.0, 1.0, (3,), np.float32)
PLACE = Place(rank=0, workers=1, envs=4, turn_steps=32)
STEPS = 8


def make(
    place: Place = PLACE, *, action: spaces.Discrete | None = None, observation: Any = OBSERVATION, **options: Any
) -> DQN:
    torch.manual_seed(0)
    config = msgspec.convert(
        {"rollout_steps": STEPS, "batch": 16, "learning_starts": 32, "replay_size": 200, **options}, DQNConfig
    )
    network = DQN.make_network(config, observation, action or spaces.Discrete(3), NetSpec("16x16"))
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape) * 0.5)  # a head that tells the actions apart
    parameters = Parameters(network)
    return DQN(config, network, parameters, np.random.default_rng(5), place)


def rollout(seed: int, lanes: int = 4) -> Rollout:
    rng = np.random.default_rng(seed)
    grid = (STEPS, lanes)
    return Rollout(
        observations=rng.normal(size=(STEPS + 1, lanes, 3)).astype(np.float32), actions=rng.integers(3, size=grid),
        log_probs=np.zeros(grid, np.float32), rewards=rng.normal(size=grid).astype(np.float32),
        terminated=rng.random(grid) < 0.1, truncated=np.zeros(grid, bool), valid=np.ones(grid, bool),
        final_index=np.zeros((0, 2), np.int64), final_observations=np.zeros((0, 3), np.float32), version=0,
    )  # fmt: skip


def gradients(algorithm: Any) -> float:
    """Learn from what is owed; how many gradients that was."""
    return learn(algorithm, apply_here).get("gradients", 0.0)


def one_batch(algorithm: DQN) -> Batch:
    algorithm.remember(rollout(1))
    return next(iter(algorithm.batches()))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_the_gradient_is_that_of_the_loss_written_out(double: bool, dueling: bool) -> None:
    algorithm = make(double=double, dueling=dueling, huber=0.7, max_gradient_norm=1e9)
    algorithm.target_vector.mul_(0.5)  # so that the two networks disagree
    batch = one_batch(algorithm)
    metrics = algorithm.gradient(batch)
    found = algorithm.parameters.gradient[: algorithm.parameters.count].clone()
    online, loss, chose_otherwise = algorithm.network, torch.zeros(()), 0
    for i in range(16):
        with torch.no_grad():
            q_next, q_target = (net(batch.next_observations[i : i + 1])[0] for net in (online, algorithm.target))
            best = int((q_next if double else q_target).argmax())
            chose_otherwise += int(q_next.argmax()) != int(q_target.argmax())
            goal = batch.returns[i, 0] + batch.discounts[i, 0] * q_target[best]
        error = (online(batch.observations[i : i + 1])[0, int(batch.actions[i])] - goal).abs()
        loss = loss + (0.5 * error**2 if error <= 0.7 else 0.7 * (error - 0.35)) / 16
    online.zero_grad(set_to_none=True)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(online.parameters()))])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert chose_otherwise > 0, "else double would not be told from single"


def test_the_dueling_head_adds_advantages_of_mean_zero_to_the_value() -> None:
    network = QNetwork(OBSERVATION, spaces.Discrete(3), NetSpec("16"), dueling=True)
    seen = torch.randn(20, 3)
    out = network.q(seen)
    torch.testing.assert_close(network(seen).mean(1), out[:, 0])
    torch.testing.assert_close(network(seen) - out[:, :1], out[:, 1:] - out[:, 1:].mean(1, keepdim=True))


def test_the_target_network_is_renewed_at_each_multiple_of_the_version_and_never_else() -> None:
    algorithm = make(target_every=5, train_every=2.5)
    parameters, renewed, before = algorithm.parameters, [], algorithm.target_vector.clone()
    for seed in range(6):
        algorithm.remember(rollout(seed))
        for batch in algorithm.batches():
            assert torch.equal(batch.next_values, algorithm.target(batch.next_observations))
            if not torch.equal(algorithm.target_vector, before):
                renewed.append(parameters.version)
                assert torch.equal(algorithm.target_vector, parameters.vector), "with the weights of that moment"
                before = algorithm.target_vector.clone()
            algorithm.gradient(batch)
            parameters.apply()
    assert renewed == list(range(5, parameters.version, 5))


def test_the_version_that_others_made_counts_as_well() -> None:
    algorithm = make(target_every=100)
    batch = one_batch(algorithm)
    algorithm.gradient(batch)
    algorithm.parameters.load_weights(algorithm.parameters.weights() * 0.9, 203)
    list(algorithm.batches())
    algorithm.remember(rollout(2))
    next(iter(algorithm.batches()))
    assert torch.equal(algorithm.target_vector, algorithm.parameters.vector)
    assert algorithm.target_age == 2


@pytest.mark.parametrize(("train_every", "expected"), [(32.0, 1), (8.0, 4), (1.0, 32), (0.5, 64), (48.0, 2 / 3)])
def test_as_many_gradients_are_owed_as_was_asked_for(train_every: float, expected: float) -> None:
    algorithm = make(train_every=train_every, target_every=7)
    made = []
    for seed in range(9):
        algorithm.remember(rollout(seed))
        made.append(gradients(algorithm))
    assert sum(made) == int(9 * expected) == algorithm.parameters.version
    assert max(made) - min(made) <= 1, "evenly"


def test_learning_starts_with_as_many_transitions_as_were_asked_for() -> None:
    algorithm = make(learning_starts=70, train_every=4.0)
    made = []
    for seed in range(5):
        algorithm.remember(rollout(seed))
        made.append(len(list(algorithm.batches())))
    assert made == [0, 0, 8, 8, 8], "96 is the first at or above 70, and what came before calls for nothing"


def test_each_environment_of_all_workers_has_an_epsilon_of_its_own() -> None:
    whole = lane_epsilons(0.4, 7.0, 8)
    np.testing.assert_allclose(whole, [0.4 ** (1 + i / 7 * 7) for i in range(8)])
    parts = [make(Place(r, 2, 8, 64), epsilon_end=0.4, epsilon_spread=7.0, exploration=0.25) for r in range(2)]
    for progress, share in ((0.0, 0.0), (0.125, 0.5), (0.25, 1.0), (1.0, 1.0)):
        for part in parts:
            part.anneal(progress)
        np.testing.assert_allclose(np.concatenate([p.epsilons for p in parts]), 1 + share * (whole - 1))
    assert set(lane_epsilons(0.05, 0.0, 16).tolist()) == {0.05}, "no spread is one for all"
    assert lane_epsilons(0.05, 7.0, 1).tolist() == [0.05]


def test_actions_stray_as_often_as_epsilon_says_and_the_log_probabilities_say_so_too() -> None:
    algorithm = make(action=spaces.Discrete(3, start=5), epsilon_end=0.6, epsilon_spread=1.0, exploration=0.0)
    seen, rng, draws = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), np.random.default_rng(1), 20_000
    best = algorithm.act(seen, rng, greedy=True)
    assert (best.log_probs == 0).all()
    assert set(best.actions.tolist()) <= {5, 6, 7}
    counts, told = np.zeros((4, 3)), np.zeros((4, 3))
    for _ in range(draws):
        decision = algorithm.act(seen, rng)
        counts[np.arange(4), decision.actions - 5] += 1
        told[np.arange(4), decision.actions - 5] = np.exp(decision.log_probs)
    epsilons = lane_epsilons(0.6, 1.0, 4)
    greedy = np.eye(3)[best.actions - 5]
    expected = epsilons[:, None] / 3 + greedy * (1 - epsilons)[:, None]
    np.testing.assert_allclose(told, expected, rtol=1e-5)
    np.testing.assert_allclose(counts / draws, expected, atol=0.015)


def test_pixels_in_bytes_and_discrete_observations_are_kept_as_they_are() -> None:
    for space, cell in ((spaces.Box(0, 255, (4, 5), np.uint8), (4, 5)), (spaces.Discrete(6), ())):
        algorithm = make(observation=space)
        seen = np.stack([[space.sample() for _ in range(4)] for _ in range(STEPS + 1)])
        algorithm.remember(replace(rollout(0), observations=seen, final_observations=seen[0][:0]))
        batch = next(iter(algorithm.batches()))
        assert tuple(batch.observations.shape[1:]) == cell
        assert np.dtype(algorithm.network.observation_dtype) == seen.dtype
        algorithm.gradient(batch)


def test_workers_sample_what_the_others_played_from_one_memory() -> None:
    options = {"env": "none", "algo": "dqn", "envs": 8, "workers": 2, "replay": "global", "rollout_steps": STEPS,
               "batch": 16, "learning_starts": 40, "replay_size": 100, "net": "8"}  # fmt: skip
    config = resolve(options)
    memory = bytearray(replay_bytes(config, OBSERVATION))
    action = spaces.Discrete(3)
    first, second = (
        build_algorithm(config, OBSERVATION, action, rank=r, replay_memory=memoryview(memory)) for r in range(2)
    )
    first.remember(rollout(0))
    assert not list(first.batches()), "32 of 40"
    second.remember(rollout(1))
    seen: list[Any] = list(second.batches())
    theirs = {tuple(o) for o in rollout(0).observations.reshape(-1, 3).tolist()}
    sampled = {tuple(o) for batch in seen for o in batch.observations.tolist()}
    assert sampled & theirs and sampled - theirs
    alone = build_algorithm(config, OBSERVATION, action)  # as an evaluator builds it: it acts, and remembers nothing
    assert len(alone.act(rollout(0).observations[0], np.random.default_rng(0)).actions) == 4
    with pytest.raises(TroupeError, match="--replay global, but this worker was handed no memory"):
        alone.remember(rollout(0))
    assert replay_bytes(resolve({**options, "replay": "local"}), OBSERVATION) == 0


def test_workers_draw_apart_from_one_another() -> None:
    config = resolve({"env": "none", "algo": "dqn", "envs": 8, "workers": 2, "rollout_steps": STEPS, "net": "8",
                      "learning_starts": 16, "batch": 16})  # fmt: skip
    drawn: list[Any] = []
    for rank in range(2):
        algorithm = build_algorithm(config, OBSERVATION, spaces.Discrete(3), rank=rank)
        algorithm.remember(rollout(0))
        drawn.append(next(iter(algorithm.batches())))
    assert not torch.equal(drawn[0].observations, drawn[1].observations)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_step": 9}, "--n-step 9 looks further than a rollout is long: take --rollout-steps 9 or more"),
        ({"learning_starts": 201}, r"wait for 201 transitions .* only 200 are kept: take --replay-size 201 or more"),
        ({"batch": 300}, "wait for 300 transitions"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(**options)


@pytest.mark.parametrize("scheme", ["local", "actor-learner"])
def test_one_learner_has_no_use_for_a_memory_of_many(scheme: str) -> None:
    config = resolve({"env": "CartPole-v1", "algo": "dqn", "scheme": scheme, "replay": "global"})
    with pytest.raises(ConfigError, match=f"scheme {scheme} .*--replay local"):
        check_pairs(config)
