"""Mailboxes between the processes of one machine: byte rings and latest-value slots in nameless shared memory.

Each child has a link to the hub: a ring up and a ring down, each with one writer and one reader, so there is no lock
for a killed process to die holding. What the hub publishes lies in slots that every child reads (see rings.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypedDict

from troupe.errors import BadMessage, PeerLost
from troupe.region import Bell, Region, reserve
from troupe.transports.codec import decode, encode
from troupe.transports.receipts import Receipts
from troupe.transports.rings import LINE, Ring, Slot, power_of_two
from troupe.types import Message

_SLICE_S: Final = 0.1  # longest sleep: a peer killed between its commit and its ring is noticed this late
_STOP_WORD: Final = 0  # of the board


class LinkSpec(TypedDict):
    """What a child must know besides its file descriptors; JSON."""

    name: str
    hub: str
    spin_s: float
    up_bytes: int
    down_bytes: int
    topics: dict[str, tuple[int, int]]  # topic -> offset on the board, bytes of the slot


class HubSpec(TypedDict):
    """What a process must know besides the descriptors to be the hub's side in its maker's stead; JSON."""

    name: str
    spin_s: float
    up_bytes: int
    down_bytes: int
    topics: dict[str, tuple[int, int]]
    children: list[str]


class _Board:
    """What the hub tells everybody: the stop flag, and one slot per topic."""

    def __init__(self, fd: int, topics: Mapping[str, tuple[int, int]]) -> None:
        self.shared = Region(fd)
        self.stop = self.shared.view[:LINE].cast("Q")
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
        self.shared = Region(fd)
        middle = Ring.HEADER_BYTES + up_bytes
        self.up = Ring(self.shared.view[:middle])
        self.down = Ring(self.shared.view[middle : middle + Ring.HEADER_BYTES + down_bytes])

    def close(self) -> None:
        self.up.release()
        self.down.release()
        self.shared.close()


@dataclass(frozen=True, slots=True)
class HubConnection:
    """What another process is handed to be the hub's side: `HubMailbox.attach`."""

    spec: HubSpec
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Connection:
    """What a child process is handed to build its `SharedMailbox` from; the descriptors stay the hub's."""

    spec: LinkSpec
    fds: tuple[int, ...]


class SharedHub:
    """Made by the process that owns the run, before its children: the memory and the bells, and a mailbox of its own.

    `capacity_bytes` may wait on the way up from each child and `down_bytes` on the way down to it (both rounded up to
    a power of two); `topics` are what may be published, with the bytes of the largest message of each. Who waits
    lets others run for `spin_s` before it sleeps: to be woken costs 50 to 100 us by itself, but where there are more
    processes than cores it takes the time of the one that is waited for.
    """

    def __init__(
        self,
        capacity_bytes: int = 1 << 22,
        topics: Mapping[str, int] | None = None,
        *,
        down_bytes: int = 1 << 18,
        name: str = "learner",
        spin_s: float = 0.0,
    ) -> None:
        self.name, self._spin_s = name, spin_s
        self._up_bytes = power_of_two(capacity_bytes)
        self._down_bytes = power_of_two(down_bytes)
        self._topics: dict[str, tuple[int, int]] = {}
        at = LINE
        for topic, max_bytes in (topics or {}).items():
            self._topics[topic] = (at, Slot.bytes_for(max_bytes))
            at += self._topics[topic][1]
        self._board = _Board(reserve("troupe-board", at), self._topics)
        self._bell = Bell()
        self._links: dict[str, tuple[_Link, Bell]] = {}
        self._mailbox = HubMailbox(name, self._board, self._bell, self._links, spin_s)

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
            name=name, hub=self.name, spin_s=self._spin_s, up_bytes=self._up_bytes, down_bytes=self._down_bytes,
            topics=self._topics,
        )  # fmt: skip
        return Connection(spec, (link.shared.fd, self._board.shared.fd, self._bell.fd, bell.fd))

    def lend(self) -> HubConnection:
        """This side of all links there are now, for another process; this one must leave its mailbox alone then."""
        spec = HubSpec(
            name=self.name, spin_s=self._spin_s, up_bytes=self._up_bytes, down_bytes=self._down_bytes,
            topics=self._topics, children=list(self._links),
        )  # fmt: skip
        pairs = [fd for link, bell in self._links.values() for fd in (link.shared.fd, bell.fd)]
        return HubConnection(spec, (self._board.shared.fd, self._bell.fd, *pairs))

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

    def __init__(
        self, name: str, board: _Board, bell: Bell, links: dict[str, tuple[_Link, Bell]], spin_s: float
    ) -> None:
        self.name, self._spin_s = name, spin_s
        self.receipts = Receipts()
        self._board, self._bell, self._links = board, bell, links
        self._turn = 0  # the link that is asked first: fair to all, however fast one of them writes
        self._closed = False

    @classmethod
    def attach(cls, spec: HubSpec, fds: Iterable[int]) -> HubMailbox:
        """The hub's side, lent by the process that made it; whoever had it before must be dead."""
        board, bell, *pairs = fds
        sizes = spec["up_bytes"], spec["down_bytes"]
        links = {
            name: (_Link(link, *sizes), Bell(child_bell))
            for name, link, child_bell in zip(spec["children"], pairs[::2], pairs[1::2], strict=True)
        }
        return cls(spec["name"], _Board(board, spec["topics"]), Bell(bell), links, spec["spin_s"])

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
        begin = time.monotonic()
        while (message := self._next()) is None:
            left = begin + timeout_s - time.monotonic()
            if left <= 0:
                return None
            _pause(self._bell, timeout_s - left, left, self._spin_s)
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

    def wait_latest(self, topic: str, timeout_s: float) -> Message | None:
        """`latest`: only the hub publishes, so there is nothing to wait for here."""
        return self.latest(topic)

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
        self.name, self.hub, self._spin_s = spec["name"], spec["hub"], spec["spin_s"]
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
        begin = time.monotonic()
        while not self._link.up.write(pieces, size):
            if not self._wait(begin, timeout_s):
                why = "the run is stopping" if self.stopping else f"its mailbox stayed full for {timeout_s} s"
                raise PeerLost(f"{to}: {why}")
        self._hub_bell.ring()

    def receive(self, timeout_s: float) -> Message | None:
        """The next message the hub sent to this child."""
        begin = time.monotonic()
        while (message := _take(self._link.down, self._hub_bell, self.receipts)) is None:
            if not self._wait(begin, timeout_s):
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
        begin = time.monotonic()
        while (message := self._board.latest(topic, self.receipts)) is None:
            if not self._wait(begin, timeout_s):
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

    def _wait(self, begin: float, timeout_s: float) -> bool:
        """Pause until something may have changed; False where there is nothing left to wait for."""
        left = begin + timeout_s - time.monotonic()
        if left <= 0 or self.stopping:
            return False
        self._on_wait()
        _pause(self._bell, timeout_s - left, left, self._spin_s)
        return True


def _pause(bell: Bell, waited_s: float, left_s: float, spin_s: float) -> None:
    """Let others run for a moment, and sleep only where that has not helped."""
    if waited_s < spin_s:
        os.sched_yield()
    else:
        bell.wait(min(left_s, _SLICE_S))


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
