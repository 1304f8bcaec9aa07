"""T8: a writer that is killed at any byte of a record leaves nothing to be seen, and the next one goes on."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable

import pytest

from troupe.region import reserve
from troupe.transports.rings import Ring

CAPACITY = 512  # bytes; three records fill it, so that the kills also hit records that wrap around
TORN = [b"torn-" * 30, b"half." * 10]  # pieces of the record whose writer dies, 200 bytes
TORN_BYTES = sum(map(len, TORN))


def ring() -> Ring:
    size = Ring.HEADER_BYTES + CAPACITY
    fd = reserve("test-ring", size)
    memory = memoryview(mmap.mmap(fd, size))
    os.close(fd)
    return Ring(memory)


def read(source: Ring) -> bytes | None:
    value = source.read()
    return None if value is None else bytes(value)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(Ring):
    """Dies once it has copied `mortal_bytes` more bytes; before the commit, or after it."""

    mortal_bytes = 1 << 30
    dies_before_commit = False
    dies_after_commit = False

    def _put(self, position: int, piece: bytes | memoryview, crc: int) -> int:
        if len(piece) >= self.mortal_bytes:
            super()._put(position, piece[: self.mortal_bytes], crc)
            die()
        self.mortal_bytes -= len(piece)
        return super()._put(position, piece, crc)

    def _commit(self, head: int) -> None:
        if self.dies_before_commit:
            die()
        super()._commit(head)
        if self.dies_after_commit:
            die()


def killed_while_writing(pipe: Ring, prepare: Callable[[Mortal], None]) -> None:
    """A process writes one record into `pipe` and is killed on the way."""
    pid = os.fork()
    if pid == 0:  # never returns into pytest
        try:
            mortal = Mortal.__new__(Mortal)
            mortal.__dict__.update(pipe.__dict__)
            prepare(mortal)
            mortal.write(TORN, TORN_BYTES)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the test's writer is to be killed on its way"


def dying_after(copied: int) -> Callable[[Mortal], None]:
    return lambda mortal: setattr(mortal, "mortal_bytes", copied)


def dying(**when: bool) -> Callable[[Mortal], None]:
    return lambda mortal: mortal.__dict__.update(when)


def test_a_writer_killed_at_any_byte_delivers_nothing_torn_and_its_successor_goes_on() -> None:
    pipe = ring()
    payload_and_record = TORN_BYTES + 24
    delivered = 0
    for copied in range(payload_and_record + 1):
        before = [b"before %d" % copied, b"x" * (copied % 7)]
        assert pipe.write(before, sum(map(len, before)))
        killed_while_writing(pipe, dying_after(copied))
        after = b"after %d" % copied
        assert pipe.write([after], len(after)), "the room of the torn record is free at once"
        assert read(pipe) == b"".join(before)
        assert read(pipe) == after
        assert read(pipe) is None
        delivered += 2
    assert delivered == 2 * (TORN_BYTES + 25)
    assert pipe.corrupted == 0


@pytest.mark.parametrize("waiting", [False, True])
def test_the_commit_word_alone_decides(waiting: bool) -> None:
    pipe = ring()
    expected = []
    if waiting:
        pipe.write([b"first"], 5)
        expected.append(b"first")
    killed_while_writing(pipe, dying(dies_before_commit=True))
    killed_while_writing(pipe, dying(dies_after_commit=True))
    expected.append(b"".join(TORN))
    pipe.write([b"last"], 4)
    expected.append(b"last")
    got = []
    while (record := read(pipe)) is not None:
        got.append(record)
    assert got == expected
    assert pipe.corrupted == 0


def test_a_reader_killed_before_it_gave_the_room_back_loses_nothing() -> None:
    pipe = ring()
    pipe.write([b"one"], 3)
    pipe.write([b"two"], 3)
    pid = os.fork()
    if pid == 0:
        try:
            pipe._get(pipe._words[8], 24 + 3)  # the copy is made, the tail is not moved
            die()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert read(pipe) == b"one"
    assert read(pipe) == b"two"
