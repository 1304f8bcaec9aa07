"""The pulse of a worker process: a few words of shared memory that say when it last moved, and where its time goes."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from troupe.region import reserve


class Phase(IntEnum):
    """What a worker is doing from its last beat on."""

    START = 0  # importing, building environments
    PLAY = 1
    WAIT = 2  # for weights, or for a reply
    SEND = 3
    LEARN = 4
    DONE = 5  # it ends because its work is done: exit code 0 is no failure


@dataclass(frozen=True, slots=True)
class Beat:
    """A reading of a pulse."""

    at_s: float  # time.monotonic() of the last sign of life; 0.0 before the first
    phase: Phase
    steps: int  # environment steps, over all incarnations
    seconds: dict[Phase, float]  # spent in each phase, over all incarnations


_BYTES: Final = 128
_AT_NS, _PHASE, _STEPS = 0, 1, 2  # int64 words; one writer each, so that aligned stores are all that is needed
_SECONDS: Final = 8  # float64 slots from the 64th byte on, one a phase


class Pulse:
    """Written by the worker (`beat`, `touch`, `add_steps`), read by its supervisor (`read`)."""

    def __init__(self, fd: int) -> None:
        """Map the pulse behind `fd`, which is this object's from now on."""
        self.fd = fd
        self._map = mmap.mmap(fd, _BYTES)
        self._words = memoryview(self._map).cast("q")
        self._seconds = memoryview(self._map).cast("d")

    @classmethod
    def create(cls) -> Pulse:
        """A new pulse, without a beat."""
        return cls(reserve("troupe-pulse", _BYTES))

    @classmethod
    def attach(cls, fd: int) -> Pulse:
        """The pulse whose `fd` this process was handed."""
        return cls(fd)

    def beat(self, phase: Phase) -> None:
        """Alive, and in `phase` from here; the time since the last beat is charged to the phase before."""
        words = self._words
        now, last = time.monotonic_ns(), words[_AT_NS]
        if last:
            self._seconds[_SECONDS + words[_PHASE]] += (now - last) * 1e-9
        words[_PHASE] = phase
        words[_AT_NS] = now

    def touch(self) -> None:
        """Alive, and still in the same phase: for waits that may be long."""
        self.beat(Phase(self._words[_PHASE]))

    def add_steps(self, steps: int) -> None:
        """Count environment steps."""
        self._words[_STEPS] += steps

    def rest(self) -> None:
        """Forget the last beat: the supervisor's, between two incarnations."""
        self._words[_AT_NS] = 0
        self._words[_PHASE] = Phase.START

    def read(self) -> Beat:
        """What the worker said last."""
        words = self._words
        try:
            phase = Phase(words[_PHASE])
        except ValueError:  # a worker that writes where it should not must not stop its supervisor
            phase = Phase.START
        seconds = {phase: self._seconds[_SECONDS + phase] for phase in Phase}
        return Beat(words[_AT_NS] * 1e-9, phase, words[_STEPS], seconds)

    def close(self) -> None:
        """Unmap it and close its descriptor."""
        if self.fd < 0:
            return
        self._words.release()
        self._seconds.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1
