"""The learner's side of machines that join: each is told what to play and where, and everything it says is written."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from troupe.goal import Goal
from troupe.guests import MOST, Guests
from troupe.task import Task, read
from troupe.types import Message

TASK = Task(
    run="run", config={"env": "E"}, goal=Goal(1.0), life=0, version="1", fingerprint="f", observation="o", action="a",
    link={}, rank=0,
)  # fmt: skip


class Reception:
    """Questions to ask, and the answers that were given."""

    def __init__(self) -> None:
        self.asked: deque[Message] = deque()
        self.answered: list[Message] = []

    def requests(self, timeout_s: float) -> Message | None:
        return self.asked.popleft() if self.asked else None

    def answer(self, request: Message, reply: Message) -> None:
        self.answered.append(reply)


class House:
    """Guests with everything they write and say."""

    def __init__(self) -> None:
        self.reception, self.lines, self.said = Reception(), list[dict[str, Any]](), list[str]()
        self.guests = Guests(self.reception, TASK, 2, self.write, self.said.append)

    def write(self, kind: str, **fields: Any) -> None:
        self.lines.append({"kind": kind, **fields})

    def asks(self, kind: str, sender: str = "desk-1", **meta: Any) -> dict[str, Any] | None:
        """The answer's meta, or None where there is none."""
        before = len(self.reception.answered)
        self.reception.asked.append(Message(kind, "run", sender, meta=meta))
        self.guests.attend()
        new = self.reception.answered[before:]
        return dict(new[0].meta) if new else None


def test_who_asks_is_told_the_task() -> None:
    answer = House().asks("ask")
    assert answer is not None and read(str(answer["task"])) == TASK


def test_no_two_workers_have_the_same_place() -> None:
    house = House()
    first, second = house.asks("join", "a", workers=3), house.asks("join", "b", workers=1)
    assert first is not None and second is not None
    assert (first["rank"], second["rank"]) == (2, 5)  # two workers play beside the learner
    assert [line["what"] for line in house.lines] == ["joined", "joined"]
    assert house.said == ["a joined with 3 workers", "b joined with 1 worker"]


def test_a_number_of_workers_that_is_none_gets_no_place() -> None:
    house = House()
    for workers in (0, -1, 10**9, "2", 1.5, None):
        meta: dict[str, Any] = {} if workers is None else {"workers": workers}
        answer = house.asks("join", **meta)
        assert answer is not None and "rank" not in answer and "no number of workers" in str(answer["refused"])
    assert not house.lines


def test_what_a_machine_says_of_itself_is_written_as_it_goes_and_at_its_end() -> None:
    house = House()
    house.asks("join", "a", workers=2)
    house.asks("protocol", "a", workers=2, steps=100, seconds=5.0, lost=0, last=False)
    assert house.guests.playing["a"]["steps"] == 100
    answer = house.asks("protocol", "a", workers=2, steps=250, seconds=9.0, lost=1, cause="killed", last=True)
    assert answer is not None and answer["heard"] is True
    assert [(line["what"], line.get("steps")) for line in house.lines] == [
        ("joined", None), ("protocol", 100), ("left", 250),
    ]  # fmt: skip
    assert house.lines[-1]["cause"] == "killed" and not house.guests.playing


def test_figures_that_are_none_are_nought_and_long_words_are_cut() -> None:
    house = House()
    wrong: dict[str, Any] = {"steps": "many", "seconds": float("nan"), "workers": -1, "lost": 2**60}
    house.asks("protocol", "a", **wrong, cause="x" * 10_000, last=False)
    line = house.lines[-1]
    assert [line[name] for name in ("steps", "seconds", "workers", "lost")] == [0, 0, 0, 0]
    assert len(line["cause"]) == 500


def test_more_machines_than_there_can_be_are_refused() -> None:
    house = House()
    for number in range(MOST):
        house.asks("protocol", f"machine-{number}", last=False)
    answer = house.asks("join", "one more", workers=1)
    assert answer is not None and "1000 machines play already" in str(answer["refused"])
    house.asks("protocol", "another", last=False)
    assert len(house.guests.playing) == MOST


def test_who_cannot_play_says_why_and_who_asks_nonsense_is_told_so() -> None:
    house = House()
    assert (house.asks("refuse", "a", why="no Box2D") or {}).get("heard") is True
    assert house.lines[-1] == {"kind": "machine", "what": "refused", "machine": "a", "why": "no Box2D"}
    answer = house.asks("open the door")
    assert answer is not None and "'open the door' is nothing that is asked here" in str(answer["refused"])
    assert msgspec.json.encode(answer)
