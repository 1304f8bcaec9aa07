"""One root seed, a stream per name: the same for who asks again, another for everybody else."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from troupe.seeding import Seeds, rng_state, set_rng_state

names = st.tuples(st.sampled_from(["envs", "play", "learn", "evaluator"]), st.integers(0, 40), st.integers(0, 2000))


def first(root: int, name: tuple[str, int, int]) -> bytes:
    return Seeds(root).stream(*name).bytes(32)


@given(st.integers(0, 2**40), names)
def test_a_stream_depends_on_root_and_name_alone(root: int, name: tuple[str, int, int]) -> None:
    before = first(root, name)
    seeds = Seeds(root)
    for other in (("envs", 1, 0), ("play", 0, 1)):
        seeds.stream(*other).random(100)
    assert seeds.stream(*name).bytes(32) == before


@given(st.integers(0, 2**40), names, names)
def test_streams_of_two_names_differ(root: int, name: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    assert (first(root, name) == first(root, other)) == (name == other)


def test_streams_of_two_roots_differ_and_a_rank_is_not_an_incarnation() -> None:
    streams = {first(root, ("envs", rank, life)) for root in range(5) for rank in range(5) for life in range(5)}
    assert len(streams) == 125


@given(st.integers(0, 2**40), names)
def test_integers_fit_31_bits_and_agree(root: int, name: tuple[str, int, int]) -> None:
    seed = Seeds(root).integer(*name)
    assert 0 <= seed < 2**31
    assert seed == Seeds(root).integer(*name)


@given(st.integers(0, 2**32), st.integers(0, 5))
def test_a_stream_goes_on_exactly_from_its_state_kept_as_json(root: int, drawn: int) -> None:
    rng = Seeds(root).stream("play")
    rng.random(drawn, np.float32)  # an odd count leaves half a word in the generator's buffer
    kept = json.loads(json.dumps(rng_state(rng)))
    expected = rng.random(7, np.float32).tobytes() + rng.bytes(16) + rng.standard_normal(3).tobytes()
    other = np.random.default_rng(0)
    set_rng_state(other, kept)
    assert other.random(7, np.float32).tobytes() + other.bytes(16) + other.standard_normal(3).tobytes() == expected
