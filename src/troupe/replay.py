"""Replay: a ring of transitions in one's own memory, or one share each of a memory that many workers sample from.

Memory: a cache line of two 64-bit counters for each share, then one array a field, [shares, size, ...]. Each worker
writes its own share only, so nobody waits for anybody: a counter of what is begun goes up before the data is written,
one of what is committed after it. A reader that finds a row begun anew while it copied draws again.
Stores become visible in program order on x86; elsewhere a torn row would be learned from once, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from troupe.errors import ConfigError, TroupeError
from troupe.region import available_bytes
from troupe.transitions import Transitions
from troupe.types import Array, State

_LINE: Final = 64  # bytes of a cache line: two writers never share one
_BEGUN, _COMMITTED = 0, 1
_PATIENCE: Final = 10_000  # draws that writers may spoil; one in a hundred is already rare
_FIELDS: Final = tuple(field.name for field in fields(Transitions))


@dataclass(frozen=True)
class ReplayShape:
    """`shares` rings of `size` transitions each."""

    size: int
    shares: int
    observation: tuple[int, ...]
    observation_dtype: str

    def cells(self) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
        """Shape and dtype of one transition's part in each field."""
        seen = (self.observation, np.dtype(self.observation_dtype))
        number: tuple[tuple[int, ...], np.dtype[np.generic]] = ((), np.dtype(np.float32))
        return {
            "observations": seen, "actions": ((), np.dtype(np.int64)), "returns": number,
            "next_observations": seen, "discounts": number,
        }  # fmt: skip

    def nbytes(self) -> int:
        """Of the whole memory."""
        rows = self.shares * self.size
        return self.shares * _LINE + sum(_padded(rows * _cell_bytes(*cell)) for cell in self.cells().values())


def _cell_bytes(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _padded(size: int) -> int:
    return -(-size // _LINE) * _LINE


def check_fits(shape: ReplayShape) -> None:
    """ConfigError where there is not memory enough: what is asked for is only taken when it is written to."""
    needed, free = shape.nbytes(), available_bytes()
    if needed > free:
        raise ConfigError(
            f"--replay-size {shape.size} takes {needed >> 20} MiB for {shape.shares} such memories, where "
            f"{free >> 20} MiB are free: take --replay-size {int(shape.size * 0.8 * free / needed)} or less"
        )


class Replay:
    """One worker's sight of the memory: it adds to its own share and samples from all of them alike."""

    def __init__(self, shape: ReplayShape, memory: memoryview | Array | None = None, *, share: int = 0) -> None:
        """Over `memory`, which begins as zeros and is shared; without it, over memory of one's own."""
        if memory is None:
            check_fits(shape)
            memory = np.zeros(shape.nbytes(), np.uint8)  # pages are taken when they are first written to
        raw = np.frombuffer(memory, np.uint8)
        if raw.nbytes < shape.nbytes():
            raise TroupeError(f"a replay memory of {shape.nbytes()} bytes was agreed, {raw.nbytes} were handed over")
        self.shape = shape
        words = raw[: shape.shares * _LINE].view(np.int64).reshape(shape.shares, -1)
        self._begun, self._committed = words[:, _BEGUN], words[:, _COMMITTED]
        self._share = share
        self._rows: dict[str, Array] = {}  # [shares * size, ...]
        self._own: dict[str, Array] = {}  # [size, ...]
        offset = shape.shares * _LINE
        for name, (cell, dtype) in shape.cells().items():
            size = shape.shares * shape.size * _cell_bytes(cell, dtype)
            self._rows[name] = raw[offset : offset + size].view(dtype).reshape(shape.shares * shape.size, *cell)
            self._own[name] = self._rows[name][share * shape.size : (share + 1) * shape.size]
            offset += _padded(size)

    def __len__(self) -> int:
        """Transitions that can be sampled, of all shares."""
        first, after = self._readable()
        return int((after - first).sum())

    def add(self, transitions: Transitions) -> None:
        """Write them over the oldest of one's own share."""
        size, new = self.shape.size, min(len(transitions), self.shape.size)
        begin = int(self._committed[self._share]) + len(transitions) - new
        # A worker that was killed in the middle may have begun more than this: those rows stay out of reach until then.
        self._begun[self._share] = max(int(self._begun[self._share]), begin + new)
        slot = begin % size
        before_the_edge = min(new, size - slot)
        for name, ring in self._own.items():
            rows = getattr(transitions, name)[len(transitions) - new :]
            ring[slot : slot + before_the_edge] = rows[:before_the_edge]
            ring[: new - before_the_edge] = rows[before_the_edge:]
        self._committed[self._share] = begin + new

    def sample(self, batches: int, batch: int, rng: np.random.Generator, *, with_replacement: bool) -> Transitions:
        """`batches` batches of `batch`, one after the other, uniformly from all shares.

        Without replacement no transition is twice in one batch; there must be `batch` of them.
        """
        size = self.shape.size
        for _ in range(_PATIENCE):
            first, after = self._readable()
            counts = after - first
            ends = counts.cumsum()
            if ends[-1] < (1 if with_replacement else batch):  # all written anew between one look and the next
                continue
            if with_replacement:
                drawn = rng.integers(ends[-1], size=batches * batch)
            else:
                each = (rng.choice(ends[-1], batch, replace=False, shuffle=False) for _ in range(batches))
                drawn = np.concatenate(list(each))
            share = ends.searchsorted(drawn, side="right")
            positions = drawn - (ends - counts - first)[share]
            rows = share * size + positions % size
            taken = Transitions(**{name: field.take(rows, 0) for name, field in self._rows.items()})
            if (positions >= self._begun[share] - size).all():  # nothing was begun anew under our hands
                return taken
        raise TroupeError(
            f"no {batch} transitions stay in a replay memory of {self.shape.shares} x {size} for as long as it takes "
            "to copy them: take a larger --replay-size"
        )

    def _readable(self) -> tuple[Array, Array]:
        """First position that can be read, and the one after the last, of each share; row = position % size."""
        after = self._committed.copy()  # before what is begun: a writer in between only makes it less
        first = np.clip(self._begun - self.shape.size, 0, after)
        return first, after

    def state(self) -> State:
        """One's own share, the oldest first; what was never written is not in it."""
        written, size = int(self._committed[self._share]), self.shape.size
        kept = min(written, size)
        slots = np.arange(written - kept, written) % size
        return State({name: ring[slots] for name, ring in self._own.items()}, {"written": written})

    def restore(self, state: State) -> None:
        """Hold again what `state` held; of more than fits now, the newest."""
        transitions = Transitions(**{name: state.arrays[name] for name in _FIELDS})
        written = int(state.values["written"])
        whole = len(transitions) >= min(written, self.shape.size)  # else it comes from a smaller ring: count anew
        begin = written - len(transitions) if whole else 0
        self._begun[self._share] = self._committed[self._share] = begin  # so that each row returns to its slot
        self.add(transitions)
