"""Mailboxes between the processes of one machine: byte rings and latest-value slots in nameless shared memory.

Each child has a link to the hub: a ring up and a ring down, each with one writer and one reader, so there is no lock
for a killed process to die holding. What the hub publishes lies in slots that every child reads. A word written last
commits each record, and a CRC32 covers it. All positions are 64-bit counters that never go back.

Stores become visible in program order on x86; elsewhere a reader may see a commit word before its record, finds a
wrong CRC, and counts a corrupted record: less speed, never a wrong message.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypedDict

from troupe.errors import BadMessage, PeerLost
from troupe.region import Bell, reserve
from troupe.transports.codec import decode, encode
from troupe.transports.receipts import Receipts
from troupe.types import Message

_LINE: Final = 64  # bytes; words of different writers lie on different cache lines
_WORD: Final = 8
_MASK: Final = 2**64 - 1  # positions wrap like the words they lie in
_RECORD: Final = struct.Struct("<QIIQ")  # bytes of the payload, CRC32, reserved, position
_HEADER_ROOM: Final = 1024  # bytes a slot has beyond max_bytes: the numbers in a header take more room as they grow
_SLICE_S: Final = 0.1  # longest sleep: a peer killed between its commit and its ring is noticed this late
_OVERTAKEN: Final = 100  # times a reader of a slot starts again before it leaves the value for its next call
_STOP_WORD: Final = 0  # of the board

Pieces = Iterable[bytes | memoryview]


class LinkSpec(TypedDict):
    """What a child must know besides its file descriptors; JSON."""

    name: str
    hub: str
    up_bytes: int
    down_bytes: int
    topics: dict[str, tuple[int, int]]  # topic -> offset on the board, bytes of the slot


class Ring:
    """A byte ring with one writer and one reader, each of which may be killed at any time and replaced by another.

    Memory: the head (bytes committed so far) on the first cache line, the tail (bytes read so far) on the second,
    then the data, of which `capacity` must be a power of two.
    """

    HEADER_BYTES: Final = 2 * _LINE

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
        if need > self.capacity - ((head - self._words[_LINE // _WORD]) & _MASK):
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
        while (tail := self._words[_LINE // _WORD]) != (head := self._words[0]):
            available = (head - tail) & _MASK
            size, crc, _, position = _RECORD.unpack(self._get(tail, _RECORD.size))
            need = _record_bytes(size)
            sound = position == tail and need <= available <= self.capacity
            payload = self._get(tail + _RECORD.size, size) if sound else None
            # Only now may the writer use the room again; killed before this line, the reader's successor reads again.
            self._words[_LINE // _WORD] = (tail + need) & _MASK if sound else head
            if payload is not None and zlib.crc32(payload, _seed(size, tail)) == crc:
                return payload
            self.corrupted += 1
        return None

    def waiting_bytes(self) -> int:
        """Committed and not read yet."""
        return (self._words[0] - self._words[_LINE // _WORD]) & _MASK

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
        half = (len(memory) - _LINE) // 2
        self._halves = [memory[_LINE : _LINE + half], memory[_LINE + half : _LINE + 2 * half]]
        self.capacity = half - _LINE
        self.seen = 0  # the count this reader returned last

    @staticmethod
    def bytes_for(max_bytes: int) -> int:
        """Bytes of memory that a slot for values of `max_bytes` takes."""
        return _LINE + 2 * (_LINE + _rounded(max_bytes + _HEADER_ROOM, _LINE))

    def write(self, pieces: Pieces, size: int) -> None:
        """Replace the value."""
        if size > self.capacity:
            raise BadMessage(f"{size} bytes do not fit a topic of {self.capacity}: declare it with more max_bytes")
        count = self._count[0] + 1
        half = self._halves[count & 1]
        at, crc = _LINE, _seed(size, count)
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
                value = bytearray(half[_LINE : _LINE + size])
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


class _Shared:
    """A mapped region, with the descriptor it came from."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)


class _Board:
    """What the hub tells everybody: the stop flag, and one slot per topic."""

    def __init__(self, fd: int, topics: Mapping[str, tuple[int, int]]) -> None:
        self.shared = _Shared(fd)
        self.stop = self.shared.view[:_LINE].cast("Q")
        self.slots = {name: Slot(self.shared.view[at : at + size]) for name, (at, size) in topics.items()}

    def latest(self, topic: str, receipts: Receipts) -> Message | None:
        try:
            slot = self.slots[topic]
        except KeyError:
            raise BadMessage(f"topic {topic!r} was not declared; there are {sorted(self.slots)}") from None
        value = slot.read()
        return None if value is None else _decoded(value, slot.capacity, receipts)

    def close(self) -> None:
        self.stop.release()
        for slot in self.slots.values():
            slot.release()
        self.shared.close()


class _Link:
    """The two rings between the hub and one child."""

    def __init__(self, fd: int, up_bytes: int, down_bytes: int) -> None:
        self.shared = _Shared(fd)
        middle = Ring.HEADER_BYTES + up_bytes
        self.up = Ring(self.shared.view[:middle])
        self.down = Ring(self.shared.view[middle : middle + Ring.HEADER_BYTES + down_bytes])

    def close(self) -> None:
        self.up.release()
        self.down.release()
        self.shared.close()


@dataclass(frozen=True, slots=True)
class Connection:
    """What a child process is handed to build its `SharedMailbox` from; the descriptors stay the hub's."""

    spec: LinkSpec
    fds: tuple[int, ...]


class SharedHub:
    """Made by the process that owns the run, before its children: the memory and the bells, and a mailbox of its own.

    `capacity_bytes` may wait on the way up from each child and `down_bytes` on the way down to it (both rounded up to
    a power of two); `topics` are what may be published, with the bytes of the largest message of each.
    """

    def __init__(
        self,
        capacity_bytes: int = 1 << 22,
        topics: Mapping[str, int] | None = None,
        *,
        down_bytes: int = 1 << 18,
        name: str = "learner",
    ) -> None:
        self.name = name
        self._up_bytes = _power_of_two(capacity_bytes)
        self._down_bytes = _power_of_two(down_bytes)
        self._topics: dict[str, tuple[int, int]] = {}
        at = _LINE
        for topic, max_bytes in (topics or {}).items():
            self._topics[topic] = (at, Slot.bytes_for(max_bytes))
            at += self._topics[topic][1]
        self._board = _Board(reserve("troupe-board", at), self._topics)
        self._bell = Bell()
        self._links: dict[str, tuple[_Link, Bell]] = {}
        self._mailbox = HubMailbox(name, self._board, self._bell, self._links)

    def mailbox(self) -> HubMailbox:
        """The one mailbox of this side; for one thread."""
        return self._mailbox

    def connect(self, name: str) -> Connection:
        """The link to the child `name`: a new one, or that of its former incarnation with all that still waits in it.

        The former incarnation must be dead: a ring has one writer.
        """
        if name not in self._links:
            size = 2 * Ring.HEADER_BYTES + self._up_bytes + self._down_bytes
            link = _Link(reserve(f"troupe-link-{name}", size), self._up_bytes, self._down_bytes)
            self._links[name] = (link, Bell())
        link, bell = self._links[name]
        spec = LinkSpec(
            name=name, hub=self.name, up_bytes=self._up_bytes, down_bytes=self._down_bytes, topics=self._topics
        )
        return Connection(spec, (link.shared.fd, self._board.shared.fd, self._bell.fd, bell.fd))

    def stop(self) -> None:
        """Raise the flag that every child sees, and wake those that wait."""
        self._board.stop[_STOP_WORD] = 1
        for _, bell in [*self._links.values()]:
            bell.ring()

    def close(self) -> None:
        """Unmap everything and close all descriptors."""
        self._mailbox.close()
        for link, bell in self._links.values():
            link.close()
            bell.close()
        self._links.clear()
        self._board.close()
        self._bell.close()


class HubMailbox:
    """The `ports.Mailbox` of the process that owns the hub."""

    def __init__(self, name: str, board: _Board, bell: Bell, links: dict[str, tuple[_Link, Bell]]) -> None:
        self.name = name
        self.receipts = Receipts()
        self._board, self._bell, self._links = board, bell, links
        self._turn = 0  # the link that is asked first: fair to all, however fast one of them writes
        self._closed = False

    def send(self, to: str, message: Message, timeout_s: float) -> None:
        """Blocks while the ring down to `to` is full; PeerLost after `timeout_s`."""
        if to not in self._links:
            raise PeerLost(f"{to}: no child of that name was ever connected")
        link, bell = self._links[to]
        pieces = encode(message)
        size = sum(map(len, pieces))
        deadline = time.monotonic() + timeout_s
        while not link.down.write(pieces, size):
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLost(f"{to}: its mailbox stayed full for {timeout_s} s")
            self._bell.wait(min(left, _SLICE_S))
        bell.ring()

    def receive(self, timeout_s: float) -> Message | None:
        """The next message of any child, in turn."""
        deadline = time.monotonic() + timeout_s
        while (message := self._next()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._bell.wait(min(left, _SLICE_S))
        return message

    def publish(self, topic: str, message: Message) -> None:
        """Replace what `topic` holds, and wake the children that wait for it."""
        slot = self._board.slots.get(topic)
        if slot is None:
            raise BadMessage(f"topic {topic!r} was not declared; there are {sorted(self._board.slots)}")
        pieces = encode(message)
        slot.write(pieces, sum(map(len, pieces)))
        for _, bell in self._links.values():
            bell.ring()

    def latest(self, topic: str) -> Message | None:
        """The newest message of `topic`, if this mailbox has not returned it yet."""
        return self._board.latest(topic, self.receipts)

    def waiting_bytes(self) -> int:
        """What the children sent and nobody received yet: how far the learner is behind."""
        return sum(link.up.waiting_bytes() for link, _ in self._links.values())

    def close(self) -> None:
        """The memory is the hub's: `SharedHub.close` releases it."""
        self._closed = True

    def _next(self) -> Message | None:
        links = list(self._links.values())
        for offset in range(len(links)):
            turn = (self._turn + offset) % len(links)
            link, bell = links[turn]
            message = _take(link.up, bell, self.receipts)
            if message is not None:
                self._turn = turn + 1
                return message
        return None


class SharedMailbox:
    """The `ports.Mailbox` of a child process; for one thread.

    `on_wait` is called at least every 0.1 s while a call here waits: hand it `Pulse.touch`, so that a child held up
    by a slow learner is not taken for a hung one. Waits end early when the hub says stop.
    """

    def __init__(self, spec: LinkSpec, fds: Iterable[int], on_wait: Callable[[], None] = lambda: None) -> None:
        link, board, hub_bell, own_bell = fds
        self.name, self.hub = spec["name"], spec["hub"]
        self.receipts = Receipts()
        self._on_wait = on_wait
        self._link = _Link(link, spec["up_bytes"], spec["down_bytes"])
        self._board = _Board(board, spec["topics"])
        self._hub_bell, self._bell = Bell(hub_bell), Bell(own_bell)
        self._closed = False

    @property
    def stopping(self) -> bool:
        """The hub asked everybody to stop."""
        return bool(self._board.stop[_STOP_WORD])

    def send(self, to: str, message: Message, timeout_s: float) -> None:
        """Blocks while the ring up to the hub is full; PeerLost after `timeout_s`, or when the run stops meanwhile."""
        if to != self.hub:
            raise PeerLost(f"{to}: {self.name} has a link to {self.hub!r} only")
        pieces = encode(message)
        size = sum(map(len, pieces))
        deadline = time.monotonic() + timeout_s
        while not self._link.up.write(pieces, size):
            if not self._wait(deadline):
                why = "the run is stopping" if self.stopping else f"its mailbox stayed full for {timeout_s} s"
                raise PeerLost(f"{to}: {why}")
        self._hub_bell.ring()

    def receive(self, timeout_s: float) -> Message | None:
        """The next message the hub sent to this child."""
        deadline = time.monotonic() + timeout_s
        while (message := _take(self._link.down, self._hub_bell, self.receipts)) is None:
            if not self._wait(deadline):
                return None
        return message

    def publish(self, topic: str, message: Message) -> None:
        """Refused: a topic has one writer, the hub."""
        raise BadMessage(f"{self.name} may not publish {topic!r}: only {self.hub!r} does; send it a message instead")

    def latest(self, topic: str) -> Message | None:
        """The newest message of `topic`, if this mailbox has not returned it yet."""
        return self._board.latest(topic, self.receipts)

    def wait_latest(self, topic: str, timeout_s: float) -> Message | None:
        """`latest`, waited for: None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (message := self._board.latest(topic, self.receipts)) is None:
            if not self._wait(deadline):
                return None
        return message

    def close(self) -> None:
        """Unmap everything and close the descriptors."""
        if self._closed:
            return
        self._closed = True
        self._link.close()
        self._board.close()
        self._hub_bell.close()
        self._bell.close()

    def _wait(self, deadline: float) -> bool:
        """Sleep until something changed; False where there is nothing left to wait for."""
        left = deadline - time.monotonic()
        if left <= 0 or self.stopping:
            return False
        self._on_wait()
        self._bell.wait(min(left, _SLICE_S))
        return True


def _take(ring: Ring, writer: Bell, receipts: Receipts) -> Message | None:
    """The next message in `ring` that is to be delivered; `writer` is told that there is room."""
    while (record := ring.read()) is not None:
        writer.ring()
        message = _decoded(record, ring.capacity, receipts)
        if message is not None and receipts.accept(message, len(record)):
            return message
    if ring.corrupted:
        receipts.corrupted += ring.corrupted
        ring.corrupted = 0
        writer.ring()
    return None


def _decoded(record: bytearray, max_bytes: int, receipts: Receipts) -> Message | None:
    try:
        return decode(record, max_bytes)
    except BadMessage as error:
        receipts.corrupted += 1
        receipts.last_damage = str(error)
        return None


def _seed(size: int, position: int) -> int:
    return zlib.crc32(struct.pack("<QQ", size, position))


def _record_bytes(size: int) -> int:
    return _rounded(_RECORD.size + size, _WORD)


def _rounded(size: int, step: int) -> int:
    return size + -size % step


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, _LINE - 1).bit_length()
