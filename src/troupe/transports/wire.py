"""One thread that talks to an AMQP broker, so that nothing this process does ever delays a heartbeat.

It keeps two connections: one publishes and one consumes, since a broker that runs short of memory stops reading from
those that publish. Both are made again whenever they are lost; what they need on the broker is declared again then,
and what was not confirmed is published again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from troupe.errors import PeerLost, TroupeError, UserError
from troupe.transports.amqp import Address, Locked, explained, parameters, pika
from troupe.transports.lanes import Lane, Parcel, Publisher
from troupe.transports.topology import Delivery, Topology, declare

_SLICE_S: Final = 0.1  # longest sleep of who waits
_BACK_OFF_S: Final = (0.2, 5.0)  # between two attempts to connect: first and longest, jittered
_LOCKED_GRACE_S: Final = 1.5  # the broker may not have noticed yet that the former holder is gone
_CLOSE_S: Final = 2.0


class Wire:
    """The thread. Everything public may be called from any other."""

    def __init__(
        self,
        address: Address,
        name: str,
        *,
        publishing: Callable[[], Topology],
        consuming: Callable[[], Topology],
        on_up: Callable[[], None] = lambda: None,
        on_locked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.address = address
        self.condition = threading.Condition()  # of everything that both threads change
        self.blocked = False  # by an alarm of the broker: it takes nothing that is published
        self._on_up, self._on_locked = on_up, on_locked
        self._failure: BaseException | None = None
        self._calls: list[Callable[[], None]] = []
        self._leaving = self._woken = self._over = False
        self._began = 0.0
        self._counts: dict[str, tuple[float, int, int]] = {}  # queue -> when asked, messages ready, consumers
        what = parameters(address, name)
        self._loop = pika.adapters.select_connection.IOLoop()
        self._publisher = Publisher(self.condition, self._loop.call_later)
        self._publishing = _End(self._connection(what), publishing, self._confirms, self._changed)
        self._consuming = _End(self._connection(what), consuming, _answers, self._changed)
        self._thread = threading.Thread(target=self._run, name=f"amqp {name}", daemon=True)

    @property
    def up(self) -> bool:
        """Both connections are open, and all they need is declared."""
        return self._publishing.up and self._consuming.up

    def start(self, timeout_s: float) -> None:
        """Until both connections are up. What waiting cannot mend is raised at once, PeerLost after `timeout_s`."""
        self._began = time.monotonic()
        self._thread.start()
        try:
            self._wait_up(timeout_s)
        except BaseException:
            self.close()
            raise

    def _wait_up(self, timeout_s: float) -> None:
        if not self.wait(lambda: self.up or self._hopeless() is not None, timeout_s):
            raise PeerLost(self.trouble() or f"{self.address}: the broker did not answer within {timeout_s} s")
        if not self.up and (hopeless := self._hopeless()):
            raise hopeless

    def wait(
        self,
        done: Callable[[], bool],
        timeout_s: float,
        on_wait: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Until `done`, which is called under the lock; false after `timeout_s`, or when `stopped`."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self.condition:
                if self._failure is not None:
                    raise TroupeError(f"{self.address}: the thread that talks to it failed") from self._failure
                if done():
                    return True
                left = deadline - time.monotonic()
                if left <= 0 or stopped():
                    return False
                self.condition.wait(min(left, _SLICE_S))
            on_wait()

    def trouble(self) -> str:
        """Why nothing goes through at present, in a sentence; empty where all is well."""
        for end in (self._publishing, self._consuming):
            if end.error is not None:
                return str(explained(end.error, self.address))
        if self.blocked:
            return f"{self.address}: blocked by broker: it is short of memory or disk and takes nothing until it is not"
        return "" if self.up else f"{self.address}: not connected yet"

    def post(self, lane: Lane, parcel: Parcel, *, instead: bool = False) -> None:
        """Publish `parcel` as soon as may be; `instead` of those of its lane that are not on their way yet."""
        self._publisher.add(lane, parcel, instead=instead)
        self.call(lambda: self._publisher.pump(lane))

    def withdraw(self, lane: Lane, parcel: Parcel) -> None:
        """Forget `parcel`, unless it is gone already."""
        self._publisher.withdraw(lane, parcel)

    def settle(self, delivery: Delivery, *, reject: bool = False) -> None:
        """Acknowledge `delivery`, or refuse it for good."""
        self.call(lambda: self._settle(delivery, reject))

    def flush(self, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Until all that was posted is confirmed."""
        return self.wait(lambda: self._publisher.idle, timeout_s, on_wait)

    def declare(self, topology: Topology) -> None:
        """Declare more, before anything that is posted from now on is published; not again after a reconnect."""
        things = list(topology)

        def run() -> None:
            if self._publishing.channel is not None and self._publishing.channel.is_open:
                declare(self._publishing.channel, things, self._publishing.epoch)

        self.call(run)

    def count(self, queue: str, max_age_s: float) -> tuple[int, int]:
        """Messages ready in `queue` and its consumers, as last answered; asked again where that is too old."""
        now = time.monotonic()
        with self.condition:
            asked, ready, consumers = self._counts.get(queue, (now - max_age_s, 0, 0))
            if now - asked >= max_age_s:
                self._counts[queue] = now, ready, consumers
                self.call(lambda: self._ask_count(queue))
        return ready, consumers

    def delete_unused(self, queues: Iterable[str], timeout_s: float, *, unless_filled: str) -> None:
        """Delete those of `queues`, which must be there, that nobody else consumes; and one only if it is empty."""
        left = set(queues)

        def answered(answer: Any) -> None:
            queue, messages = answer.method.queue, answer.method.message_count
            if answer.method.consumer_count <= 1 and not (queue == unless_filled and messages):
                self._consuming.channel.queue_delete(queue)
            with self.condition:
                left.discard(queue)
                self.condition.notify_all()

        def ask() -> None:
            for queue in sorted(left):
                if self._consuming.up:
                    self._consuming.channel.queue_declare(queue, passive=True, callback=answered)

        self.call(ask)
        self.wait(lambda: not left, timeout_s, stopped=lambda: not self.up)

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` soon in the wire's thread; many are one wake-up."""
        with self.condition:
            self._calls.append(function)
            if self._woken or self._over:
                return
            self._woken = True
        self._loop.add_callback_threadsafe(self._run_calls)

    def close(self) -> None:
        """End both connections and the thread; what is not confirmed yet is dropped."""
        self.call(self._leave)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():  # a broker that blocks us does not read our farewell
            self._loop.add_callback_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)

    # ---- from here on in the wire's own thread

    def _run(self) -> None:
        try:
            self._publishing.connect()
            self._consuming.connect()
            self._loop.start()
        except BaseException as error:
            self._failure = error
        finally:
            self._publishing.abort()
            self._consuming.abort()
            with self.condition:
                self._over = True
                self.condition.notify_all()
            self._loop.close()

    def _run_calls(self) -> None:
        with self.condition:
            calls, self._calls, self._woken = self._calls, [], False
        for function in calls:
            function()

    def _leave(self) -> None:
        self._leaving = True
        self._publishing.leave()
        self._consuming.leave()

    def _connection(self, what: Any) -> Callable[[Any, Any], Any]:
        def connect(opened: Any, lost: Any) -> Any:
            made = pika.SelectConnection(what, opened, lost, lost, custom_ioloop=self._loop)
            made.add_on_connection_blocked_callback(lambda *_: self._set_blocked(True))
            made.add_on_connection_unblocked_callback(lambda *_: self._set_blocked(False))
            return made

        return connect

    def _set_blocked(self, blocked: bool) -> None:
        with self.condition:
            self.blocked = blocked
            self.condition.notify_all()

    def _confirms(self, channel: Any, done: Callable[[Any], None]) -> None:
        channel.add_on_return_callback(self._publisher.returned)
        channel.confirm_delivery(self._publisher.confirmed, callback=done)

    def _changed(self, end: _End) -> None:
        """One of the ends came up, went down, or is gone for good."""
        if self._leaving:
            if self._publishing.gone and self._consuming.gone:
                self._loop.stop()
        elif end.error is not None and end.closed:
            first, longest = _BACK_OFF_S
            delay_s = min(longest, first * 2 ** min(end.attempts, 10)) * random.uniform(0.5, 1.0)
            if isinstance(explained(end.error, self.address), Locked) and self._on_locked():
                delay_s = 0.0
            self._loop.call_later(delay_s, partial(self._connect_again, end))
        if end is self._publishing:
            self.blocked = False
            if end.up:
                self._publisher.up(end.channel)
            else:
                self._publisher.down()
        if self.up and not self._leaving:
            self._on_up()
        with self.condition:
            self.condition.notify_all()

    def _connect_again(self, end: _End) -> None:
        if not self._leaving:
            end.connect()

    def _hopeless(self) -> TroupeError | None:
        """What no waiting will mend."""
        for end in (self._publishing, self._consuming):
            error = end.error and explained(end.error, self.address)
            if isinstance(error, Locked) and time.monotonic() - self._began < _LOCKED_GRACE_S:
                continue
            if isinstance(error, UserError):
                return error
        return None

    def _settle(self, delivery: Delivery, reject: bool) -> None:
        channel = self._consuming.channel
        if channel is None or not channel.is_open or delivery.epoch != self._consuming.epoch:
            return  # the broker has taken it back, and delivers it again
        if reject:
            channel.basic_reject(delivery.tag, requeue=False)
        else:
            channel.basic_ack(delivery.tag)

    def _ask_count(self, queue: str) -> None:
        def answered(answer: Any) -> None:
            with self.condition:
                counts = answer.method.message_count, answer.method.consumer_count
                self._counts[queue] = self._counts[queue][0], *counts

        if self._consuming.up:
            self._consuming.channel.queue_declare(queue, passive=True, callback=answered)


class _End:
    """One connection with its one channel; for the wire's thread."""

    def __init__(
        self,
        make: Callable[[Any, Any], Any],
        topology: Callable[[], Topology],
        prepare: Callable[[Any, Callable[[Any], None]], None],
        changed: Callable[[_End], None],
    ) -> None:
        self._make, self._topology, self._prepare, self._changed = make, topology, prepare, changed
        self._connection: Any = None
        self.channel: Any = None
        self.epoch = 0  # counts the channels: a delivery belongs to the one it came by
        self.up = False  # all is declared
        self.closed = True  # there is no connection: one may be made
        self._left = False
        self.error: BaseException | None = None  # why it is not up
        self.attempts = 0  # since it was up

    @property
    def gone(self) -> bool:
        """Left on purpose, and closed."""
        return self._left and self.closed

    def connect(self) -> None:
        """Begin to connect."""
        self.closed = False
        self._connection = self._make(self._opened, self._lost)

    def leave(self) -> None:
        """Close it for good."""
        self._left = True
        if self.closed:
            self._changed(self)
        elif not self._connection.is_closing:
            self._connection.close()

    def abort(self) -> None:
        """Close the socket, whatever state it is in."""
        with suppress(AttributeError, OSError):
            self._connection._transport._sock.close()

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._channel_opened)

    def _channel_opened(self, channel: Any) -> None:
        channel.add_on_close_callback(self._channel_lost)
        self.channel = channel
        self.epoch += 1
        declare(channel, self._topology(), self.epoch)
        self._prepare(channel, self._came_up)

    def _came_up(self, answer: Any) -> None:
        self.up, self.error, self.attempts = True, None, 0
        self._changed(self)

    def _channel_lost(self, channel: Any, reason: BaseException) -> None:
        """Mostly the broker refused something that was asked of it: begin again with everything."""
        self._down(reason)
        if self._connection.is_open:
            self._connection.close()

    def _lost(self, connection: Any, reason: BaseException) -> None:
        self.closed = True
        self.attempts += 1
        self._down(reason)

    def _down(self, reason: BaseException) -> None:
        ours = isinstance(reason, pika.exceptions.ConnectionClosedByClient | pika.exceptions.ChannelClosedByClient)
        if self.error is None or not ours:
            self.error = reason
        self.up, self.channel = False, None
        self._changed(self)


def _answers(channel: Any, done: Callable[[Any], None]) -> None:
    """The answer to this comes after all that was asked before was done."""
    channel.basic_qos(prefetch_count=1, callback=done)
