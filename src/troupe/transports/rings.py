"""Records in shared memory: a ring with one writer and one reader, and a slot that holds the latest value.

A word written last commits each record, and a CRC32 covers it. All positions are 64-bit counters that never go back.

Stores become visible in program order on x86; elsewhere a reader may see a commit word before its record, finds a
wrong CRC, and counts a corrupted record: less speed, never a wrong message.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Final

from troupe.errors import BadMessage

LINE: Final = 64  # bytes; words of different writers lie on different cache lines
_WORD: Final = 8
_MASK: Final = 2**64 - 1  # positions wrap like the words they lie in
_RECORD: Final = struct.Struct("<QIIQ")  # bytes of the payload, CRC32, reserved, position
_HEADER_ROOM: Final = 1024  # bytes a slot has beyond max_bytes: the numbers in a header take more room as they grow
_OVERTAKEN: Final = 100  # times a reader of a slot starts again before it leaves the value for its next call

Pieces = Iterable[bytes | memoryview]


class Ring:
    """A byte ring with one writer and one reader, each of which may be killed at any time and replaced by another.

    Memory: the head (bytes committed so far) on the first cache line, the tail (bytes read so far) on the second,
    then the data, of which `capacity` must be a power of two.
    """

    HEADER_BYTES: Final = 2 * LINE

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[: self.HEADER_BYTES].cast("Q")
        self._data = memory[self.HEADER_BYTES :]
        self.capacity = len(self._data)
        self.corrupted = 0
        if self.capacity & (self.capacity - 1):
            raise ValueError(f"the capacity of a ring is a power of two, not {self.capacity}")

    def write(self, pieces: Pieces, size: int) -> bool:
        """Append one record of `size` bytes; False where there is no room for it now, BadMessage where never."""
        need = _record_bytes(size)
        if need > self.capacity:
            raise BadMessage(f"a message of {size} bytes cannot pass a ring of {self.capacity} bytes")
        head = self._words[0]
        if need > self.capacity - ((head - self._words[LINE // _WORD]) & _MASK):
            return False
        at, crc = head + _RECORD.size, _seed(size, head)
        for piece in pieces:
            crc = self._put(at, piece, crc)
            at += len(piece)
        self._put(head, _RECORD.pack(size, crc, 0, head), 0)
        self._commit((head + need) & _MASK)
        return True

    def read(self) -> bytearray | None:
        """The next record, or None. A damaged one is counted and skipped; where its length is damaged, all are."""
        while (tail := self._words[LINE // _WORD]) != (head := self._words[0]):
            available = (head - tail) & _MASK
            size, crc, _, position = _RECORD.unpack(self._get(tail, _RECORD.size))
            need = _record_bytes(size)
            sound = position == tail and need <= available <= self.capacity
            payload = self._get(tail + _RECORD.size, size) if sound else None
            # Only now may the writer use the room again; killed before this line, the reader's successor reads again.
            self._words[LINE // _WORD] = (tail + need) & _MASK if sound else head
            if payload is not None and zlib.crc32(payload, _seed(size, tail)) == crc:
                return payload
            self.corrupted += 1
        return None

    def waiting_bytes(self) -> int:
        """Committed and not read yet."""
        return (self._words[0] - self._words[LINE // _WORD]) & _MASK

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._data.release()

    def _put(self, position: int, piece: bytes | memoryview, crc: int) -> int:
        """Copy `piece`; the CRC is of the copy, for others may be writing into what a piece is a view of."""
        start = position & (self.capacity - 1)
        first = min(len(piece), self.capacity - start)
        self._data[start : start + first] = piece[:first]
        crc = zlib.crc32(self._data[start : start + first], crc)
        if rest := len(piece) - first:
            self._data[:rest] = piece[first:]
            crc = zlib.crc32(self._data[:rest], crc)
        return crc

    def _get(self, position: int, size: int) -> bytearray:
        start = position & (self.capacity - 1)
        piece = bytearray(self._data[start : start + size])
        if rest := size - len(piece):
            piece += self._data[:rest]
        return piece

    def _commit(self, head: int) -> None:
        self._words[0] = head  # one aligned 8-byte store: the record is there, or it never was


class Slot:
    """The latest value: one writer that never waits, any number of readers.

    Memory: the count of values published, then two buffers used in turn, so that a reader has the time of a whole
    publication to copy the newest one. Each starts with its count, its bytes and its CRC32.
    """

    def __init__(self, memory: memoryview) -> None:
        self._count = memory[:_WORD].cast("Q")
        half = (len(memory) - LINE) // 2
        self._halves = [memory[LINE : LINE + half], memory[LINE + half : LINE + 2 * half]]
        self.capacity = half - LINE
        self.seen = 0  # the count this reader returned last

    @staticmethod
    def bytes_for(max_bytes: int) -> int:
        """Bytes of memory that a slot for values of `max_bytes` takes."""
        return LINE + 2 * (LINE + _rounded(max_bytes + _HEADER_ROOM, LINE))

    def write(self, pieces: Pieces, size: int) -> None:
        """Replace the value."""
        if size > self.capacity:
            raise BadMessage(f"{size} bytes do not fit a topic of {self.capacity}: declare it with more max_bytes")
        count = self._count[0] + 1
        half = self._halves[count & 1]
        at, crc = LINE, _seed(size, count)
        for piece in pieces:
            end = at + len(piece)
            half[at:end] = piece
            crc = zlib.crc32(half[at:end], crc)  # of the copy, as in Ring
            at = end
        _RECORD.pack_into(half, 0, size, crc, 0, count)
        self._count[0] = count

    def read(self) -> bytearray | None:
        """The newest value, if it is newer than the one returned last; else None."""
        for _ in range(_OVERTAKEN):
            if (count := self._count[0]) == self.seen:
                return None
            half = self._halves[count & 1]
            size, crc, _, stamp = _RECORD.unpack_from(half)
            if stamp == count and size <= self.capacity:
                value = bytearray(half[LINE : LINE + size])
                if zlib.crc32(value, _seed(size, count)) == crc:
                    self.seen = count
                    return value
            if self._count[0] == count:  # nobody overtook us: it is damaged, and stays so until the next one
                return None
        return None

    def release(self) -> None:
        """Let go of the memory."""
        self._count.release()
        for half in self._halves:
            half.release()


def _seed(size: int, position: int) -> int:
    return zlib.crc32(struct.pack("<QQ", size, position))


def _record_bytes(size: int) -> int:
    return _rounded(_RECORD.size + size, _WORD)


def _rounded(size: int, step: int) -> int:
    return size + -size % step


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`, and not below a cache line."""
    return 1 << max(size - 1, LINE - 1).bit_length()
