"""The commons: one vector that many processes change, with its moments and everybody's counters, in nameless memory.

Every counter has one writer, its own seat, and stands on a cache line of its own: sums are read, nothing is incremented
by two. Nothing here waits; `CommonsLock` beside it is what the scheme `locked` adds.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from typing import Final, TypedDict

import torch

from troupe.parameters import Parameters
from troupe.region import Region, reserve
from troupe.types import Array

_LINE: Final = 8  # int64 words of a cache line
_BEGUN_NS, _BEFORE_NS, _VERSION, _STEPS_BEFORE = range(4)  # words of the house's line
_UPDATES, _STEPS, _REPORTED, _LIFE, _SLICE_UPDATES, _MEETING = range(6)  # words of a seat's line
_SPIN_S: Final = 50e-6  # a lock is held for about as long: sleeping at once would cost more
_NAP_S: Final = 100e-6


class CommonsSpec(TypedDict):
    """What another process must know besides the descriptor; JSON."""

    size: int  # floats of the vector
    moments: list[str]
    seats: int


class Commons:
    """The region, mapped. Made by the house (`create`), attached to by every worker and server."""

    def __init__(self, fd: int, spec: CommonsSpec) -> None:
        """Map the region behind `fd`, which is this object's from now on."""
        self.spec = spec
        self._region = Region(fd)
        memory = self._region.view
        words = _LINE * (1 + spec["seats"])
        # Plain words: reading one costs a tenth of what an array's element does, and every gradient reads some.
        lines = memory[: 8 * words].cast("q")
        self._house, self._seats = lines[:_LINE], lines[_LINE:]
        floats = torch.frombuffer(memory, dtype=torch.float32, offset=8 * words)
        vectors = floats.view(1 + len(spec["moments"]), spec["size"])
        self.vector = vectors[0]
        self.moments = {name: vectors[1 + i] for i, name in enumerate(spec["moments"])}

    @property
    def fd(self) -> int:
        return self._region.fd

    @classmethod
    def create(cls, parameters: Parameters, seats: int, *, steps: int = 0) -> Commons:
        """A new region with the weights, moments and version of `parameters`, whose vector lies in it from now on."""
        spec = CommonsSpec(size=len(parameters.vector), moments=list(parameters.optimise.moments), seats=seats)
        commons = cls(reserve("troupe-commons", _bytes(spec)), spec)
        parameters.lie_in(commons.vector, commons.moments)
        commons._house[_VERSION], commons._house[_STEPS_BEFORE] = parameters.version, steps
        return commons

    def close(self) -> None:
        """The descriptor is closed; the memory goes with the last tensor in it."""
        self._region.close()

    def begin(self, seconds_before: float) -> None:
        """The curtain rises: workers may play, and the clock of the schedules runs."""
        self._house[_BEFORE_NS] = int(seconds_before * 1e9)
        self._house[_BEGUN_NS] = time.monotonic_ns()

    @property
    def begun(self) -> bool:
        return bool(self._house[_BEGUN_NS])

    def seconds(self) -> float:
        """Training time over all lives of the run."""
        return float(time.monotonic_ns() - self._house[_BEGUN_NS] + self._house[_BEFORE_NS]) * 1e-9

    def version(self) -> int:
        """Updates applied so far, by everybody."""
        return self._house[_VERSION] + sum(self._seats[_UPDATES::_LINE])

    def steps(self) -> int:
        """Environment steps played so far, by everybody."""
        return self._house[_STEPS_BEFORE] + sum(self._seats[_STEPS::_LINE])

    def lives(self) -> tuple[int, ...]:
        """Which incarnation sits in each seat, counted from 1; 0 where nobody has sat yet."""
        return tuple(self._seats[_LIFE::_LINE])

    def meeting(self) -> int:
        """The newest meeting that anybody calls for; 0 before the first."""
        return max(self._seats[_MEETING::_LINE])

    def all_at(self, meeting: int) -> bool:
        """Whether everybody is ready for that meeting."""
        return set(self._seats[_MEETING::_LINE]) == {meeting}

    def seat(self, rank: int) -> Seat:
        """The counters of one worker or server."""
        return Seat(self, self._seats[_LINE * rank : _LINE * (rank + 1)])


class Seat:
    """One process's own counters."""

    def __init__(self, commons: Commons, line: memoryview) -> None:
        self.commons, self._line = commons, line

    def sit(self, incarnation: int) -> None:
        """A new incarnation takes over the counters of the former one."""
        self.forget()
        self._line[_LIFE] = incarnation + 1

    def forget(self) -> None:
        """What was played and not reported is lost with who played it, and must not be waited for.

        For a successor, or for the house once there will be none: whoever sat here is dead.
        """
        self._line[_STEPS] = self._line[_REPORTED]

    def ready_for(self, meeting: int) -> None:
        """Come to that meeting; who asks for a higher number than the others calls them to a new one."""
        self._line[_MEETING] = meeting

    def applied(self) -> None:
        """One more update is in the vector."""
        self._line[_UPDATES] += 1

    def applied_slice(self, *, counts: bool) -> None:
        """One more update is in this server's slice; the first server's are those that make the version."""
        self._line[_SLICE_UPDATES] += 1
        if counts:
            self.applied()

    def slice_version(self) -> int:
        """Updates that this server's slice has seen."""
        version: int = self.commons._house[_VERSION] + self._line[_SLICE_UPDATES]
        return version

    def played(self, steps: int) -> None:
        """So many more environment steps."""
        self._line[_STEPS] += steps

    def reported(self) -> None:
        """All that was played is on its way to the books."""
        self._line[_REPORTED] = self._line[_STEPS]


class CommonsLock:
    """Mutual exclusion between processes that share a region: the kernel lets go when the holder dies, however it does.

    A record lock belongs to a process, so a process must not close another descriptor of the region while it holds it.
    `on_wait` is called while waiting, so that who waits for a frozen holder is not taken for frozen itself.
    """

    def __init__(self, commons: Commons, on_wait: Callable[[], None] = lambda: None) -> None:
        self._fd, self._on_wait = commons.fd, on_wait
        self.waited_s = 0.0

    def __enter__(self) -> None:
        if self._taken():
            return
        begin = time.perf_counter()
        while not self._taken():
            if time.perf_counter() - begin < _SPIN_S:
                os.sched_yield()
            else:
                self._on_wait()  # ends the wait, by an exception, when the run is stopping
                time.sleep(_NAP_S)
        self.waited_s += time.perf_counter() - begin

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class SharedVector:
    """A worker's own weights and gradient beside the commons: step there, copy from there."""

    def __init__(self, seat: Seat) -> None:
        self.seat, self.commons = seat, seat.commons
        self._step = torch.zeros(())
        self._step_word = self._step.numpy()
        self._moments = {**self.commons.moments, "step": self._step}
        self._shared = self.commons.vector.numpy()
        self._own: Array | None = None  # the local weights, seen as an array once

    def adopt(self, parameters: Parameters, version: int) -> None:
        """Copy the shared weights into the local ones."""
        if self._own is None:
            self._own = parameters.vector.numpy()
        self._own[:] = self._shared
        parameters.version = version

    def step(self, parameters: Parameters, version: int) -> None:
        """One optimiser step on the shared vector with the local gradient.

        Adam's own count of steps is not shared: it is the version, which no two processes can tear.
        """
        self._step_word[...] = version
        parameters.optimise(self.commons.vector, parameters.gradient, self._moments, parameters.learning_rate)
        self.seat.applied()


def _bytes(spec: CommonsSpec) -> int:
    return 8 * _LINE * (1 + spec["seats"]) + 4 * spec["size"] * (1 + len(spec["moments"]))
