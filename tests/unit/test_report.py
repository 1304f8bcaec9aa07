"""Reports: what a worker did arrives whole, once, and damaged ones are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from troupe.books import Books
from troupe.errors import BadMessage
from troupe.goal import Goal
from troupe.roles import report as reports
from troupe.roles.report import Report, Reporter, listen
from troupe.transports.memory import MemoryHub
from troupe.types import Message, Rollout, Scalar


class Seat:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.steps = self.told = 0

    def played(self, steps: int) -> None:
        self.steps += steps

    def reported(self) -> None:
        self.told = self.steps


class Pages:
    """A journal that is only remembered."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, kind: str, **fields: Any) -> None:
        self.lines.append({"kind": kind, **fields})


def rollout(valid: int, *returns: float) -> Rollout:
    grid = np.zeros((6, 1), np.float32)
    return Rollout(
        np.zeros((7, 1, 2), np.float32), grid.astype(np.int64), grid, grid, grid > 0, grid > 0,
        np.arange(6)[:, None] < valid, np.zeros((0, 2), np.int64), np.zeros((0, 2), np.float32), 0,
        np.array(returns, np.float32), np.arange(len(returns)) + 1,
    )  # fmt: skip


def message(**changes: Any) -> Message:
    packed = Report(rollouts=1, steps=5, gradients=1, applied=1).pack(
        run="this", sender="worker-0", incarnation=0, sequence=1
    )
    meta, arrays = {**packed.meta, **changes.pop("meta", {})}, {**packed.arrays, **changes.pop("arrays", {})}
    return replace(packed, meta=meta, arrays=arrays, **changes)


def test_what_was_packed_is_what_is_unpacked() -> None:
    whole = Report(
        2, 9, 4, 3, 1, [np.array([1.0, 2.0], np.float32)], [np.array([4, 5])], [0.5, 1.5], {"play": 2.0, "send": 0.5},
        {"loss": 0.25},
    )  # fmt: skip
    back = Report.unpack(whole.pack(run="r", sender="w", incarnation=0, sequence=1))
    assert (back.rollouts, back.steps, back.gradients, back.applied, back.refused) == (2, 9, 4, 3, 1)
    assert np.array_equal(back.returns[0], whole.returns[0]) and np.array_equal(back.lengths[0], whole.lengths[0])
    assert (back.lags, dict(back.seconds), back.metrics) == ([0.5, 1.5], {"play": 2.0, "send": 0.5}, {"loss": 0.25})


def test_everything_is_reported_once_and_nothing_before_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "EVERY_S", 3600.0)
    hub, seat = MemoryHub(), Seat()
    head, pages = hub.mailbox("learner"), Pages()
    books = Books(pages, Goal(steps=100), 100)
    refreshed: list[int] = []
    loop = listen(head, books, run="this", refresh=lambda: refreshed.append(1))
    own = Reporter(
        hub.mailbox("worker-0"), seat, lambda: 0.5, run="this", name="worker-0", incarnation=0, timeout_s=1.0
    )
    for returns in ((), (3.0, 4.0)):
        own.played(rollout(5, *returns))
        own.learned({"gradients": 4.0, "applied": 0.75, "refused": 0.25, "lag": 2.0})
    next(loop)
    assert books.steps == 0 and (seat.steps, seat.told) == (10, 0)
    monkeypatch.setattr(reports, "EVERY_S", 0.0)
    own.played(rollout(2))
    own.learned({"gradients": 1.0, "applied": 1.0})
    assert seat.told == 12, "all that was played is on its way"
    next(loop)
    assert (books.steps, books.episodes, books.gradients_refused) == (12, 2, 2)
    assert books.ledger == {"messages": 3, "trained": 3, "rejected": 0}
    own.settle()
    next(loop)
    assert books.ledger["messages"] == 3, "there was nothing left to report"
    own.played(rollout(1))
    own.settle()
    next(loop)
    assert books.steps == 13 and seat.told == 13
    assert len(refreshed) == 4


BAD: dict[str, tuple[Message, str]] = {
    "another run": (message(run="that"), "works for run 'that', this is 'this'"),
    "a count is missing": (replace(message(), meta={}), "without a sound 'rollouts'"),
    "a count in words": (message(meta={"steps": "many"}), "without a sound"),
    "lengths do not agree": (message(arrays={"lengths": np.zeros(3, np.int64)}), "do not agree"),
    "a return that is none": (
        message(arrays={"returns": np.array([np.nan], np.float32), "lengths": np.ones(1, np.int64)}), "do not agree",
    ),
    "a refusal of nobody": (message(kind="refused"), "does not say of whom"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_damaged_report_is_refused_by_name_and_counts_for_nothing(name: str) -> None:
    hub, pages = MemoryHub(), Pages()
    books = Books(pages, Goal(steps=100), 100)
    loop = listen(hub.mailbox("learner"), books, run="this", refresh=lambda: None)
    bad, why = BAD[name]
    hub.mailbox("worker-0").send("learner", bad, 1.0)
    next(loop)
    (line,) = pages.lines
    assert line["kind"] == "rejected" and line["worker"] == "worker-0" and why in line["why"]
    assert (books.steps, books.ledger) == (0, {"messages": 1, "trained": 0, "rejected": 1})


def test_a_refusal_names_the_worker_not_who_sent_it() -> None:
    meta: dict[str, Scalar] = {"who": "worker-1", "why": "too long", "count": 3}
    assert reports.refusal(Message("refused", "this", "server-0", meta=meta)) == ("worker-1", "too long", 3)
    with pytest.raises(BadMessage, match="server-0: a refusal that does not say"):
        reports.refusal(Message("refused", "this", "server-0", meta={**meta, "count": "three"}))
