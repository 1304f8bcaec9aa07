"""The actor: nothing is sent that is not worth it, and whoever sent nothing waits for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from troupe.roles.actor import actor
from troupe.roles.cargo import EpisodesShape, pack_weights
from troupe.transports.memory import MemoryHub
from troupe.types import Array, Episodes, Message

SHAPE = EpisodesShape(10, (2,), "float32", ())


class Choosy:
    """Finds every third rollout worth sending."""

    def __init__(self) -> None:
        self.parameters = SimpleNamespace(load_weights=lambda weights, version: None, vector=np.zeros(1))
        self.annealed: list[float] = []
        self.anneal = self.annealed.append
        self.played, self.holds = 0, ""

    def sift(self, rollout: Any, *, hold: bool) -> Episodes | None:
        self.played += 1
        self.holds += "h" if hold else "."
        if self.played % 3:
            return None
        one: Array = np.ones(1, np.int64)
        score, none = np.zeros(1, np.float32), np.zeros(0, np.float32)
        return Episodes(np.zeros((1, 2), np.float32), one, score, one, score, 0, 12, none, np.zeros(0, np.int64))


class Player:
    """Takes a second of the environments' time for each rollout."""

    def __init__(self) -> None:
        self.env_s, self.waits = 0.0, 0

    def play(self, algorithm: Any, steps: int) -> None:
        self.env_s += 1.0

    def beat(self, steps: int) -> None:
        self.waits += 1


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


def begun(hub: MemoryHub, lag: int) -> tuple[Iterator[None], Choosy, Player]:
    algorithm, player = Choosy(), Player()
    loop = actor(
        algorithm, player, hub.mailbox("actor-0"), run="r", name="actor-0", incarnation=0, steps=4,  # type: ignore[arg-type]
        lag_rollouts=lag, send_timeout_s=1.0,
    )  # fmt: skip
    return loop, algorithm, player


def publish(hub: MemoryHub, learned: int, **more: Any) -> None:
    meta = {"actor-0.0": learned, "progress": 0.0, **more}
    weights = pack_weights(np.zeros(1, np.float32), "r", "learner", learned, meta)
    hub.mailbox("learner").publish("weights", weights)


def received(hub: MemoryHub) -> list[Message]:
    return list(iter(lambda: hub.mailbox("learner").receive(0.0), None))


def test_only_what_is_worth_it_is_sent_with_the_time_of_all_before_it(hub: MemoryHub) -> None:
    loop, algorithm, _ = begun(hub, lag=100)
    publish(hub, 0)
    for _ in range(8):
        next(loop)
    sent = received(hub)
    assert algorithm.played == 8 and [message.sequence for message in sent] == [1, 2]
    for message in sent:
        assert message.meta["env_s"] == 3.0, "of three rollouts"
        assert float(message.meta["play_s"]) >= 0.0 and SHAPE.unpack(message).steps == 12


def test_an_actor_waits_for_what_it_sent_and_not_for_what_it_only_played(hub: MemoryHub) -> None:
    loop, algorithm, player = begun(hub, lag=0)
    next(loop)
    assert algorithm.played == 0 and player.waits == 1, "no weights yet"
    publish(hub, 0)
    for _ in range(3):
        next(loop)
    assert algorithm.played == 3 and len(received(hub)) == 1
    next(loop)
    next(loop)
    assert algorithm.played == 3, "the one that was sent is not learned from yet"
    publish(hub, 1)
    for _ in range(3):
        next(loop)
    assert algorithm.played == 6


def test_it_may_hold_what_is_worth_it_until_it_has_sifted_as_many_rollouts_as_are_asked_for(hub: MemoryHub) -> None:
    loop, algorithm, _ = begun(hub, lag=100)
    publish(hub, 0, rollouts=2)
    for _ in range(7):
        next(loop)
    assert algorithm.holds == "h..h..h", "what is sent after the third begins the count again"
