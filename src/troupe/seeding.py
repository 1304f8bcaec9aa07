"""One root seed -> an independent random stream per (role, rank, incarnation)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from troupe.types import Json


@dataclass(frozen=True)
class Seeds:
    """Streams that never overlap, whoever asks first: a stream depends on its name alone."""

    root: int

    def sequence(self, role: str, rank: int = 0, incarnation: int = 0) -> np.random.SeedSequence:
        """The seed sequence of one role's process."""
        return np.random.SeedSequence(self.root, spawn_key=(zlib.crc32(role.encode()), rank, incarnation))

    def stream(self, role: str, rank: int = 0, incarnation: int = 0) -> np.random.Generator:
        """A generator of one role's own."""
        return np.random.Generator(np.random.PCG64(self.sequence(role, rank, incarnation)))

    def integer(self, role: str, rank: int = 0, incarnation: int = 0) -> int:
        """A 31-bit seed for libraries that take nothing better."""
        return int(self.sequence(role, rank, incarnation).generate_state(1)[0] >> 1)


def rng_state(rng: np.random.Generator) -> Json:
    """The state of `rng` as plain values; its 128-bit integers become strings, which JSON keeps exact."""
    state = rng.bit_generator.state
    return {**state, "state": {key: str(value) for key, value in state["state"].items()}}


def set_rng_state(rng: np.random.Generator, state: Json) -> None:
    """Put `rng` back to where `rng_state` saw it."""
    rng.bit_generator.state = {**state, "state": {key: int(value) for key, value in state["state"].items()}}
