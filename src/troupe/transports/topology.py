"""What a mailbox needs on an AMQP broker, as plain data: exchanges, queues, bindings, consumers; and to declare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Exchange:
    """A fanout exchange. One that is not kept goes when its last queue does."""

    name: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue. One that is `ours` belongs to this connection and goes with it; any other survives the broker."""

    name: str
    ours: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Binding:
    """What is published to `exchange` reaches `queue`."""

    queue: str
    exchange: str


@dataclass(frozen=True, slots=True)
class Consumer:
    """`take` is called in the wire's thread, with at most `prefetch` deliveries that are not settled."""

    queue: str
    prefetch: int
    take: Callable[[Delivery], None]


Topology: TypeAlias = Iterable[Exchange | Queue | Binding | Consumer]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a queue delivered."""

    body: bytes
    headers: Mapping[str, Any]
    reply_to: str
    redelivered: bool
    tag: int
    epoch: int  # of the connection it came by: settled by another, it would be another message


def declare(channel: Any, topology: Topology, epoch: int) -> None:
    """Ask for all of `topology` in its order; what the broker refuses closes the channel."""
    for thing in topology:
        if isinstance(thing, Exchange):
            channel.exchange_declare(thing.name, "fanout", durable=thing.kept, auto_delete=not thing.kept)
        elif isinstance(thing, Queue):
            channel.queue_declare(
                thing.name, durable=not thing.ours, exclusive=thing.ours, auto_delete=thing.ours,
                arguments=dict(thing.arguments),
            )  # fmt: skip
        elif isinstance(thing, Binding):
            channel.queue_bind(thing.queue, thing.exchange)
        else:
            channel.basic_qos(prefetch_count=thing.prefetch)  # of the consumers that follow
            channel.basic_consume(thing.queue, partial(_hand_over, thing.take, epoch))


def _hand_over(
    take: Callable[[Delivery], None], epoch: int, channel: Any, method: Any, properties: Any, body: bytes
) -> None:
    headers, reply_to = properties.headers or {}, properties.reply_to or ""
    take(Delivery(body, headers, reply_to, method.redelivered, method.delivery_tag, epoch))
