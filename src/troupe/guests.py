"""Guests: machines that join a run over a broker. The learner tells them what to play and journals what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from troupe.task import Task
from troupe.types import Message, Scalar

MOST: Final = 1000  # machines that may play at once; whoever holds the broker's password could invent any number
_FIGURES: Final = ("workers", "steps", "seconds", "lost")  # of a machine's protocol
_WORDS: Final = 500  # letters of a cause that are kept


class Reception(Protocol):
    """The broker's side of it: what machines ask, and a way to answer."""

    def requests(self, timeout_s: float) -> Message | None:
        """The next request, or None."""

    def answer(self, request: Message, reply: Message) -> None:
        """To whoever asked; nobody waits for it here."""


class Guests:
    """Attends to whoever asks, a turn at a time; the main process's own."""

    def __init__(
        self, reception: Reception, task: Task, first_rank: int, write: Callable[..., None], say: Callable[[str], None]
    ) -> None:
        self._reception, self._task, self._next_rank = reception, task, first_rank
        self._write, self._say = write, say
        self.playing: dict[str, dict[str, Any]] = {}  # machine -> its newest protocol

    def attend(self) -> None:
        """Answer all that was asked since."""
        while (request := self._reception.requests(0.0)) is not None:
            answer = {"ask": self._offer, "join": self._join, "protocol": self._protocol, "refuse": self._refused}
            meta = {"machine": request.sender, **answer.get(request.kind, self._unknown)(request)}
            self._reception.answer(request, Message("answer", self._task.run, "learner", meta=meta))

    def _offer(self, request: Message) -> dict[str, Any]:
        return {"task": msgspec.json.encode(self._task).decode()}

    def _join(self, request: Message) -> dict[str, Any]:
        """Places for its workers, which nobody else has: their random streams depend on them."""
        workers = request.meta.get("workers")
        if type(workers) is not int or not 0 < workers <= 4096:
            return {"refused": f"{workers!r} is no number of workers"}
        if len(self.playing) >= MOST:
            return {"refused": f"{MOST} machines play already"}
        rank, self._next_rank = self._next_rank, self._next_rank + workers
        self.playing[request.sender] = {"workers": workers}
        self._write("machine", what="joined", machine=request.sender, workers=workers, rank=rank)
        self._say(f"{request.sender} joined with {workers} worker{'s'[: workers != 1]}")
        return {"rank": rank}

    def _protocol(self, request: Message) -> dict[str, Any]:
        """What a machine generated and how long it took, as it goes and at its end."""
        figures = {name: _number(request.meta.get(name)) for name in _FIGURES}
        last, cause = bool(request.meta.get("last")), str(request.meta.get("cause", ""))[:_WORDS]
        if len(self.playing) < MOST:  # also one that joined an earlier life of this run
            self.playing[request.sender] = figures
        self._write("machine", what="left" if last else "protocol", machine=request.sender, cause=cause, **figures)
        if last:
            self.playing.pop(request.sender, None)
            self._say(f"{request.sender} left after {figures['steps']:,} steps")
        return {"heard": True}

    def _refused(self, request: Message) -> dict[str, Any]:
        why = str(request.meta.get("why", ""))[:_WORDS]
        self._write("machine", what="refused", machine=request.sender, why=why)
        self._say(f"{request.sender} cannot play: {why}")
        return {"heard": True}

    def _unknown(self, request: Message) -> dict[str, Any]:
        return {"refused": f"{request.kind[:_WORDS]!r} is nothing that is asked here"}


def _number(value: Scalar | None) -> int | float:
    """A figure as it should be, or 0: what a message says is not trusted."""
    if isinstance(value, bool | str) or value is None or not math.isfinite(value) or not 0 <= value < 2**53:
        return 0
    return value
