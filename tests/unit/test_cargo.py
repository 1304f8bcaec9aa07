"""Rollouts, episodes and weights as messages: what comes out is what went in, and anything else is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from troupe.errors import BadMessage
from troupe.roles.cargo import EpisodesShape, RolloutShape, check_weights, pack, pack_rollout, pack_weights
from troupe.transports.codec import decode, encode, encoded_size
from troupe.types import Array, Episodes, Message, Rollout

T, B = 3, 2
SHAPE = RolloutShape(T, B, (4,), "float32", ())
IMAGES = RolloutShape(16, 8, (84, 84), "uint8", ())
NUMBERS = RolloutShape(4, 1, (), "int64", ())
CONTINUOUS = RolloutShape(2, 2, (3,), "float32", (2,))
SHAPES = [SHAPE, IMAGES, NUMBERS, CONTINUOUS]


def rollout(shape: RolloutShape = SHAPE, ends: int = 2) -> Rollout:
    rng = np.random.default_rng(0)
    grid = (shape.steps, shape.batch)
    actions = rng.normal(size=(*grid, *shape.action)).astype(np.float32) if shape.action else rng.integers(3, size=grid)

    def observations(*count: int) -> Array:
        return (100 * rng.random((*count, *shape.observation))).astype(shape.observation_dtype)

    return Rollout(
        observations=observations(shape.steps + 1, shape.batch),
        actions=actions,
        log_probs=rng.normal(size=grid).astype(np.float32),
        rewards=rng.normal(size=grid).astype(np.float32),
        terminated=rng.random(grid) < 0.5,
        truncated=rng.random(grid) < 0.5,
        valid=np.ones(grid, bool),
        final_index=np.stack(np.unravel_index(np.arange(ends), grid), 1).astype(np.int64),
        final_observations=observations(ends),
        version=17,
        episode_returns=rng.normal(size=ends).astype(np.float32),
        episode_lengths=rng.integers(9, size=ends),
    )


def message(one: Rollout | None = None) -> Message:
    return pack_rollout(one or rollout(), run="r", sender="actor-1", incarnation=2, sequence=9, meta={"play_s": 0.5})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", [0, 2])
def test_a_rollout_arrives_as_it_was_sent(shape: RolloutShape, ends: int) -> None:
    sent = rollout(shape, ends)
    packed = message(sent)
    assert (packed.kind, packed.run, packed.sender) == ("rollout", "r", "actor-1")
    assert (packed.incarnation, packed.sequence, packed.version, packed.meta) == (2, 9, 17, {"play_s": 0.5})
    arrived = shape.unpack(decode(b"".join(encode(packed))))
    assert arrived.version == 17
    for name in Rollout.__slots__:
        if name != "version":
            found, expected = getattr(arrived, name), getattr(sent, name)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            np.testing.assert_array_equal(found, expected, err_msg=name)


def with_array(name: str, array: Array) -> Message:
    good = message()
    return replace(good, arrays={**good.arrays, name: array})


GRID = ("log_probs", "rewards", "terminated", "truncated", "valid", "actions")


@pytest.mark.parametrize("name", [*GRID, "observations"])
def test_an_array_of_another_shape_is_refused_and_named(name: str) -> None:
    array = getattr(rollout(), name)
    for bad in (array[:-1], array[:, :1], array[..., None], array.ravel()):
        with pytest.raises(BadMessage, match=rf"^actor-1: {name} is \["):
            SHAPE.unpack(with_array(name, bad))


@pytest.mark.parametrize("name", [*GRID, "observations", "final_observations", "final_index", "episode_returns"])
def test_an_array_of_another_dtype_is_refused_and_named(name: str) -> None:
    array = getattr(rollout(), name)
    with pytest.raises(BadMessage, match=rf"^actor-1: {name} are float64, not "):
        SHAPE.unpack(with_array(name, array.astype(np.float64)))


@pytest.mark.parametrize("name", ["observations", "final_observations", "log_probs", "rewards", "episode_returns"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_refused_and_named(name: str, value: float) -> None:
    array = getattr(rollout(), name).copy()
    array.flat[-1] = value
    with pytest.raises(BadMessage, match=rf"^actor-1: {name} holds a number that is not finite"):
        SHAPE.unpack(with_array(name, array))


def test_a_continuous_action_that_is_not_finite_is_refused() -> None:
    shape = RolloutShape(T, B, (4,), "float32", (2,))
    one = rollout(shape)
    one.actions[0, 0, 0] = np.nan
    with pytest.raises(BadMessage, match="actions holds a number that is not finite"):
        shape.unpack(message(one))


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("final_index", np.array([[0, 0]]), "do not agree"),
        ("final_index", np.array([0, 1]), "do not agree"),
        ("final_index", np.zeros((2, 3), np.int64), "do not agree"),
        ("final_observations", np.zeros((2, 5), np.float32), "do not agree"),
        ("final_index", np.array([[0, 0], [T, 0]]), "points outside"),
        ("final_index", np.array([[0, 0], [0, B]]), "points outside"),
        ("final_index", np.array([[0, 0], [-1, 0]]), "points outside"),
        ("episode_returns", np.zeros(3, np.float32), "do not agree"),
        ("episode_returns", np.zeros((2, 1), np.float32), "do not agree"),
        ("episode_lengths", np.zeros(0, np.int64), "do not agree"),
    ],
)
def test_arrays_that_do_not_agree_are_refused(name: str, array: Array, why: str) -> None:
    with pytest.raises(BadMessage, match=f"^actor-1: .*{why}"):
        SHAPE.unpack(with_array(name, array))


def test_arrays_that_are_missing_or_too_many_are_refused() -> None:
    good = message()
    fewer = {name: array for name, array in good.arrays.items() if name != "valid"}
    for arrays in (fewer, {**good.arrays, "more": np.zeros(1)}, {}):
        with pytest.raises(BadMessage, match="actor-1: a rollout has the arrays"):
            SHAPE.unpack(replace(good, arrays=arrays))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rollout_never_takes_more_bytes_than_was_said(shape: RolloutShape) -> None:
    everything_ends = rollout(shape, ends=shape.steps * shape.batch)
    assert encoded_size(message(everything_ends)) <= shape.nbytes()


# Episodes -------------------------------------------------------------------------------------------------------------

MOST = 20
FLAT = EpisodesShape(MOST, (4,), "float32", ())
EPISODE_SHAPES = [FLAT, EpisodesShape(MOST, (84, 84), "uint8", ()), EpisodesShape(MOST, (3,), "float32", (2,))]


def episodes(shape: EpisodesShape = FLAT, lengths: tuple[int, ...] = (3, 1, 5), told: int = 4) -> Episodes:
    rng, count = np.random.default_rng(0), sum(lengths)
    continuous = rng.normal(size=(count, *shape.action)).astype(np.float32)
    actions = continuous if shape.action else rng.integers(3, size=count)
    seen = (100 * rng.random((count, *shape.observation))).astype(shape.observation_dtype)
    returns, others = (rng.normal(size=n).astype(np.float32) for n in (len(lengths), told))
    return Episodes(
        observations=seen, actions=actions, credits=rng.normal(size=count).astype(np.float32),
        lengths=np.array(lengths, np.int64), returns=returns, version=17, steps=321,
        episode_returns=others, episode_lengths=rng.integers(1, 9, told),
    )  # fmt: skip


def parcel(one: Episodes | None = None) -> Message:
    return pack(one or episodes(), run="r", sender="actor-1", incarnation=2, sequence=9, meta={"play_s": 0.5})


@pytest.mark.parametrize("shape", EPISODE_SHAPES)
@pytest.mark.parametrize("told", [0, 4])
def test_episodes_arrive_as_they_were_sent(shape: EpisodesShape, told: int) -> None:
    sent = episodes(shape, told=told)
    packed = parcel(sent)
    assert (packed.kind, packed.sequence, packed.version) == ("episodes", 9, 17)
    assert packed.meta == {"play_s": 0.5, "steps": 321}
    arrived = shape.unpack(decode(b"".join(encode(packed))))
    assert (arrived.version, arrived.steps) == (17, 321)
    for name in Episodes.__slots__:
        if name not in ("version", "steps"):
            found, expected = getattr(arrived, name), getattr(sent, name)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_a_rollout_is_packed_as_one() -> None:
    assert pack(rollout(), run="r", sender="a", incarnation=0, sequence=1, meta={}).kind == "rollout"


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("observations", np.zeros((8, 4), np.float32), r"observations is \[8, 4\], not \[9, 4\]"),
        ("observations", np.zeros((9, 5), np.float32), r"observations is \[9, 5\], not \[9, 4\]"),
        ("observations", np.zeros((9, 4)), "observations are float64, not float32"),
        ("observations", np.full((9, 4), np.nan, np.float32), "observations holds a number that is not finite"),
        ("actions", np.zeros((9, 1), np.int64), r"actions is \[9, 1\], not \[9\]"),
        ("actions", np.zeros(9, np.float32), "actions are float32, not int64"),
        ("actions", np.int64(3), "0 steps of episodes, where 1 to 20"),
        ("actions", np.zeros(0, np.int64), "0 steps of episodes, where 1 to 20"),
        ("actions", np.zeros(21, np.int64), "21 steps of episodes, where 1 to 20"),
        ("credits", np.zeros(8, np.float32), r"credits is \[8\], not \[9\]"),
        ("credits", np.full(9, np.nan, np.float32), "credits holds a number that is not finite"),
        ("lengths", np.array([3, 1, 4]), "do not sum to the 9 steps"),
        ("lengths", np.array([3, -1, 7]), "do not sum to the 9 steps"),
        ("lengths", np.array([0, 4, 5]), "do not sum to the 9 steps"),
        ("lengths", np.array([2**62, 2**62, 9]), "do not sum to the 9 steps"),
        ("lengths", np.array([4, 5]), "returns .* and lengths do not agree"),
        ("returns", np.zeros((3, 1), np.float32), "returns .* and lengths do not agree"),
        ("returns", np.array([0, np.inf, 0], np.float32), "returns holds a number that is not finite"),
        ("returns", np.zeros(3), "returns are float64, not float32"),
        ("episode_returns", np.zeros(3, np.float32), "episode_returns .* and episode_lengths do not agree"),
        ("episode_lengths", np.array([1, 1, 0, 1]), "an episode of no length"),
    ],
)
def test_episodes_that_are_not_as_agreed_are_refused_and_named(name: str, array: Array, why: str) -> None:
    good = parcel()
    with pytest.raises(BadMessage, match=f"^actor-1: .*{why}"):
        FLAT.unpack(replace(good, arrays={**good.arrays, name: np.asarray(array)}))


@pytest.mark.parametrize("steps", [None, 0, -5, 1.5, True, "many"])
def test_a_count_of_steps_that_is_none_is_refused(steps: int | float | str | None) -> None:
    meta = {} if steps is None else {"steps": steps}
    with pytest.raises(BadMessage, match=r"^actor-1: .* is no number of steps that were played"):
        FLAT.unpack(replace(parcel(), meta=meta))


def test_more_episodes_than_were_agreed_are_not_told_of() -> None:
    FLAT.unpack(parcel(episodes(told=MOST)))
    with pytest.raises(BadMessage, match=r"^actor-1: 21 episodes are told of, where at most 20 were agreed"):
        FLAT.unpack(parcel(episodes(told=MOST + 1)))


def test_episodes_with_arrays_missing_or_too_many_are_refused() -> None:
    good = parcel()
    fewer = {name: array for name, array in good.arrays.items() if name != "lengths"}
    for arrays in (fewer, {**good.arrays, "more": np.zeros(1)}, {}, message().arrays):
        with pytest.raises(BadMessage, match="actor-1: a message of episodes has the arrays"):
            FLAT.unpack(replace(good, arrays=arrays))


@pytest.mark.parametrize("shape", EPISODE_SHAPES)
def test_episodes_never_take_more_bytes_than_was_said(shape: EpisodesShape) -> None:
    assert encoded_size(parcel(episodes(shape, lengths=(1,) * MOST, told=MOST))) <= shape.nbytes()


def test_weights_travel_with_their_version_and_what_was_learned() -> None:
    weights = np.arange(5, dtype=np.float32)
    sent = pack_weights(weights, "r", "learner", 3, {"actor-0.1": 12, "progress": 0.25})
    packed = decode(b"".join(encode(sent)))
    assert (packed.kind, packed.sender, packed.version) == ("weights", "learner", 3)
    assert packed.meta == {"actor-0.1": 12, "progress": 0.25}
    np.testing.assert_array_equal(packed.arrays["weights"], weights)


def test_an_action_or_a_discrete_observation_that_there_is_not_is_refused() -> None:
    shape = replace(NUMBERS, bounds=(("actions", 0, 2), ("observations", 0, 99), ("final_observations", 0, 99)))
    good = message(rollout(NUMBERS))
    assert shape.unpack(good)
    for name in ("actions", "observations", "final_observations"):
        for value in (-1, 100):
            array = good.arrays[name].copy()
            array.flat[0] = value
            with pytest.raises(BadMessage, match=f"^actor-1: {name} are .*{value}.*, where there are 0 to"):
                shape.unpack(replace(good, arrays={**good.arrays, name: array}))


@pytest.mark.parametrize("value", ["long", -1.0, float("nan"), float("inf"), True])
def test_a_time_that_is_none_is_refused(value: float | str) -> None:
    with pytest.raises(BadMessage, match=r"play_s is .*, which is no time"):
        SHAPE.unpack(replace(message(), meta={"play_s": value}))


def test_only_weights_of_this_run_and_network_are_played_with() -> None:
    good = pack_weights(np.ones(64, np.float32), "r", "learner", 3, {"progress": 0.5, "rest_s": 1.0})
    check_weights(good, "r", 64)
    bad = {
        "of run 'r', this is 'other'": (good, "other", 64),
        "weights are .64. float32, not .128.": (good, "r", 128),
        "not finite": (replace(good, arrays={"weights": np.full(64, np.inf, np.float32)}), "r", 64),
        "float64, not": (replace(good, arrays={"weights": np.ones(64)}), "r", 64),
        "progress is 1.5": (replace(good, meta={"progress": 1.5}), "r", 64),
        "rest_s is nan": (replace(good, meta={"rest_s": float("nan")}), "r", 64),
        "rollouts is 0": (replace(good, meta={"rollouts": 0}), "r", 64),
        "has the arrays": (replace(good, arrays={}), "r", 64),
    }
    for sentence, (message, run, count) in bad.items():
        with pytest.raises(BadMessage, match=sentence):
            check_weights(message, run, count)
