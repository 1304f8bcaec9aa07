"""What one run has on an AMQP broker: the names and limits of its queues, and the form its messages take there."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from troupe.errors import BadMessage, ConfigError
from troupe.transports.codec import MAX_MESSAGE_BYTES, decode, encode
from troupe.transports.topology import Delivery, Queue
from troupe.types import Message

EVERYBODY: Final = "troupe.meta"  # the exchange that reaches the learner of every run
DESK: Final = "troupe.desk."  # begins the names of the queues where answers are waited for
LEARNERS: Final = 4  # that may share a run; each publishes in a slot of its own
DONE: Final = "done"  # the topic that tells workers to stop
HELLO: Final = "hello"  # the question of a worker that wants the newest of each topic
REPLY_TO: Final = "reply_to"  # in the meta of any other question: where its answer is waited for
QUESTION: Final = "question"  # and which question it answers
_MODES: Final = {"lossless": "reject-publish", "fresh": "drop-head"}  # what a full data queue does
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_FORGOTTEN_MS: Final = 24 * 3600 * 1000  # a queue that nobody consumed for so long goes, with what is in it
_QUESTION_MS: Final = 10_000  # a question that old is not waited for any more
_DEAD: Final = {"x-max-length": 1000, "x-max-length-bytes": 1 << 28, "x-overflow": "drop-head"}
_PRIVATE: Final = {"x-max-length": 64, "x-max-length-bytes": 1 << 28, "x-overflow": "reject-publish"}


def checked(name: str, what: str) -> str:
    """`name`, if it can be a part of the names of queues."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the {what} {name!r} cannot name a queue: use 1 to 80 letters, digits, dots, - and _")
    return name


@dataclass(frozen=True, slots=True)
class Office:
    """A run's objects on the broker. All of it is agreed between the learners that share the run."""

    run: str
    mode: str = "lossless"
    max_length: int = 64  # messages that wait in the data queue
    max_length_bytes: int = 1 << 28
    prefetch: int = 4  # that each learner has besides, not acknowledged
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        checked(self.run, "run")
        if self.mode not in _MODES:
            raise ConfigError(f"there is no mode {self.mode!r} of the data queue: {' or '.join(_MODES)}")
        if self.max_length < 1 or self.prefetch < 1:
            raise ConfigError(f"max_length {self.max_length} and prefetch {self.prefetch} must be at least 1")
        if self.max_length_bytes < self.max_message_bytes:
            raise ConfigError(
                f"max_length_bytes {self.max_length_bytes} is less than the largest message, {self.max_message_bytes}"
            )

    def name(self, what: str) -> str:
        """The name on the broker of `what` this run has."""
        return f"troupe.{self.run}.{what}"

    def model(self, topic: str, slot: int = 0) -> str:
        """The exchange of `topic`: one for each learner, or in a queue of length 1 they would push each other out."""
        return self.name(f"model.{topic}.{slot}" if slot else f"model.{topic}")

    def models(self, topics: Iterable[str]) -> Iterator[tuple[str, int, str]]:
        """Topic, slot and exchange of all of them."""
        for topic in topics:
            for slot in range(1 if topic == DONE else LEARNERS):
                yield topic, slot, self.model(topic, slot)

    def data_queue(self) -> Queue:
        """Where the workers' experience waits, first come, first served."""
        limits = {"x-max-length": self.max_length, "x-max-length-bytes": self.max_length_bytes}
        return Queue(
            self.name("data"), arguments={**limits, "x-overflow": _MODES[self.mode], "x-expires": _FORGOTTEN_MS}
        )

    def dead_queue(self) -> Queue:
        """Where frames that could not be read are kept for whoever looks into it."""
        return Queue(self.name("dead"), arguments={**_DEAD, "x-expires": _FORGOTTEN_MS})

    def private_queue(self, name: str) -> Queue:
        """What the learner sends to the worker `name`."""
        return Queue(self.name(f"to.{name}"), arguments={**_PRIVATE, "x-expires": _FORGOTTEN_MS})

    def meta_queue(self, name: str) -> Queue:
        """Where a learner is asked."""
        return Queue(name, ours=True, arguments={"x-max-length": 1000, "x-message-ttl": _QUESTION_MS})

    def seal(self, message: Message) -> tuple[bytes, dict[str, Any]]:
        """The frame of `message`, and the header that tells whether it is whole; BadMessage for what is too large."""
        return seal(message, self.max_message_bytes)

    def unseal(self, delivery: Delivery) -> Message:
        """The message that was delivered; BadMessage for what is damaged, too large, or of another run."""
        message = unseal(delivery, self.max_message_bytes)
        if message.run != self.run:
            raise BadMessage(f"bad message: {message.sender!r} plays for run {message.run!r}, this is {self.run!r}")
        return message


def seal(message: Message, max_bytes: int) -> tuple[bytes, dict[str, Any]]:
    """The frame of `message`, and the header that tells whether it is whole."""
    pieces = encode(message)
    size = sum(map(len, pieces))
    if size > max_bytes:
        raise BadMessage(f"a message of {size} bytes, over the limit of {max_bytes}")
    frame = b"".join(pieces)
    return frame, {"crc32": zlib.crc32(frame)}


def unseal(delivery: Delivery, max_bytes: int) -> Message:
    """The message that was delivered, its arrays the receiver's own."""
    if len(delivery.body) > max_bytes:
        raise BadMessage(f"bad message: a frame of {len(delivery.body)} bytes, over the limit of {max_bytes}")
    if (promised := _whole(delivery.headers, "crc32")) != zlib.crc32(delivery.body):
        raise BadMessage(f"bad message: its checksum is not {promised}: damaged on its way, or not of Troupe")
    return decode(bytearray(delivery.body), max_bytes)  # pika's bytes are read-only


def edition(delivery: Delivery) -> tuple[str, int]:
    """Which life of its publisher a publication is of, and its number in there."""
    return str(delivery.headers.get("life", "")), _whole(delivery.headers, "edition")


def _whole(headers: Mapping[str, Any], key: str) -> int:
    value = headers.get(key)
    return value if isinstance(value, int) else -1
