"""Publishing to an AMQP broker until it confirms: lanes keep an order, and what was not taken is tried again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from troupe.transports.amqp import pika

_RETRY_S: Final = (0.01, 0.25)  # between two attempts to publish what the broker did not take: first and longest


@dataclass(slots=True, eq=False)
class Parcel:
    """What is to be published; `outcome` tells how that went: taken, or nobody (there is no such queue)."""

    body: bytes
    exchange: str = ""
    key: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)
    reply_to: str = ""
    kept: bool = True  # survives a restart of the broker
    mandatory: bool = False  # tell when there is no such queue
    outcome: str = ""
    flying: bool = False  # published, and not confirmed yet
    returned: bool = False


class Lane:
    """Parcels that reach the broker in the order they were posted. At most `window` are unconfirmed at a time.

    Where the broker may refuse (a full queue), a later parcel must not overtake a refused one: the window is 1 then.
    A parcel without a receiver is tried again, or with `patient` false has failed.
    """

    def __init__(self, window: int = 1, *, patient: bool = True) -> None:
        self.window, self.patient = window, patient
        self.parcels: deque[Parcel] = deque()
        self.trouble = ""  # why the broker did not take the first: full or nobody
        self.retry_s = 0.0
        self.paused = False  # until it is tried again

    def __len__(self) -> int:
        return len(self.parcels)


class Publisher:
    """Publishes what the lanes hold. `add` and `withdraw` are for any thread, the rest is for the wire's."""

    def __init__(self, condition: threading.Condition, after: Callable[[float, Callable[[], None]], None]) -> None:
        self._condition, self._after = condition, after
        self._channel: Any = None
        self._lanes: list[Lane] = []  # those that hold something
        self._flying: dict[int, tuple[Lane, Parcel]] = {}  # delivery tag -> what awaits its confirmation
        self._tag = 0

    @property
    def idle(self) -> bool:
        """Everything was confirmed."""
        return not any(self._lanes)

    def add(self, lane: Lane, parcel: Parcel, *, instead: bool) -> None:
        """Post `parcel`; `instead` of those of its lane that are not on their way yet."""
        with self._condition:
            if instead:
                lane.parcels = deque(one for one in lane.parcels if one.flying)
            lane.parcels.append(parcel)
            if not any(one is lane for one in self._lanes):
                self._lanes.append(lane)

    def withdraw(self, lane: Lane, parcel: Parcel) -> None:
        """Forget `parcel`, unless it is gone already."""
        with self._condition, suppress(ValueError):
            lane.parcels.remove(parcel)

    def up(self, channel: Any) -> None:
        """`channel` confirms: publish what waits, and what an earlier one did not confirm."""
        self._channel, self._tag = channel, 0
        for lane in list(self._lanes):
            self.pump(lane)

    def down(self) -> None:
        """The channel is lost: whether what was not confirmed got through is not known."""
        self._channel = None
        self._flying.clear()
        with self._condition:
            for lane in self._lanes:
                for parcel in lane.parcels:
                    parcel.flying = False

    def pump(self, lane: Lane) -> None:
        """Publish what the window of `lane` has room for."""
        channel = self._channel
        if channel is None or not channel.is_open or lane.paused:
            return
        with self._condition:
            for parcel in list(islice(lane.parcels, lane.window)):
                if not parcel.flying:
                    self._tag += 1
                    self._flying[self._tag] = lane, parcel
                    parcel.flying, parcel.returned = True, False
                    self._publish(channel, parcel)

    def returned(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """There is no queue for it; its confirmation follows."""
        if entry := self._flying.get(int(properties.message_id)):
            entry[1].returned = True

    def confirmed(self, frame: Any) -> None:
        """The broker took, or refused, one message or all up to one."""
        newest = frame.method.delivery_tag
        tags = [tag for tag in self._flying if tag <= newest] if frame.method.multiple else [newest]
        accepted = frame.method.NAME == "Basic.Ack"
        for tag in tags:
            if entry := self._flying.pop(tag, None):
                self._landed(*entry, accepted)

    def _publish(self, channel: Any, parcel: Parcel) -> None:
        properties = pika.BasicProperties(
            headers=dict(parcel.headers), delivery_mode=2 if parcel.kept else 1, reply_to=parcel.reply_to or None,
            message_id=str(self._tag) if parcel.mandatory else None,
        )  # fmt: skip
        channel.basic_publish(parcel.exchange, parcel.key, parcel.body, properties, mandatory=parcel.mandatory)

    def _landed(self, lane: Lane, parcel: Parcel, accepted: bool) -> None:
        with self._condition:
            parcel.flying = False
            if accepted and not (parcel.returned and lane.patient):
                parcel.outcome = "nobody" if parcel.returned else "taken"
                lane.trouble, lane.retry_s = "", 0.0
                self.withdraw(lane, parcel)
                if not lane.parcels:
                    self._lanes = [one for one in self._lanes if one is not lane]
            else:
                lane.trouble = "nobody" if parcel.returned else "full"
                self._try_later(lane)
            self._condition.notify_all()
        self.pump(lane)

    def _try_later(self, lane: Lane) -> None:
        def again() -> None:
            lane.paused = False
            self.pump(lane)

        if not lane.paused:
            lane.paused = True
            lane.retry_s = min(max(2 * lane.retry_s, _RETRY_S[0]), _RETRY_S[1])
            self._after(lane.retry_s, again)
