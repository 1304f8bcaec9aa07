"""Servers: what may meet the weights, what comes of several gradients, and where the vector is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from troupe.books import Books
from troupe.commons import Commons
from troupe.errors import ConfigError
from troupe.goal import Goal
from troupe.parameters import PAD, Optimiser, Parameters
from troupe.roles import server as server_role
from troupe.roles.report import listen
from troupe.roles.server import PUT_ASIDE_AFTER, Limits, server
from troupe.schemes.parameter_server import SharedSlice, cuts
from troupe.transports.memory import MemoryHub
from troupe.types import Array, Message, Scalar

SIZE, NORM, RATE = 128, 0.5, 0.01
SOUND = np.full(SIZE, 0.01, np.float32)


class Pages:
    """A journal that is only remembered."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, kind: str, **fields: Any) -> None:
        self.lines.append({"kind": kind, **fields})


class Fixture:
    """A server of the whole vector, two workers, and the books that hear of what it refuses."""

    def __init__(self, *, accumulate: int = 1, lag: int = 0) -> None:
        torch.manual_seed(1)
        self.house = Parameters(nn.Linear(20, 6))
        assert len(self.house.vector) == SIZE
        self.commons = Commons.create(self.house, seats=1)
        self.hub, desk, self.pages = MemoryHub(), MemoryHub(), Pages()
        self.mailbox = self.hub.mailbox("worker")
        self.books = Books(self.pages, Goal(steps=100), 100)
        self._keep = listen(desk.mailbox("learner"), self.books, run="this", refresh=lambda: None)
        self._sequences: dict[str, int] = {}
        self._loop = self.begin(desk, accumulate, lag)
        next(self._loop)

    def begin(self, desk: MemoryHub, accumulate: int, lag: int, incarnation: int = 0) -> Iterator[None]:
        seat = self.commons.seat(0)
        seat.sit(incarnation)
        owned = SharedSlice(self.commons, slice(0, SIZE), seat, Optimiser("adam"), first=True)
        return server(
            owned, self.hub.mailbox("server-0"), desk.mailbox("server-0"), run="this", name="server-0",
            incarnation=incarnation, accumulate=accumulate, limits=Limits(lag, NORM, RATE), timeout_s=1.0,
        )  # fmt: skip

    def send(self, gradient: Array | None, sender: str = "worker-0", **changes: Any) -> None:
        """One gradient arrives, and has its turn."""
        self._sequences[sender] = self._sequences.get(sender, 0) + 1
        meta: dict[str, Scalar] = {"learning_rate": changes.pop("learning_rate", RATE)}
        parts: dict[str, Any] = {
            "kind": "gradient", "run": "this", "sender": sender, "sequence": self._sequences[sender],
            "version": self.commons.version(), "meta": meta,
            "arrays": {} if gradient is None else {"gradient": gradient}, **changes,
        }  # fmt: skip
        self.mailbox.send("server-0", Message(**parts), 1.0)
        next(self._loop)
        for _ in range(8):
            next(self._keep)

    def news(self) -> Message:
        message = self.mailbox.latest("weights")
        assert message is not None
        return message

    def state(self) -> list[Array]:
        """Weights and moments, as they are."""
        return [self.commons.vector.numpy().copy(), *(m.numpy().copy() for m in self.commons.moments.values())]

    def refused(self) -> list[dict[str, Any]]:
        return [line for line in self.pages.lines if line["kind"] == "refused"]


# What may meet the weights -------------------------------------------------------------------------------------------


def changed(index: int, value: float) -> Array:
    gradient = SOUND.copy()
    gradient[index] = value
    return gradient


BAD: dict[str, tuple[Array | None, dict[str, Any], str]] = {
    "nan": (changed(0, np.nan), {}, "not finite"),
    "infinite at the end": (changed(SIZE - 1, -np.inf), {}, "not finite"),
    "overflow": (changed(3, 1e30), {}, "not finite"),  # of its norm
    "long": (changed(5, 0.6), {}, "norm 0.61"),
    "wrong length": (SOUND[:-1], {}, r"\[127\] float32, where the slice has 128"),
    "wrong type": (SOUND.astype(np.float64), {}, "float64"),
    "two dimensions": (SOUND.reshape(2, -1), {}, r"\[2, 64\]"),
    "no gradient": (None, {}, "is no gradient"),
    "another kind": (SOUND, {"kind": "rollout"}, "'rollout' message is no gradient"),
    "another run": (SOUND, {"run": "that"}, "run 'that', where this is 'this'"),
    "a rate that is none": (SOUND, {"learning_rate": float("nan")}, "learning rate of nan"),
    "a rate below 0": (SOUND, {"learning_rate": -0.01}, "learning rate of -0.01"),
    "a rate above the start's": (SOUND, {"learning_rate": 0.1}, "learning rate of 0.1, .* at most 0.01"),
    "a rate in words": (SOUND, {"learning_rate": "fast"}, "learning rate of 'fast'"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_is_not_sound_never_reaches_the_vector_and_is_counted_by_name(name: str) -> None:
    made = Fixture()
    gradient, changes, why = BAD[name]
    before = made.state()
    made.send(gradient, **changes)
    assert all(np.array_equal(a, b) for a, b in zip(made.state(), before, strict=True))
    (line,) = made.refused()
    assert (line["worker"], line["by"], line["count"]) == ("worker-0", "server-0", 1)
    assert re.search(why, line["why"]), line["why"]
    assert made.books.gradients_refused == 1 and made.commons.version() == 0
    made.send(SOUND)
    assert not np.array_equal(before[0], made.state()[0]), "and a sound one does"


def test_a_gradient_older_than_max_lag_is_dropped_and_one_just_as_old_is_not() -> None:
    made = Fixture(lag=3)
    for _ in range(5):
        made.send(SOUND)
    before = made.state()
    made.send(SOUND, version=1)  # four versions old
    assert all(np.array_equal(a, b) for a, b in zip(made.state(), before, strict=True))
    assert made.refused()[0]["why"] == "worker-0.0: a gradient 4 versions old, over --max-lag 3"
    made.send(SOUND, version=2)
    assert made.commons.version() == 6 and len(made.refused()) == 1
    any_age = Fixture()
    for _ in range(5):
        any_age.send(SOUND, version=0)
    assert any_age.commons.version() == 5 and not any_age.refused()


def test_a_worker_is_put_aside_after_three_and_its_successor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Fixture()
    for _ in range(PUT_ASIDE_AFTER):
        made.send(changed(0, np.nan))
    before = made.state()
    for _ in range(50):
        made.send(SOUND)  # nothing of it is believed any more
    assert all(np.array_equal(a, b) for a, b in zip(made.state(), before, strict=True))
    made.send(SOUND, sender="worker-1")
    assert made.commons.version() == 1, "the others go on"
    assert [line["count"] for line in made.refused()] == [1, 1, 1], "no line for each of many"
    monkeypatch.setattr(server_role, "SUM_UP_S", 0.0)
    monkeypatch.setattr(server_role._Refusals.sum_up, "__defaults__", (0.0,))
    made.send(SOUND)
    assert made.refused()[-1]["count"] == 51 and "put aside after 3" in made.refused()[-1]["why"]
    assert made.books.gradients_refused == PUT_ASIDE_AFTER + 51, "but every one is counted"
    made.send(SOUND, incarnation=1, sequence=1)
    assert made.commons.version() == 2, "the next incarnation begins with a clean sheet"


def test_workers_hear_which_of_their_gradients_were_handled_refused_or_not() -> None:
    made = Fixture()
    made.send(SOUND)
    made.send(changed(0, np.nan), sender="worker-1")
    assert made.news().meta == {"worker-0.0": 1, "worker-1.0": 1}
    for incarnation in range(1, 50):
        made.send(SOUND, incarnation=incarnation, sequence=1)
    assert made.news().meta == {"worker-0.49": 1, "worker-1.0": 1}, "of the dead nothing is said for ever"
    made.send(SOUND, sender="stranger", run="that")
    assert "stranger.0" not in made.news().meta


# What is applied -----------------------------------------------------------------------------------------------------


def test_gradients_are_applied_as_an_owner_would_bit_for_bit() -> None:
    made, rng = Fixture(), np.random.default_rng(1)
    torch.manual_seed(1)
    alone = Parameters(nn.Linear(20, 6))
    alone.learning_rate = RATE
    for number in range(1, 11):
        gradient = rng.normal(size=SIZE).astype(np.float32) * np.float32(0.01)
        alone.gradient.copy_(torch.from_numpy(gradient))
        alone.apply()
        made.send(gradient)
        news = made.news()
        assert news.version == made.commons.version() == number
        assert np.array_equal(news.arrays["weights"], alone.vector.numpy())
    for name, moment in made.commons.moments.items():
        assert torch.equal(moment, alone.moments[name])


def test_so_many_gradients_make_one_step_with_their_mean() -> None:
    made, alone = Fixture(accumulate=3), Fixture()
    rng = np.random.default_rng(1)
    gradients = [rng.normal(size=SIZE).astype(np.float32) * np.float32(0.01) for _ in range(3)]
    before = made.state()
    for i, gradient in enumerate(gradients[:2]):
        made.send(gradient, sender=f"worker-{i}", learning_rate=RATE * (1 - i / 3))
        made.send(changed(0, np.nan), sender="worker-2")  # counts for nothing
    assert np.array_equal(made.state()[0], before[0]) and made.commons.version() == 0
    made.send(gradients[2], sender="worker-0", learning_rate=RATE / 3)
    assert made.commons.version() == 1
    alone.send(np.mean(gradients, 0), learning_rate=RATE * (1 + 2 / 3 + 1 / 3) / 3)
    for a, b in zip(made.state(), alone.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=0)
    assert not np.array_equal(made.state()[0], before[0])


def test_a_server_that_died_is_followed_by_one_that_goes_on_where_it_was() -> None:
    made, whole, rng = Fixture(), Fixture(), np.random.default_rng(1)
    gradients = [rng.normal(size=SIZE).astype(np.float32) * np.float32(0.01) for _ in range(6)]
    for gradient in gradients[:3]:
        made.send(gradient)
    made._loop.close()  # type: ignore[attr-defined]  # killed; its mailbox and its slice stay
    made._loop = made.begin(MemoryHub(), 1, 0, incarnation=1)
    next(made._loop)
    assert made.news().version == 3
    for gradient in gradients[3:]:
        made.send(gradient)
    for gradient in gradients:
        whole.send(gradient)
    assert made.commons.version() == 6
    for a, b in zip(made.state(), whole.state(), strict=True):
        assert np.array_equal(a, b), "weights and moments, and the moments' count of steps"


# Where the vector is cut ---------------------------------------------------------------------------------------------


@given(lanes=st.integers(1, 200), data=st.data())
def test_cuts_cover_the_vector_and_fall_between_lanes(lanes: int, data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, lanes))
    pieces = cuts(lanes * PAD, shards)
    assert len(pieces) == shards
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(lanes * PAD))
    assert all(piece.start % PAD == 0 and piece.stop > piece.start for piece in pieces)
    lengths = [piece.stop - piece.start for piece in pieces]
    assert max(lengths) - min(lengths) <= PAD, "evenly"


def test_more_shards_than_pieces_are_refused() -> None:
    with pytest.raises(ConfigError, match="--shards 3 is more than the 2 pieces of 64 weights"):
        cuts(2 * PAD, 3)


def test_slices_side_by_side_are_the_whole_bit_for_bit() -> None:
    """What the cuts at multiples of 64 are for: see PAD."""
    torch.manual_seed(1)
    whole, cut = Parameters(nn.Linear(50, 40)), Parameters(nn.Linear(50, 40))
    cut.load_weights(whole.weights(), 0)
    commons, rng, whole.learning_rate = Commons.create(cut, seats=4), np.random.default_rng(1), RATE
    owners = [
        SharedSlice(commons, piece, commons.seat(i), Optimiser("adam"), first=i == 0)
        for i, piece in enumerate(cuts(len(cut.vector), 4))
    ]
    for _ in range(10):
        gradient = rng.normal(size=len(cut.vector)).astype(np.float32)
        whole.gradient.copy_(torch.from_numpy(gradient))
        whole.apply()
        for owner, piece in zip(owners, cuts(len(cut.vector), 4), strict=True):
            owner.apply(gradient[piece].copy(), RATE)
    assert torch.equal(commons.vector, whole.vector)
    assert all(torch.equal(commons.moments[name], whole.moments[name]) for name in commons.moments)
    assert commons.version() == 10, "the first server's updates are the version"
