"""The books: every step, episode and message is counted once, over all lives of a run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from troupe.books import PARTS, Books, Division
from troupe.goal import Goal
from troupe.roles.report import Report
from troupe.types import Message, Rollout, State


class Pages:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, **fields: Any) -> None:
        self.lines.append((kind, json.loads(json.dumps(fields))))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.lines if name == kind]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rollout(valid: int = 5, version: int = 0, returns: tuple[float, ...] = ()) -> Rollout:
    grid = np.zeros((6, 1), np.float32)
    flags = np.arange(6)[:, None] < valid
    return Rollout(
        np.zeros((7, 1, 2), np.float32), grid.astype(np.int64), grid, grid, grid > 0, grid > 0, flags,
        np.zeros((0, 2), np.int64), np.zeros((0, 2), np.float32), version,
        np.array(returns, np.float32), np.arange(len(returns)) + 1,
    )  # fmt: skip


def sent(sender: str = "actor-0", **meta: float) -> Message:
    return Message("rollout", "r", sender, sequence=1, meta=meta)


def books(goal: Goal | None = None, me: str = "learner") -> tuple[Books, Pages]:
    pages = Pages()
    return Books(pages, goal or Goal(None, 1000, None), 500, me=me), pages


def test_only_steps_that_are_transitions_are_counted() -> None:
    b, _ = books(me="worker-0")
    b.played(rollout(valid=5))
    b.played(rollout(valid=3))
    assert (b.steps, dict(b.contributed)) == (8, {"worker-0": 8})
    assert b.ledger == {"messages": 0, "trained": 0, "rejected": 0}  # nothing was sent
    assert b.progress() == 0.008


def test_every_message_is_trained_on_or_rejected() -> None:
    b, pages = books()
    b.played(rollout(), sent("actor-0"))
    b.played(rollout(valid=2), sent("actor-1"))
    b.rejected(sent("actor-1"), "rewards is [1], not [6, 1]")
    assert b.ledger == {"messages": 3, "trained": 2, "rejected": 1}
    assert dict(b.contributed) == {"actor-0": 5, "actor-1": 2}
    assert b.steps == 7
    assert pages.of("rejected") == [{"worker": "actor-1", "sequence": 1, "why": "rewards is [1], not [6, 1]"}]


def test_every_episode_is_written_and_the_mean_is_of_the_last_hundred() -> None:
    b, pages = books()
    assert b.mean() is None
    b.played(rollout(returns=(1.0, 2.5)), sent("actor-1"))
    b.played(rollout())
    assert pages.of("episodes") == [{"steps": 5, "worker": "actor-1", "returns": [1.0, 2.5], "lengths": [1, 2]}]
    assert b.mean() == 1.75
    b.played(rollout(returns=tuple(float(i) for i in range(1000, 1100))))
    assert (b.episodes, b.mean()) == (102, 1049.5)


def test_lag_is_the_updates_between_acting_and_learning() -> None:
    b, _ = books()
    assert b.lag(0.5) is None
    for version in (0, 0, 6):
        b.played(rollout(version=version), sent())
        b.learned({"gradients": 4.0, "applied": 1.0, "loss": 0.5})
    assert b.version == 12
    assert (b.lag(0.0), b.lag(0.5), b.lag(1.0)) == (0.0, 2.0, 4.0)


def test_a_gradient_that_was_refused_is_no_update() -> None:
    b, _ = books()
    b.learned({"gradients": 4.0, "applied": 0.75})
    assert b.version == 3


def test_time_is_divided_among_what_it_went_into() -> None:
    assert Division().shares() == dict.fromkeys(PARTS, 0.0)
    b, _ = books()
    b.spent("learn", 3.0)
    b.spent("wait", 1.0)
    b.played(rollout(), sent("actor-0", play_s=2.0, wait_s=6.0, env_s=99.0))
    nothing = dict.fromkeys(PARTS, 0.0)
    assert b.divisions["learner"].shares() == {**nothing, "wait": 0.25, "learn": 0.75}
    assert b.divisions["actor-0"].shares() == {**nothing, "play": 0.25, "wait": 0.75}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("wait", "environments"),
        ("play", "environments"),
        ("learn", "learning"),
        ("send", "sending"),
        ("exchange", "each other"),
    ],
)
def test_what_limits_the_speed_is_what_most_time_goes_into(clock: Clock, what: str, words: str) -> None:
    b, pages = books()
    assert b.waiting_on() == ""
    for part in PARTS:
        b.spent(part, 5.0 if part == what else 1.0)
    b.tick()
    assert pages.of("progress")[0]["waiting_on"] == words


def test_a_progress_line_a_second_with_the_speed_of_the_last_seconds(clock: Clock) -> None:
    b, pages = books()
    clock.now = 150.0
    b.begin()  # time before the curtain rose is no training time
    for _ in range(40):
        clock.now += 0.25
        b.played(rollout(valid=5), sent())
        b.tick()
    lines = pages.of("progress")
    assert 9 <= len(lines) <= 10
    assert b.seconds() == 10.0
    assert [line["steps_per_s"] for line in lines] == [20.0] * len(lines)
    assert lines[-1]["ledger"]["trained"] == lines[-1]["steps"] / 5
    assert lines[-1]["workers"]["actor-0"]["steps"] == lines[-1]["steps"]
    assert lines[-1]["progress"] == lines[-1]["steps"] / 1000


def test_a_worker_that_learns_is_counted_as_it_reports() -> None:
    b, pages = books()
    report = Report(
        rollouts=2, steps=10, gradients=4, applied=3, refused=1, returns=[np.array([1.5, 2.5], np.float32)],
        lengths=[np.array([3, 4])], lags=[0.0, 2.0], seconds={"play": 3.0, "exchange": 1.0}, metrics={"loss": 0.5},
    )  # fmt: skip
    b.version = 7  # the commons say it, for several reports may speak of the same update
    b.reported("worker-1", report)
    b.reported("worker-0", Report(rollouts=1, steps=5))
    assert (b.steps, b.version, b.losses) == (15, 7, {"loss": 0.5})
    assert dict(b.contributed) == {"worker-1": 10, "worker-0": 5}
    assert b.ledger == {"messages": 3, "trained": 3, "rejected": 0}
    assert (b.lag(0.0), b.lag(1.0), b.mean()) == (0.0, 2.0, 2.0)
    assert b.divisions["worker-1"].shares()["exchange"] == 0.25
    assert pages.of("episodes") == [{"steps": 10, "worker": "worker-1", "returns": [1.5, 2.5], "lengths": [3, 4]}]
    (line,) = pages.of("refused")
    assert (line["by"], line["worker"], line["count"]) == ("worker-1", "worker-1", 1)
    assert b.gradients_refused == 1


def test_counting_goes_on_over_a_resume(clock: Clock) -> None:
    b, _ = books()
    b.begin()
    b.played(rollout(returns=(7.0,)), sent("actor-0"))
    b.rejected(sent(), "why")
    b.learned({"gradients": 2.0})
    b.refused("server-0", "worker-1", "why", 4)
    clock.now += 30.0
    stored = State()
    stored.put("books", b.state())
    values = json.loads(json.dumps(stored.values))  # as a checkpoint keeps it
    clock.now += 1000.0

    other, _ = books()
    other.restore(State({}, values).get("books"), version=2)
    other.begin()
    clock.now += 5.0
    assert other.seconds() == 35.0
    assert (other.steps, other.episodes, other.mean(), other.version, other.life) == (5, 1, 7.0, 2, 1)
    other.played(rollout(version=2), sent("actor-0"))
    assert (other.steps, dict(other.contributed), other.lag(0.5)) == (10, {"actor-0": 10}, 0.0)
    assert other.ledger == {"messages": 3, "trained": 2, "rejected": 1}
    assert other.gradients_refused == 4
    again, _ = books()
    again.restore(other.state(), version=2)
    assert again.life == 2
