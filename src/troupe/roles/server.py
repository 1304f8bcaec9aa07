"""Server: own one slice of the vector and its moments, apply the gradients that arrive, answer with weights."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from troupe.errors import BadMessage
from troupe.ports import Mailbox
from troupe.types import Array, Message, Scalar

PUT_ASIDE_AFTER = 3  # refused gradients of one worker's incarnation
SUM_UP_S = 1.0  # between two lines on workers that are put aside: they go on sending


class Slice(Protocol):
    """Where the server's weights and moments lie."""

    version: int  # updates applied to this slice
    size: int

    def weights(self) -> Array:
        """The weights as they are; copied by whoever sends them."""

    def apply(self, gradient: Array, learning_rate: float) -> None:
        """One optimiser step; the version goes up by one."""


@dataclass(frozen=True)
class Limits:
    """What a gradient may be at most."""

    lag: int  # versions old; 0: however old
    norm: float  # what clipping leaves of the whole gradient, so that no slice of it is longer
    learning_rate: float  # of the start: schedules only fall


def server(
    slice_: Slice,
    workers: Mailbox,
    books: Mailbox,
    *,
    run: str,
    name: str,
    incarnation: int,
    accumulate: int,
    limits: Limits,
    timeout_s: float,
) -> Iterator[None]:
    """Each turn: all the gradients that wait, then the new weights to everybody."""
    gate = _Gate(slice_, run, limits)
    handled: dict[str, tuple[int, int]] = {}  # worker -> its incarnation, its newest gradient, applied or refused
    waiting: list[tuple[Array, float]] = []  # gradients and learning rates, towards the next step

    def tell(who: str, why: str, count: int, number: int) -> None:
        meta: dict[str, Scalar] = {"who": who, "why": why, "count": count}
        books.send("learner", Message("refused", run, name, incarnation, number, meta=meta), timeout_s)

    def publish() -> None:
        meta = {f"{who}.{life}": sequence for who, (life, sequence) in handled.items()}
        arrays = {"weights": slice_.weights()}
        workers.publish("weights", Message("weights", run, name, incarnation, 0, slice_.version, meta, arrays))

    refusals = _Refusals(tell)
    publish()
    while True:
        message = workers.receive(timeout_s=0.1)
        heard = message is not None
        while message is not None:
            known = gate.put_aside(message)
            try:
                waiting.append(gate.checked(message))
            except BadMessage as e:
                refusals.note(message.sender, str(e), at_once=not known)
            if message.run == run:
                handled[message.sender] = (message.incarnation, message.sequence)
            if len(waiting) >= accumulate:
                gradients, rates = [g for g, _ in waiting], [rate for _, rate in waiting]
                slice_.apply(gradients[0] if accumulate == 1 else np.mean(gradients, 0), sum(rates) / len(rates))
                waiting.clear()
            message = workers.receive(timeout_s=0.0)
        if heard:
            publish()
        refusals.sum_up()
        yield


class _Gate:
    """Lets pass what may meet the weights: of this run, of the right shape, finite, no longer than can be, not old."""

    def __init__(self, slice_: Slice, run: str, limits: Limits) -> None:
        self._slice, self._run, self._limits = slice_, run, limits
        self._refused: Counter[tuple[str, int]] = Counter()

    def checked(self, message: Message) -> tuple[Array, float]:
        """The gradient in `message` and its learning rate; BadMessage says why it is dropped."""
        sender = f"{message.sender}.{message.incarnation}"
        if self.put_aside(message):
            raise BadMessage(f"{sender} was put aside after {PUT_ASIDE_AFTER} refused gradients")
        why = self._why_not(message)
        if why:
            self._refused[message.sender, message.incarnation] += 1
            raise BadMessage(f"{sender}: {why}")
        return message.arrays["gradient"], float(message.meta["learning_rate"])

    def put_aside(self, message: Message) -> bool:
        """Whether nothing of its sender passes any more."""
        return self._refused[message.sender, message.incarnation] >= PUT_ASIDE_AFTER

    def _why_not(self, message: Message) -> str | None:
        if message.run != self._run:
            return f"a gradient of run {message.run!r}, where this is {self._run!r}"
        gradient, rate = message.arrays.get("gradient"), message.meta.get("learning_rate")
        if message.kind != "gradient" or gradient is None:
            return f"a {message.kind!r} message is no gradient"
        if gradient.shape != (self._slice.size,) or gradient.dtype != np.float32:
            return (
                f"a gradient of {list(gradient.shape)} {gradient.dtype}, where the slice has {self._slice.size} float32"
            )
        most = self._limits.learning_rate
        if not isinstance(rate, int | float) or not 0 <= rate <= most:
            return f"a learning rate of {rate!r}, where this run's is at most {most:g}"
        with np.errstate(over="ignore"):  # then it is infinite, and refused
            norm = float(np.linalg.norm(gradient))
        if not math.isfinite(norm):
            return "a gradient that is not finite"
        if norm > self._limits.norm:
            return f"a gradient of norm {norm:.3g}, where clipping leaves at most {self._limits.norm:g}"
        lag = self._slice.version - message.version
        if self._limits.lag and lag > self._limits.lag:
            return f"a gradient {lag} versions old, over --max-lag {self._limits.lag}"
        return None


class _Refusals:
    """Tells the books of each refusal at once, and of workers that are put aside how many more, now and then."""

    def __init__(self, tell: Callable[[str, str, int, int], None]) -> None:
        self._tell, self._told = tell, 0
        self._more: dict[str, tuple[str, int]] = {}  # worker -> why, how many
        self._summed_s = time.monotonic()

    def note(self, who: str, why: str, *, at_once: bool) -> None:
        """One more of `who`."""
        self._more[who] = (why, self._more.get(who, ("", 0))[1] + 1)
        if at_once:
            self.sum_up(due_s=0.0)

    def sum_up(self, due_s: float = SUM_UP_S) -> None:
        """Tell what is open, if `due_s` have passed since that was last done."""
        if self._more and time.monotonic() - self._summed_s >= due_s:
            for who, (why, count) in self._more.items():
                self._told += 1
                self._tell(who, why, count, self._told)
            self._more.clear()
            self._summed_s = time.monotonic()
