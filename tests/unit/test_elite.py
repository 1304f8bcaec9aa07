"""Elite imitation's own parts: the rules, the slopes, what is sent and what only counted, what a round learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces

from troupe.algos.elite import (
    Batch,
    Elite,
    EliteConfig,
    baseline_features,
    better,
    fixed_rule,
    imitation_slopes,
    regression,
    regression_slopes,
    rewards_to_go,
    thinned,
    threshold,
)
from troupe.episodes import Episode
from troupe.errors import ConfigError
from troupe.nets import NetSpec
from troupe.parameters import Parameters
from troupe.ports import Algorithm
from troupe.resolve import check_pairs, preset, resolve
from troupe.roles.learn import learn
from troupe.schemes import SCHEMES
from troupe.schemes.exchange import apply_here
from troupe.types import Array, Episodes, Place, Rollout, State

OBSERVATION = spaces.Box(-1.0, 1.0, (2,), np.float32)
LANES, STEPS = 3, 8
PLACE = Place(rank=0, workers=1, envs=LANES, turn_steps=LANES * STEPS)


def make(place: Place = PLACE, *, action: Any = None, **options: Any) -> Elite:
    torch.manual_seed(0)
    small = {"rollout_steps": STEPS, "round_episodes": 4, "batch": 16, "gradients": 3, "window_episodes": 20}
    config = msgspec.convert({**small, **options}, EliteConfig)
    network = Elite.make_network(config, OBSERVATION, action or spaces.Discrete(3), NetSpec("8"))
    return Elite(config, network, Parameters(network), np.random.default_rng(5), place)


def rollout(seed: int, *, end: float = 0.2, reward: float | None = None) -> Rollout:
    """As environments give it that reset one call later: the step after an end is not valid."""
    rng = np.random.default_rng(seed)
    grid = (STEPS, LANES)
    over = rng.random(grid) < end
    valid = np.ones(grid, bool)
    for t in range(1, STEPS):
        valid[t] = ~over[t - 1]
        over[t] &= valid[t]
    rewards = rng.normal(size=grid) if reward is None else np.full(grid, reward)
    truncated = over & (rng.random(grid) < 0.5)
    ended = int(over.sum())
    return Rollout(
        observations=rng.normal(size=(STEPS + 1, LANES, 2)).astype(np.float32), actions=rng.integers(3, size=grid),
        log_probs=np.zeros(grid, np.float32), rewards=rewards.astype(np.float32), terminated=over & ~truncated,
        truncated=truncated, valid=valid, final_index=np.zeros((0, 2), np.int64),
        final_observations=np.zeros((0, 2), np.float32), version=seed,
        episode_returns=np.zeros(ended, np.float32), episode_lengths=np.ones(ended, np.int64),
    )  # fmt: skip


def counted(rollouts: list[Rollout]) -> tuple[list[Rollout], list[dict[str, Any]]]:
    """The same with returns and lengths as a player counts them, and every episode, one step at a time."""
    open_: list[list[tuple[Array, int, float]]] = [[] for _ in range(LANES)]
    told, whole = [], []
    for one in rollouts:
        returns, lengths = [], []
        for t in range(STEPS):
            for lane in range(LANES):
                if one.valid[t, lane]:
                    step = (one.observations[t, lane], int(one.actions[t, lane]), float(one.rewards[t, lane]))
                    open_[lane].append(step)
                if one.terminated[t, lane] or one.truncated[t, lane]:
                    score = np.float32(sum(reward for _, _, reward in open_[lane]))
                    whole.append({"steps": open_[lane], "score": float(score)})
                    returns.append(score)
                    lengths.append(len(open_[lane]))
                    open_[lane] = []
        told.append(replace(
            one, episode_returns=np.array(returns, np.float32), episode_lengths=np.array(lengths, np.int64)
        ))  # fmt: skip
    return told, whole


def taken_apart(sent: Episodes) -> list[tuple[list[list[float]], list[int], float]]:
    """Observations, actions and return of each episode in a message."""
    parts, begin = [], 0
    for length, score in zip(sent.lengths, sent.returns, strict=True):
        rows = slice(begin, begin + length)
        parts.append((sent.observations[rows].tolist(), sent.actions[rows].tolist(), float(score)))
        begin += length
    assert begin == len(sent.observations) == len(sent.actions)
    return parts


PLAYED, WHOLE = counted([rollout(seed) for seed in range(12)])


def test_episodes_are_put_together_over_the_borders_of_rollouts() -> None:
    algorithm = make(quantile=0.0, window_episodes=1000)  # every episode is as good as the worst
    found = [part for one in PLAYED if (sent := algorithm.sift(one)) is not None for part in taken_apart(sent)]
    expected = [
        ([o.tolist() for o, _, _ in one["steps"]], [a for _, a, _ in one["steps"]], one["score"]) for one in WHOLE
    ]
    assert len(WHOLE) > 30 and found == expected
    assert max(len(one["steps"]) for one in WHOLE) > STEPS, "some go over a border"


@pytest.mark.parametrize("rule", ["adaptive", "fixed"])
def test_nothing_empty_is_sent_and_everything_is_counted_once(rule: str) -> None:
    algorithm = make(rule=rule, quantile=0.9, goal=2.0, take=1.0, clean=0.5, cut=0.0)
    steps, returns, lengths, silent = 0, [], [], 0
    for one in PLAYED:
        sent = algorithm.sift(one)
        if sent is None:
            silent += 1
            continue
        assert len(sent.actions) and len(sent.lengths) and (sent.lengths > 0).all()
        assert sent.version == one.version
        steps += sent.steps
        returns += sent.episode_returns.tolist()
        lengths += sent.episode_lengths.tolist()
    steps += algorithm.sieve.steps
    returns += algorithm.sieve.returns.tolist()
    lengths += algorithm.sieve.lengths.tolist()
    assert silent > 0, "else nothing was tested"
    assert steps == sum(one.steps for one in PLAYED)
    assert returns == [float(r) for one in PLAYED for r in one.episode_returns]
    assert lengths == [int(n) for one in PLAYED for n in one.episode_lengths]


def test_what_is_held_is_sent_with_the_next_and_no_message_grows_past_its_bound() -> None:
    now, later, bounded = (make(quantile=0.0, window_episodes=1000) for _ in range(3))
    at_once = [part for one in PLAYED if (sent := now.sift(one)) is not None for part in taken_apart(sent)]
    held = [later.sift(one, hold=number % 4 != 3) for number, one in enumerate(PLAYED)]
    assert [sent is None for sent in held] == [True, True, True, False] * 3
    assert [part for sent in held if sent is not None for part in taken_apart(sent)] == at_once
    bounded.sieve.most_told = max(len(one.actions) for one in held if one is not None) // 2
    sizes = [len(sent.actions) for one in PLAYED if (sent := bounded.sift(one, hold=True)) is not None]
    assert sizes and max(sizes) <= bounded.sieve.most_told


def test_more_episodes_than_a_message_may_tell_of_are_told_with_the_next() -> None:
    algorithm = make(rule="fixed", goal=1e6, clean=0.9, episode_steps=1)
    algorithm.sieve.most_told = 5
    for one in PLAYED:
        assert algorithm.sift(one) is None
    good = counted([rollout(50, reward=1e6)])[0][0]
    told = []
    for _ in range(20):
        sent = algorithm.sift(good)
        assert sent is not None and len(sent.episode_returns) <= 5
        told += sent.episode_returns.tolist()
    assert told[: len(WHOLE)] == [one["score"] for one in WHOLE]


def test_the_adaptive_rule_keeps_what_is_at_or_above_the_quantile_of_the_last_episodes() -> None:
    algorithm = make(quantile=0.7, window_episodes=9)
    recent: list[float] = []
    for one in PLAYED:
        recent = [*recent, *one.episode_returns.tolist()][-9:]
        least = sorted(recent)[int(0.7 * (len(recent) - 1))]  # a return that was reached
        expected = [r for r in one.episode_returns.tolist() if r >= least]
        sent = algorithm.sift(one)
        assert (sent.returns.tolist() if sent else []) == expected


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.8, 1.0])
def test_the_threshold_is_a_return_that_was_reached(quantile: float) -> None:
    returns = np.random.default_rng(1).normal(size=37)
    assert threshold(returns, quantile) == sorted(returns)[int(np.floor(quantile * 36 + 1e-9))]
    assert threshold(np.full(5, 3.5), quantile) == 3.5


def test_the_fixed_rule_takes_cleans_and_drops() -> None:
    returns = np.array([-500.0, 39.9, 40.0, 189.9, 190.0, 300.0])
    whole, part = fixed_rule(returns, goal=200.0, take=0.95, clean=0.2)
    assert whole.tolist() == [False, False, False, False, True, True]
    assert part.tolist() == [False, False, True, True, False, False]
    whole, part = fixed_rule(np.array([-401.0, -400.0, 0.0]), goal=200.0, take=0.0, clean=-2.0)  # experiment 1
    assert (whole.tolist(), part.tolist()) == ([False, False, True], [False, True, False])


@pytest.mark.parametrize("cut", [-1.0, 0.0, 0.7])
def test_of_an_episode_kept_in_part_stay_the_steps_above_the_cut(cut: float) -> None:
    rng = np.random.default_rng(2)
    rewards = rng.normal(3, 5, size=40).astype(np.float32)
    episode = Episode(rng.normal(size=(40, 2)), np.arange(40), rewards, 1.5)
    mean, spread = rewards.mean(), rewards.std()
    expected = [i for i in range(40) if (rewards[i] - mean) / spread > cut]
    found = thinned(episode, cut)
    assert found.actions.tolist() == expected and found.score == 1.5
    np.testing.assert_array_equal(found.observations, episode.observations[expected])
    alike = replace(episode, rewards=np.ones(40, np.float32))  # CartPole: every step is as good as the others
    assert len(thinned(alike, cut)) == (40 if cut < 0 else 0)


def test_a_part_of_which_nothing_stays_is_not_sent() -> None:
    algorithm = make(rule="fixed", goal=10.0, take=1.0, clean=-100.0, cut=0.0)
    alike = counted([rollout(seed, reward=0.1) for seed in range(3)])[0]
    assert [algorithm.sift(one) for one in alike] == [None, None, None]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_rewards_to_go_are_the_discounted_sum_of_what_follows(gamma: float) -> None:
    rewards = np.random.default_rng(4).normal(size=12).astype(np.float32)
    expected = [sum(gamma**k * rewards[t + k] for k in range(12 - t)) for t in range(12)]
    np.testing.assert_allclose(rewards_to_go(rewards, gamma), expected, rtol=1e-5, atol=1e-6)
    assert rewards_to_go(rewards, gamma).dtype == np.float32


def test_credits_are_sent_with_the_steps() -> None:
    algorithm = make(quantile=0.0, window_episodes=1000, gamma=0.5)
    found = np.concatenate([sent.credits for one in PLAYED if (sent := algorithm.sift(one)) is not None])
    rewards = [[r for _, _, r in one["steps"]] for one in WHOLE]
    expected = [sum(0.5**k * r for k, r in enumerate(own[t:])) for own in rewards for t in range(len(own))]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_baseline_says_what_is_usual_and_better_steps_are_above_it() -> None:
    rng = np.random.default_rng(6)
    seen = rng.normal(size=(400, 3)).clip(-2, 2).astype(np.float32)
    usual = 2 + 3 * seen[:, 0] - seen[:, 1] * seen[:, 2] + 0.5 * seen[:, 1] ** 2
    luck = rng.normal(size=400)
    x = baseline_features(torch.from_numpy(seen))
    assert x.shape == (400, 1 + 3 + 6)
    np.testing.assert_allclose(regression(x, torch.from_numpy(usual).float()).numpy(), usual, atol=1e-2)
    steps = Batch(torch.from_numpy(seen), torch.arange(400), torch.from_numpy(usual + luck).float())
    found = set(better(steps, 0.25).actions.tolist())
    expected = set(np.argsort(luck)[-100:].tolist())
    assert abs(len(found) - 100) <= 1 and len(found & expected) >= 90
    assert better(steps, 1.0).actions.tolist() == list(range(400))


@pytest.mark.parametrize("shape", [(), (40,), (9, 8, 8)])
def test_the_baseline_takes_any_observation(shape: tuple[int, ...]) -> None:
    seen = torch.from_numpy(np.random.default_rng(0).integers(0, 9, size=(30, *shape)))
    x = baseline_features(seen)
    assert x.shape[1] == {(): 3, (40,): 41, (9, 8, 8): 1}[shape]
    assert torch.isfinite(regression(x, torch.ones(30))).all()


def test_where_no_step_was_better_than_another_all_are_imitated() -> None:
    steps = Batch(torch.zeros(10, 2), torch.arange(10), torch.ones(10))
    assert len(better(steps, 0.5)) == 10


@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_the_slopes_are_the_gradient_of_the_loss_written_out(entropy_weight: float) -> None:
    generator = torch.Generator().manual_seed(3)
    out = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    actions = torch.tensor([0, 3, 1, 1, 2, 0])
    loss, entropy = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i in range(6):
        p = torch.exp(out[i]) / torch.exp(out[i]).sum()
        loss = loss - torch.log(p[actions[i]]) / 6
        entropy = entropy - (p * torch.log(p)).sum() / 6
    (expected,) = torch.autograd.grad(loss - entropy_weight * entropy, out)
    metrics, found = imitation_slopes(out.detach(), actions, entropy_weight)
    torch.testing.assert_close(found, expected)
    assert metrics == pytest.approx({"imitation_loss": loss.item(), "entropy": entropy.item()})


def test_the_slopes_of_continuous_actions_are_those_of_the_squared_error() -> None:
    out = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    actions = torch.randn(5, 2, dtype=torch.float64)
    loss = sum((out[i, j] - actions[i, j]) ** 2 / 2 / 5 for i in range(5) for j in range(2))
    assert isinstance(loss, torch.Tensor)
    (expected,) = torch.autograd.grad(loss, out)
    metrics, found = regression_slopes(out.detach(), actions, 0.0)
    torch.testing.assert_close(found, expected)
    assert metrics["imitation_loss"] == pytest.approx(loss.item())


def test_written_out_and_by_autograd_the_gradient_is_the_same() -> None:
    algorithm = make(max_gradient_norm=1e9)
    batch = next(iter(owed(algorithm)))
    algorithm.gradient(batch)
    found = algorithm.parameters.gradient.clone()
    assert algorithm.plain is not None and found.any()
    algorithm.plain = None
    algorithm.gradient(batch)
    torch.testing.assert_close(algorithm.parameters.gradient, found)


def owed(algorithm: Elite) -> list[Any]:
    """Play and remember until a round is owed; its batches."""
    for one in PLAYED:
        sent = algorithm.sift(one)
        if sent is not None:
            algorithm.remember(sent)
    return list(algorithm.batches())


def message(returns: list[float], told: list[float] | None = None, length: int = 2) -> Episodes:
    """Episodes whose steps show, as their action, which they are of."""
    steps = len(returns) * length
    told = returns if told is None else told
    return Episodes(
        np.zeros((steps, 2), np.float32), np.repeat(np.arange(len(returns)), length),
        np.zeros(steps, np.float32),
        np.full(len(returns), length), np.array(returns, np.float32), 0, steps, np.array(told, np.float32),
        np.full(len(told), length),
    )  # fmt: skip


def test_a_round_learns_from_the_best_of_all_that_was_heard_of() -> None:
    algorithm = make(quantile=0.5, round_episodes=6, batch=64)
    algorithm.remember(message([3.0, 5.0, 9.0], told=[3.0, 5.0, 9.0, 0.0, 1.0]))
    assert not list(algorithm.batches()), "five of six"
    algorithm.remember(message([4.0, 7.0]))
    batches = list(algorithm.batches())
    assert len(batches) == 3 and algorithm.owed_episodes == 1
    assert algorithm.least == 4.0, "the middle of 0 1 3 4 5 7 9"
    assert {int(a) for batch in batches for a in batch.actions} == {0, 1, 2}  # 4; 5 and 7; 9
    assert not list(algorithm.batches())


def test_several_rounds_at_once_make_as_many_gradients_as_one_after_another() -> None:
    algorithm = make(round_episodes=4, gradients=3)
    algorithm.remember(message([1.0] * 9))
    assert len(list(algorithm.batches())) == 6 and algorithm.owed_episodes == 1


def test_what_is_old_is_forgotten_in_the_adaptive_rule_and_kept_in_the_fixed_one() -> None:
    adaptive, fixed = make(window_episodes=10), make(rule="fixed")
    for algorithm in (adaptive, fixed):
        algorithm.remember(message([9.0]))
        for _ in range(3):
            algorithm.remember(message([1.0], told=[1.0, 0.0, 0.0]))
        assert len(algorithm.memory.kept) == 4
        algorithm.remember(message([1.0]))
    assert [kept.score for kept in adaptive.memory.kept] == [1.0] * 4, "ten were heard of since"
    assert [kept.score for kept in fixed.memory.kept] == [9.0] + [1.0] * 4


@pytest.mark.parametrize("rule", ["adaptive", "fixed"])
def test_no_more_steps_are_kept_than_was_said_and_the_oldest_go(rule: str) -> None:
    algorithm = make(rule=rule, memory_steps=7)
    for score in range(6):
        algorithm.remember(message([float(score)]))
        assert algorithm.memory.steps == sum(len(kept) for kept in algorithm.memory.kept) <= 7
    assert [kept.score for kept in algorithm.memory.kept] == [3.0, 4.0, 5.0]


def test_a_fixed_round_is_so_many_passes_over_everything() -> None:
    algorithm = make(rule="fixed", goal=1.0, take=1.0, clean=0.0, epochs=5, batch=4)
    algorithm.remember(message([2.0, 2.0, 0.5, 0.5, 0.5]))
    batches = list(algorithm.batches())
    assert [len(batch.actions) for batch in batches] == [4, 4, 2] * 5
    counts = np.bincount(torch.cat([batch.actions for batch in batches]).numpy())
    assert counts.tolist() == [10] * 5, "each of the two steps of each episode, once a pass"


def test_of_a_long_episode_the_first_steps_are_kept_and_its_return_is_whole() -> None:
    algorithm = make(quantile=0.0, episode_steps=3, window_episodes=1000)
    found = [part for one in PLAYED if (sent := algorithm.sift(one)) is not None for part in taken_apart(sent)]
    assert [len(actions) for _, actions, _ in found] == [min(3, len(one["steps"])) for one in WHOLE]
    assert [score for _, _, score in found] == [one["score"] for one in WHOLE]


def test_a_state_holds_open_episodes_and_what_is_not_told_yet() -> None:
    whole = make(quantile=0.8)
    for one in PLAYED[:5]:
        whole.sift(one)
    state = whole.state()
    values = msgspec.json.decode(msgspec.json.encode(state.values))
    other = make(quantile=0.8)
    other.restore(State({name: array.copy() for name, array in state.arrays.items()}, values))
    for one in PLAYED[5:]:
        mine, theirs = whole.sift(one), other.sift(one)
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            for name in Episodes.__slots__:
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def test_pieces_of_an_episode_that_was_begun_anew_are_dropped() -> None:
    """As on EnvPool after a resume: the player counts from 0 again, while the pieces are of another episode."""
    algorithm, anew = make(quantile=0.0, window_episodes=1000), rollout(20, end=0.0)
    assert algorithm.sift(anew) is None
    [again], whole = counted([rollout(3, end=0.3)])
    found = algorithm.sift(again)
    firsts = {int(np.flatnonzero((again.terminated | again.truncated)[:, b])[0]) for b in range(LANES)}
    assert found is not None and len(found.returns) == len(whole) - LANES and firsts
    assert len(found.episode_returns) == len(whole), "told of, all the same"


def test_explorers_are_a_share_of_all_lanes_and_choose_more_evenly() -> None:
    parts = [make(Place(rank, 2, 8, 64), explorers=0.25, temperature=3.0) for rank in range(2)]
    assert [p.temperatures.tolist() for p in parts] == [[3.0, 3.0, 1.0, 1.0], [1.0] * 4]
    algorithm = parts[0]
    with torch.no_grad():
        algorithm.network.policy[-1].bias.copy_(torch.tensor([2.0, 0.0, 0.0]))  # type: ignore[operator]
    seen, counts, rng = np.zeros((4, 2), np.float32), np.zeros((4, 3)), np.random.default_rng(0)
    for _ in range(3000):
        decision = algorithm.act(seen, rng)
        counts[np.arange(4), decision.actions] += 1
    logits = np.array([2.0, 0.0, 0.0])
    for lane, heat in enumerate((3.0, 3.0, 1.0, 1.0)):
        expected = np.exp(logits / heat) / np.exp(logits / heat).sum()
        np.testing.assert_allclose(counts[lane] / 3000, expected, atol=0.04)
    wide = make(Place(0, 1, 2, 16), action=spaces.Box(-1, 1, (1,)), explorers=0.5, temperature=4.0, spread=0.5)
    drawn = np.stack([wide.act(np.zeros((2, 2), np.float32), rng).actions[:, 0] for _ in range(2000)])
    np.testing.assert_allclose(drawn.std(0), [2.0, 0.5], rtol=0.1)


def test_the_spread_of_continuous_actions_falls_and_is_not_learned() -> None:
    algorithm = make(action=spaces.Box(-1, 1, (2,)), spread=0.8, spread_end=0.25)
    for progress, expected in ((0.0, 0.8), (0.5, 0.5), (1.0, 0.2)):
        algorithm.anneal(progress)
        np.testing.assert_allclose(np.exp(algorithm.network.log_std.numpy()), expected, rtol=1e-5)
    assert "log_std" not in dict(algorithm.network.named_parameters())


def test_a_rule_that_keeps_nothing_in_part_may_say_so_but_not_the_other_way_round() -> None:
    make(rule="fixed", take=0.75, clean=0.75)
    with pytest.raises(ConfigError, match=r"--clean 0.9 is above --take 0.5"):
        make(take=0.5, clean=0.9)


def test_only_schemes_with_one_learner_are_taken() -> None:
    base = resolve({"env": "CartPole-v1", "algo": "elite", "workers": 1})
    for scheme in SCHEMES:
        config = msgspec.structs.replace(base, scheme=scheme)
        if scheme in ("local", "actor-learner"):
            check_pairs(config)
        else:
            with pytest.raises(ConfigError, match=r"imitates the best of what .*: use --scheme actor-learner"):
                check_pairs(config)


def test_the_published_settings_are_those_of_the_fixed_rule_in_the_presets() -> None:
    for env, take, clean, cut in (("CartPole-v1", 0.95, 0.2, -1.0), ("LunarLander-v3", 0.95, 0.75, 0.0)):
        values = preset(env, "elite")
        assert [values[name] for name in ("goal", "take", "clean", "cut")] == [200.0, take, clean, cut]


def test_a_learner_that_plays_nothing_itself_learns_the_same() -> None:
    playing, learning = make(), make()
    both: list[Any] = [playing, learning]
    for one in PLAYED:
        sent = playing.sift(one)
        if sent is not None:
            for algorithm in both:
                algorithm.remember(sent)
                learn(cast(Algorithm, algorithm), apply_here)
    assert playing.parameters.version > 3
    assert torch.equal(playing.parameters.vector, learning.parameters.vector)
