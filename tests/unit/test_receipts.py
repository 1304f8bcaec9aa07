"""What a receiver counts: every message is delivered, a duplicate, stale or lost, also over its own death."""

from __future__ import annotations

import json
from pathlib import Path

from troupe.transports.receipts import Receipts
from troupe.transports.tries import TRIES, Tries
from troupe.types import Message


def took(receipts: Receipts, *sequences: int, incarnation: int = 0, redelivered: bool = False) -> list[int]:
    """Those of `sequences` that are delivered."""
    return [
        number for number in sequences
        if receipts.accept(Message("rollout", "run", "a", incarnation, number), 10, redelivered=redelivered)
    ]  # fmt: skip


def test_who_takes_over_from_a_checkpoint_knows_duplicates_and_counts_what_was_merged_after_it() -> None:
    first = Receipts()
    took(first, 1, 2, 4)
    saved = json.loads(json.dumps(first.state()))
    took(first, 5, 6)  # and then it is killed, with 6 in hand
    second = Receipts()
    second.restore(saved)
    assert second.state() == saved
    assert took(second, 4) == [] and second.duplicates == 1
    assert took(second, 6, redelivered=True) == [6] and second.lost == 2  # 3, and 5
    assert took(second, 3, redelivered=True) == [3] and second.lost == 1
    assert took(second, 1, incarnation=1) == [1] and took(second, 7) == [] and second.stale == 1
    assert second.messages == 6


def test_what_is_put_aside_was_not_delivered_and_leaves_no_gap() -> None:
    receipts = Receipts()
    took(receipts, 1, 2)
    receipts.poison(10, "why")
    took(receipts, 3)
    assert (receipts.messages, receipts.bytes, receipts.poisoned, receipts.lost) == (2, 20, 1, 0)
    assert receipts.last_damage == "why"


def test_only_what_ends_a_process_again_and_again_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "tries.json"
    lives = []
    for _ in range(TRIES):
        tries = Tries(path)
        assert tries.begin("harmless")
        tries.done("harmless")
        lives.append(tries.begin("deadly"))
    assert lives == [True] * (TRIES - 1) + [False]
    assert Tries(path).begin("deadly"), "it is forgotten once it is put aside"


def test_a_note_that_cannot_be_read_or_written_costs_only_the_count(tmp_path: Path) -> None:
    path = tmp_path / "tries.json"
    for text in ("", "[]", '{"a": "b"}', "{"):
        path.write_text(text)
        assert Tries(path).begin("a")
    assert all(Tries(tmp_path / "no" / "such" / "folder").begin("a") for _ in range(2 * TRIES))


def test_the_note_stays_small(tmp_path: Path) -> None:
    tries = Tries(tmp_path / "tries.json")
    for number in range(1000):
        assert tries.begin(str(number))
    assert len(json.loads((tmp_path / "tries.json").read_text())) == 64
