"""Server: own one slice of the vector and its moments, apply the gradients that arrive, answer with weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from troupe.errors import BadMessage
from troupe.ports import Mailbox
from troupe.types import Array, Message

PUT_ASIDE_AFTER = 3  # refused gradients of one worker's incarnation
NORM_SLACK = 1.001  # the whole gradient was clipped before it was sliced, so no slice of it is longer, but for rounding


class Slice(Protocol):
    """Where the server's weights and moments lie."""

    version: int  # updates applied to this slice
    size: int

    def weights(self) -> Array:
        """The weights as they are; copied by whoever sends them."""

    def apply(self, gradient: Array, learning_rate: float) -> None:
        """One optimiser step; the version goes up by one."""


def server(
    slice_: Slice,
    workers: Mailbox,
    books: Mailbox,
    *,
    run: str,
    name: str,
    incarnation: int,
    accumulate: int,
    max_lag: int,
    max_norm: float,
    timeout_s: float,
) -> Iterator[None]:
    """Each turn: all the gradients that wait, then the new weights to everybody. `max_lag` 0: however old."""
    gate = _Gate(slice_, max_lag, max_norm)
    handled: dict[str, int] = {}  # the newest gradient of each worker's incarnation that was applied or refused
    waiting: list[tuple[Array, float]] = []  # towards the next step
    told = 0

    def publish() -> None:
        arrays = {"weights": slice_.weights()}
        workers.publish("weights", Message("weights", run, name, incarnation, 0, slice_.version, dict(handled), arrays))

    publish()
    while True:
        message = workers.receive(timeout_s=0.1)
        heard = message is not None
        while message is not None:
            sender = f"{message.sender}.{message.incarnation}"
            try:
                if message.run != run:
                    raise BadMessage(f"{message.sender} works for run {message.run!r}, this is {run!r}")
                waiting.append((gate.checked(message, sender), float(message.meta["learning_rate"])))
            except BadMessage as e:
                told += 1
                meta = {"who": message.sender, "why": str(e)}
                books.send("learner", Message("refused", run, name, incarnation, told, meta=meta), timeout_s)
            handled[sender] = message.sequence
            if len(waiting) >= accumulate:
                gradients, rates = [g for g, _ in waiting], [rate for _, rate in waiting]
                slice_.apply(gradients[0] if accumulate == 1 else np.mean(gradients, 0), sum(rates) / len(rates))
                waiting.clear()
            message = workers.receive(timeout_s=0.0)
        if heard:
            publish()
        yield


class _Gate:
    """Lets pass what may meet the weights: of the right shape, finite, no longer than it can be, not too old."""

    def __init__(self, slice_: Slice, max_lag: int, max_norm: float) -> None:
        self._slice, self._max_lag, self._max_norm = slice_, max_lag, max_norm
        self._refusals: Counter[str] = Counter()

    def checked(self, message: Message, sender: str) -> Array:
        """The gradient in `message`; BadMessage says why it is dropped."""
        if self._refusals[sender] >= PUT_ASIDE_AFTER:
            raise BadMessage(f"{sender} is put aside after {PUT_ASIDE_AFTER} refused gradients")
        why = self._why_not(message)
        if why:
            self._refusals[sender] += 1
            raise BadMessage(f"{sender}: {why}")
        return message.arrays["gradient"]

    def _why_not(self, message: Message) -> str | None:
        gradient = message.arrays.get("gradient")
        if message.kind != "gradient" or gradient is None or "learning_rate" not in message.meta:
            return f"a {message.kind!r} message is no gradient"
        if gradient.shape != (self._slice.size,) or gradient.dtype != np.float32:
            return (
                f"a gradient of {list(gradient.shape)} {gradient.dtype}, where the slice has {self._slice.size} float32"
            )
        norm = float(np.linalg.norm(gradient))
        if not math.isfinite(norm):
            return "a gradient that is not finite"
        if norm > self._max_norm * NORM_SLACK:
            return f"a gradient of norm {norm:.3g}, where clipping leaves at most {self._max_norm:g}"
        lag = self._slice.version - message.version
        if self._max_lag and lag > self._max_lag:
            return f"a gradient {lag} versions old, over --max-lag {self._max_lag}"
        return None
