"""Mailboxes within one process and one thread: the serial twin of every other transport, for tests and `local`."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

from troupe.errors import BadMessage, PeerLost
from troupe.transports.codec import MAX_MESSAGE_BYTES, encoded_size
from troupe.transports.receipts import Receipts
from troupe.types import Message

_CAPACITY: Final = 64  # messages


class MemoryHub:
    """The post office of one thread. `capacity` messages wait for each receiver at most."""

    def __init__(self, capacity: int = _CAPACITY, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.capacity = capacity
        self.max_message_bytes = max_message_bytes
        self._mailboxes: dict[str, MemoryMailbox] = {}
        self._topics: dict[str, tuple[int, Message]] = {}  # topic -> how often published, the newest

    def mailbox(self, name: str) -> MemoryMailbox:
        """The mailbox called `name`, opened where it is not yet."""
        return self._mailboxes.setdefault(name, MemoryMailbox(self, name))


class MemoryMailbox:
    """A `ports.Mailbox` whose other side runs in the same thread: waiting could never end, so it never waits.

    A full receiver is a PeerLost at once, and an empty mailbox answers None at once. Arrays are copied on the way in:
    what the sender does to its own afterwards is not seen.
    """

    def __init__(self, hub: MemoryHub, name: str) -> None:
        self.name = name
        self.receipts = Receipts()
        self._hub = hub
        self._waiting: deque[tuple[Message, int]] = deque()
        self._seen: dict[str, int] = {}
        self._closed = False

    def send(self, to: str, message: Message, timeout_s: float) -> None:
        """Put `message` into the mailbox `to`; `timeout_s` is not waited for, see above."""
        size = self._checked_size(message)
        receiver = self._hub._mailboxes.get(to)
        if receiver is None or receiver._closed:
            raise PeerLost(f"{to}: no such mailbox is open")
        if len(receiver._waiting) >= self._hub.capacity:
            raise PeerLost(f"{to}: full with {self._hub.capacity} messages, and one thread cannot wait for itself")
        receiver._waiting.append((_own(message), size))

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None at once."""
        while self._waiting:
            message, size = self._waiting.popleft()
            if self.receipts.accept(message, size):
                return message
        return None

    def publish(self, topic: str, message: Message) -> None:
        """Replace what `topic` holds."""
        self._checked_size(message)
        count, _ = self._hub._topics.get(topic, (0, None))
        self._hub._topics[topic] = (count + 1, _own(message))

    def latest(self, topic: str) -> Message | None:
        """The newest message of `topic`, if this mailbox has not returned it yet."""
        count, message = self._hub._topics.get(topic, (0, None))
        if message is None or count == self._seen.get(topic):
            return None
        self._seen[topic] = count
        return _own(message)  # each reader may write into its own

    def wait_latest(self, topic: str, timeout_s: float) -> Message | None:
        """`latest`: nobody could publish while this thread waits."""
        return self.latest(topic)

    def close(self) -> None:
        """Forget what waits; sending here is a PeerLost from now on."""
        self._closed = True
        self._waiting.clear()
        if self._hub._mailboxes.get(self.name) is self:
            del self._hub._mailboxes[self.name]

    def _checked_size(self, message: Message) -> int:
        size = encoded_size(message)  # refuses what the other transports refuse
        if size > self._hub.max_message_bytes:
            raise BadMessage(f"a message of {size} bytes, over the limit of {self._hub.max_message_bytes}")
        return size


def _own(message: Message) -> Message:
    return replace(message, meta=dict(message.meta), arrays={k: a.copy() for k, a in message.arrays.items()})
