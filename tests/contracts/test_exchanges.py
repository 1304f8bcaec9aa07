"""What every exchange promises: a sound gradient is one step for all, and one that is not sound changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from troupe.commons import Commons
from troupe.parameters import Optimiser, Parameters
from troupe.ports import Exchange
from troupe.resolve import resolve
from troupe.schemes import SCHEMES
from troupe.schemes.exchange import apply_here
from troupe.schemes.parameter_server import serve
from troupe.schemes.scheme import VectorScheme, Who
from troupe.transports.memory import MemoryHub
from troupe.types import Array

CLIP = 0.5  # the norm that clipping leaves
RATE = 0.01
SHARING = ["all-reduce", "hogwild", "locked", "parameter-server"]


def network() -> Parameters:
    torch.manual_seed(1)
    parameters = Parameters(nn.Linear(20, 20))
    parameters.learning_rate = RATE
    return parameters


class Bench:
    """One worker of a scheme, with a gradient to hand over, and all that it could change."""

    def __init__(self, scheme: str, folder: Path) -> None:
        self.mine = network()
        self._parts = [self.mine]
        if scheme == "local":
            self.exchange: Exchange = apply_here
            return
        shards = 2 if scheme == "parameter-server" else 1
        options = {"learning_rate": RATE, "max_gradient_norm": CLIP, "overlap": False, "shards": shards}
        config = resolve({"env": "CartPole-v1", "algo": "a3c", "scheme": scheme, **options})
        made, hubs, loops = SCHEMES[scheme](), {"learner": MemoryHub()}, []
        seats = len(made.parts(config))
        self._parts.append(network())
        self._commons = Commons.create(self._parts[1], seats)
        for rank in range(shards if scheme == "parameter-server" else 0):
            hubs[f"server-{rank}"] = hub = MemoryHub()
            who = Who("run", f"server-{rank}", rank, 0, lambda: None, folder)
            mailboxes = hub.mailbox(who.name), hubs["learner"].mailbox(who.name)
            loops.append(serve(config, self._commons.seat(1 + rank), rank, Optimiser("adam"), *mailboxes, who))

        def on_wait() -> None:
            for loop in loops:
                next(loop)

        links = {name: hub.mailbox("worker-0") for name, hub in hubs.items()}
        hubs["learner"].mailbox("learner")
        worker = Who("run", "worker-0", 0, 0, on_wait, folder)
        vector_scheme: VectorScheme = made  # type: ignore[assignment]
        self.exchange = vector_scheme.exchange(config, self._commons.seat(0), links, worker)

    def hand_over(self, gradient: Array, *, clipped: bool = True) -> dict[str, float]:
        self.mine.gradient.numpy()[: self.mine.count] = gradient
        if clipped:
            self.mine.clip_gradient(CLIP)
        return self.exchange(self.mine)

    def state(self) -> list[Array]:
        """Weights and moments: the worker's own, and those that are everybody's."""
        return [
            array.numpy().copy() for each in self._parts for array in (each.vector, *each.moments.values())
        ]  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    def make(scheme: str) -> Bench:
        made = Bench(scheme, tmp_path)
        made.exchange.begin(made.mine)
        return made

    yield make


def sound() -> Array:
    return np.random.default_rng(1).standard_normal(420).astype(np.float32)


def changed(value: float) -> Array:
    gradient = np.full(420, 0.001, np.float32)
    gradient[7] = value
    return gradient


BAD = {
    "nan": changed(np.nan), "infinite": changed(-np.inf), "overflowing": np.full(420, 1e30, np.float32),
    "a hundred times too long": changed(-100 * CLIP), "just too long": changed(1.01 * CLIP),
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["local", *SHARING])
@pytest.mark.parametrize("name", sorted(BAD))
def test_a_gradient_that_is_not_sound_changes_nothing_and_is_counted(
    scheme: str, name: str, bench: Callable[[str], Bench]
) -> None:
    made = bench(scheme)
    assert made.hand_over(sound())["applied"] == 1
    before, version = made.state(), made.mine.version
    metrics = made.hand_over(BAD[name], clipped=False)
    assert metrics["applied"] == 0 and metrics.get("refused", 1) == 1
    assert made.mine.rejected == 1 and made.mine.version == version
    assert all(a.tobytes() == b.tobytes() for a, b in zip(made.state(), before, strict=True))
    assert made.hand_over(sound())["applied"] == 1, "and the next sound one is taken"
    assert all(np.isfinite(array).all() for array in made.state())


@pytest.mark.parametrize("scheme", SHARING)
def test_a_sound_gradient_is_the_step_that_local_takes_bit_for_bit(scheme: str, bench: Callable[[str], Bench]) -> None:
    made, reference = bench(scheme), bench("local")
    for _ in range(3):
        made.hand_over(sound())
        reference.hand_over(sound())
    assert made.mine.weights().tobytes() == reference.mine.weights().tobytes()
    assert made.mine.version == reference.mine.version == 3


def test_every_scheme_whose_workers_learn_is_tested_here() -> None:
    assert sorted(name for name, scheme in SCHEMES.items() if scheme.shares_vector) == SHARING
