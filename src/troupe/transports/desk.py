"""Questions to learners whose machines one does not know: a machine asks the broker's runs, their learners answer."""

from __future__ import annotations

import secrets
from collections import deque
from typing import Final

from troupe.errors import BadMessage
from troupe.transports.amqp import Address
from troupe.transports.codec import MAX_MESSAGE_BYTES
from troupe.transports.lanes import Lane, Parcel
from troupe.transports.office import DESK, EVERYBODY, QUESTION, checked, seal, unseal
from troupe.transports.topology import Consumer, Delivery, Exchange, Queue, Topology
from troupe.transports.wire import Wire
from troupe.types import Message

_ANSWERS: Final = 1000  # that may wait to be read


class RabbitDesk:
    """Where a machine asks; for one thread. `timeout_s` is how long a broker that is not there is waited for."""

    def __init__(self, address: Address, *, timeout_s: float = 5.0) -> None:
        self._queue = ""
        self._answers: deque[tuple[str, Message]] = deque(maxlen=_ANSWERS)
        self._lane = Lane(patient=False)
        self._wire = Wire(
            address, "troupe desk", publishing=lambda: [Exchange(EVERYBODY, kept=True)], consuming=self._consuming
        )
        self._wire.start(timeout_s)

    def ask(self, message: Message, *, run: str | None, timeout_s: float) -> list[Message]:
        """The answers of all runs that come within `timeout_s`, or the first of `run`; none at once if nobody is there.

        A broker that is gone meanwhile answers nothing either.
        """
        frame, headers = seal(message, MAX_MESSAGE_BYTES)
        question = secrets.token_hex(8)
        exchange, key = (EVERYBODY, "") if run is None else ("", f"troupe.{checked(run, 'run')}.meta")
        parcel = Parcel(
            frame, exchange, key, {**headers, QUESTION: question}, reply_to=self._queue, kept=False, mandatory=True
        )
        self._answers.clear()
        self._wire.post(self._lane, parcel)
        enough = 1 if run is not None else _ANSWERS
        self._wire.wait(lambda: parcel.outcome == "nobody" or self._count(question) >= enough, timeout_s)
        self._wire.withdraw(self._lane, parcel)
        with self._wire.condition:
            return [answer for asked, answer in self._answers if asked == question]

    def close(self) -> None:
        """Leave."""
        self._wire.close()

    def _count(self, question: str) -> int:
        return sum(asked == question for asked, _ in self._answers)

    def _consuming(self) -> Topology:
        self._queue = f"{DESK}{secrets.token_hex(8)}"
        yield Queue(self._queue, ours=True, arguments={"x-max-length": _ANSWERS})
        yield Consumer(self._queue, 16, self._take)

    def _take(self, delivery: Delivery) -> None:
        self._wire.settle(delivery)
        try:
            message = unseal(delivery, MAX_MESSAGE_BYTES)
        except BadMessage:
            return  # whoever sent that knows our queue and not the form: no learner
        with self._wire.condition:
            self._answers.append((str(delivery.headers.get(QUESTION, "")), message))
            self._wire.condition.notify_all()
