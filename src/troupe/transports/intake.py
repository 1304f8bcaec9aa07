"""What an AMQP queue delivered to a mailbox: read and checked here, acknowledged once the receiver is done with it."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable

from troupe.errors import BadMessage
from troupe.transports.lanes import Lane
from troupe.transports.office import Office
from troupe.transports.receipts import Receipts
from troupe.transports.topology import Delivery
from troupe.transports.tries import Tries
from troupe.transports.wire import Wire
from troupe.types import Message


class Intake:
    """What a queue delivered: handed out in its order, and settled when the next is asked for."""

    def __init__(
        self,
        office: Office,
        bury: Callable[[Delivery, str], None] = lambda delivery, why: None,
        tries: Tries | None = None,
    ) -> None:
        self.receipts = Receipts()
        self._tries = tries or Tries(None)
        self.wire: Wire  # set before it is started
        self._office, self._bury = office, bury
        self._waiting: deque[tuple[Delivery, Message | BadMessage]] = deque()
        self._held: Delivery | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._held is not None)

    @property
    def filled(self) -> bool:
        """Something waits to be read."""
        return bool(self._waiting)

    def take(self, delivery: Delivery) -> None:
        """In the wire's thread, where it is read too: that costs whoever learns nothing."""
        try:
            read: Message | BadMessage = self._office.unseal(delivery)
        except BadMessage as error:
            read = error
        with self.wire.condition:
            while self._waiting and self._waiting[0][0].epoch != delivery.epoch:
                self._waiting.popleft()  # the broker delivers again what came by a connection that is lost
            self._waiting.append((delivery, read))
            self.wire.condition.notify_all()

    def receive(self, timeout_s: float, wait: Callable[[Callable[[], bool], float], bool]) -> Message | None:
        """The next message, waited for by `wait`; the one before it is acknowledged by this."""
        deadline = time.monotonic() + timeout_s
        while (message := self.next()) is None:
            if not wait(lambda: self.filled, deadline - time.monotonic()):
                return None
        return message

    def next(self) -> Message | None:
        """The next message that is to be delivered; the one before it is done with."""
        if self._held is not None:
            self.wire.settle(self._held)
            if self._held.redelivered:
                self._tries.done(_key(self._held))
            self._held = None
        while True:
            with self.wire.condition:
                if not self._waiting:
                    return None
                delivery, message = self._waiting.popleft()
            if isinstance(message, BadMessage):
                self.receipts.corrupted += 1
                self.receipts.last_damage = str(message)
                self._bury(delivery, str(message))
                self.wire.settle(delivery, reject=True)
            elif not self.receipts.accept(message, len(delivery.body), redelivered=delivery.redelivered):
                self.wire.settle(delivery)
            elif delivery.redelivered and not self._tries.begin(_key(delivery)):
                why = f"{message.sender}: its message {message.sequence} ended whoever began it, again and again"
                self.receipts.poison(len(delivery.body), why)
                self._bury(delivery, why)
                self.wire.settle(delivery, reject=True)
            else:
                self._held = delivery
                return message


def _key(delivery: Delivery) -> str:
    """The same of two deliveries of one message."""
    return hashlib.blake2b(delivery.body, digest_size=16).hexdigest()


def why_not(to: str, lane: Lane, wire: Wire, timeout_s: float) -> str:
    if trouble := wire.trouble():
        return f"{to}: not taken within {timeout_s} s: {trouble}"
    if lane.trouble == "nobody":
        return f"{to}: no learner of that run is there; waited {timeout_s} s"
    full = lane.trouble == "full"
    return f"{to}: its mailbox stayed full for {timeout_s} s" if full else f"{to}: not confirmed within {timeout_s} s"
