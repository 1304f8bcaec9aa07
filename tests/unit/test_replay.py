"""The replay memory: a ring that is exact, shares that many write at once, samples that are uniform and never torn."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from troupe import replay as module
from troupe.errors import ConfigError, TroupeError
from troupe.replay import Replay, ReplayShape
from troupe.transitions import Transitions
from troupe.types import State

SHAPE = ReplayShape(10, 1, (2,), "float32")
SHARED = ReplayShape(10, 3, (2,), "float32")


def numbered(first: int, count: int) -> Transitions:
    """Transitions that say which they are, in every field."""
    n = np.arange(first, first + count)
    pairs = np.stack([n, -n], 1).astype(np.float32)
    return Transitions(pairs, n, n.astype(np.float32), pairs + 0.5, n.astype(np.float32) / 1024)


def numbers(taken: Transitions) -> list[int]:
    """Which they are; the fields agree."""
    n = taken.actions
    expected = [numbered(int(i), 1).next_observations[0] for i in n]
    np.testing.assert_array_equal(taken.next_observations, np.stack(expected))
    np.testing.assert_array_equal(taken.observations[:, 1], -n)
    np.testing.assert_array_equal(taken.returns, n)
    np.testing.assert_array_equal(taken.discounts * 1024, n)
    return [int(i) for i in n]


def held(replay: Replay, draws: int = 400) -> set[int]:
    rng = np.random.default_rng(0)
    return set(numbers(replay.sample(1, draws, rng, with_replacement=True)))


@pytest.mark.parametrize("added", [1, 3, 4, 7, 10, 13, 25])
def test_a_ring_holds_the_newest_whatever_the_size_of_what_is_added(added: int) -> None:
    replay, total = Replay(SHAPE), 0
    for _ in range(9):
        replay.add(numbered(total, added))
        total += added
        assert len(replay) == min(total, 10)
        assert held(replay) == set(range(max(0, total - 10), total))


def test_a_sample_is_uniform_over_all_shares() -> None:
    memory = np.zeros(SHARED.nbytes(), np.uint8)
    workers = [Replay(SHARED, memory, share=i) for i in range(3)]
    for i, (worker, count) in enumerate(zip(workers, (4, 25, 0), strict=True)):
        worker.add(numbered(1000 * i, count))
    assert {len(worker) for worker in workers} == {14}
    expected = {*range(4), *range(1015, 1025)}
    for worker in workers:
        counts = Counter(numbers(worker.sample(140, 10, np.random.default_rng(3), with_replacement=True)))
        assert set(counts) == expected
        chi_square = sum((n - 100) ** 2 / 100 for n in counts.values())
        assert chi_square < 34.5  # 0.1 % point at 13 degrees of freedom


def test_without_replacement_a_batch_has_nothing_twice_and_with_it_it_has() -> None:
    replay, rng = Replay(SHAPE), np.random.default_rng(0)
    replay.add(numbered(0, 10))
    without = np.array(numbers(replay.sample(500, 10, rng, with_replacement=False))).reshape(500, 10)
    assert (np.sort(without, 1) == np.arange(10)).all()
    some = np.array(numbers(replay.sample(2000, 3, rng, with_replacement=False))).reshape(2000, 3)
    assert all(len(set(row)) == 3 for row in some.tolist())
    chi_square = float(((np.bincount(some.ravel(), minlength=10) - 600) ** 2 / 600).sum())
    assert chi_square < 27.9  # 0.1 % point at 9 degrees of freedom
    with_it = np.array(numbers(replay.sample(500, 10, rng, with_replacement=True))).reshape(500, 10)
    assert any(len(set(row)) < 10 for row in with_it.tolist())


def test_the_same_stream_draws_the_same() -> None:
    replay = Replay(SHAPE)
    replay.add(numbered(0, 10))
    for way in (True, False):
        first, again = (numbers(replay.sample(4, 5, np.random.default_rng(5), with_replacement=way)) for _ in range(2))
        assert first == again


@pytest.mark.parametrize("written", [0, 6, 10, 24])
def test_a_state_has_only_what_was_written_and_goes_on_exactly(written: int) -> None:
    whole = Replay(SHAPE)
    whole.add(numbered(0, written))
    state = whole.state()
    assert {len(array) for array in state.arrays.values()} == {min(written, 10)}
    other = Replay(SHAPE)
    other.add(numbered(500, 17))
    other.restore(State({name: array.copy() for name, array in state.arrays.items()}, dict(state.values)))
    for replay in (whole, other):
        replay.add(numbered(written, 7))
    draws = [numbers(r.sample(5, 6, np.random.default_rng(1), with_replacement=True)) for r in (whole, other)]
    assert draws[0] == draws[1]


def test_a_state_goes_into_a_memory_of_another_size() -> None:
    replay = Replay(SHAPE)
    replay.add(numbered(0, 24))
    smaller, larger = (Replay(ReplayShape(size, 1, (2,), "float32")) for size in (4, 50))
    for other in (smaller, larger):
        other.restore(replay.state())
    assert (held(smaller), held(larger)) == (set(range(20, 24)), set(range(14, 24)))


def test_the_bytes_are_enough_and_no_share_writes_into_another() -> None:
    memory = np.zeros(SHARED.nbytes(), np.uint8)
    for i in range(3):
        Replay(SHARED, memory, share=i).add(numbered(100 * i, 10))
    assert held(Replay(SHARED, memory, share=1)) == {*range(10), *range(100, 110), *range(200, 210)}
    images = ReplayShape(3, 2, (5, 7), "uint8")
    assert images.nbytes() >= 2 * 3 * (2 * 35 + 8 + 4 + 4)
    with pytest.raises(TroupeError, match=f"{SHARED.nbytes()} bytes was agreed, 64 were handed over"):
        Replay(SHARED, np.zeros(64, np.uint8))


def test_more_than_there_is_is_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 100 << 20)
    with pytest.raises(ConfigError, match=r"--replay-size 10000000 takes 915 MiB .* 100 MiB are free") as caught:
        Replay(ReplayShape(10_000_000, 2, (4,), "float32"))
    fits = int(str(caught.value).split("take --replay-size ")[1].split()[0])
    assert ReplayShape(fits, 2, (4,), "float32").nbytes() < 100 << 20


def test_rows_that_a_killed_writer_had_begun_are_out_of_reach_until_they_are_written() -> None:
    memory = np.zeros(SHAPE.nbytes(), np.uint8)
    first = Replay(SHAPE, memory)
    first.add(numbered(0, 10))
    first._begun[0] = 14  # four rows begun, and killed before they were committed
    again = Replay(SHAPE, memory)
    assert held(again) == set(range(4, 10)) and len(again) == 6
    again.add(numbered(10, 2))
    assert held(again) == set(range(4, 12))
    again.add(numbered(12, 3))
    assert held(again) == set(range(5, 15))


WRITER = """
import mmap, sys
import numpy as np
from troupe.replay import Replay, ReplayShape
from troupe.transitions import Transitions
fd, share = map(int, sys.argv[1:])
shape = ReplayShape(64, 2, (256,), "float32")
replay = Replay(shape, memoryview(mmap.mmap(fd, shape.nbytes())), share=share)
print(flush=True)
n = 0
while True:
    value = np.arange(n, n + 16)
    wide = np.repeat(value[:, None], 256, 1).astype(np.float32)
    number = value.astype(np.float32)
    replay.add(Transitions(wide, value, number, wide, number))
    n = (n + 16) % 4096
"""


def test_what_is_sampled_while_others_overwrite_it_is_never_torn() -> None:
    """Two processes that write without a pause into rings so small that a reader is overtaken again and again."""
    shape = ReplayShape(64, 2, (256,), "float32")
    fd = os.memfd_create("replay")
    os.ftruncate(fd, shape.nbytes())
    replay = Replay(shape, memoryview(mmap.mmap(fd, shape.nbytes())))
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(fd), str(i)], pass_fds=[fd], stdout=subprocess.PIPE)
        for i in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        while len(replay) < 64:
            pass
        rng, different = np.random.default_rng(0), set()
        for _ in range(2000):
            taken = replay.sample(1, 8, rng, with_replacement=True)
            for wide in (taken.observations, taken.next_observations):
                assert (wide == taken.actions[:, None]).all()
            assert (taken.returns == taken.actions).all() and (taken.discounts == taken.actions).all()
            different |= set(taken.actions.tolist())
        assert len(different) > 500, "they did write meanwhile"
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        os.close(fd)
