"""Locked and hogwild: the pipeline is cut after learn, and the gradient is applied where the vector lies for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from troupe.commons import CommonsLock, Seat, SharedVector
from troupe.config import Config
from troupe.parameters import Parameters
from troupe.roles.report import listen
from troupe.schemes.scheme import Company, Links, Part, Who, refuses_learning_workers, unused_options
from troupe.types import Metrics


class SharedMemoryExchange:
    """Step the shared optimiser with the local gradient; every `sync_every` batches take the shared weights."""

    def __init__(self, seat: Seat, sync_every: int, lock: CommonsLock | None) -> None:
        self._shared, self._sync_every = SharedVector(seat), sync_every
        self._version = seat.commons.version
        self._lock = lock
        self._guard: AbstractContextManager[None] = lock or nullcontext()
        self._since_sync = 0

    @property
    def waited_s(self) -> float:
        """Seconds at the lock so far."""
        return self._lock.waited_s if self._lock else 0.0

    def begin(self, parameters: Parameters) -> None:
        """The weights as they are now."""
        self._shared.adopt(parameters, self._version())

    def __call__(self, parameters: Parameters) -> Metrics:
        if not parameters.sound():
            return {"applied": 0.0, "refused": 1.0}
        with self._guard:
            version = self._version()
            lag = version - parameters.version
            self._shared.step(parameters, version)
            self._since_sync += 1
            if self._since_sync >= self._sync_every:
                self._since_sync = 0
                self._shared.adopt(parameters, self._version())
        return {"applied": 1.0, "lag": float(lag)}

    def settle(self, parameters: Parameters) -> None:
        """Nothing is open between two rollouts: every gradient is in the vector already."""


class Hogwild:
    """Every worker steps the shared vector without a lock (Niu 2011, Mnih 2016)."""

    plays_here, shares_vector, takes_lock = False, True, False

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """Not for algorithms that learn from one rollout several times with the weights it was played by."""
        scheme = config.scheme
        return refuses_learning_workers(scheme, algorithm) or unused_options(config, allowed={"sync_every"})

    def parts(self, config: Config) -> list[Part]:
        """One worker a process: plays, remembers, learns, and applies to the shared vector."""
        return [Part("worker", rank) for rank in range(config.workers)]

    def topics(self, weights_bytes: int) -> dict[str, int]:
        """The weights lie where everyone sees them."""
        return {}

    def main(self, company: Company) -> Iterator[None]:
        """Keep the books of what the workers report."""
        return listen(company.mailbox, company.ledger, run=company.run, refresh=company.refresh)

    def exchange(self, config: Config, seat: Seat, links: Links, who: Who) -> SharedMemoryExchange:
        """What a worker does with a gradient."""
        lock = CommonsLock(seat.commons, who.on_wait) if self.takes_lock else None
        return SharedMemoryExchange(seat, sync_every(config), lock)


class Locked(Hogwild):
    """Every worker steps the shared vector under one lock, so that a gradient meets weights that are whole."""

    takes_lock = True


def sync_every(config: Config) -> int:
    """Batches between two copies of the shared weights; by default more, the more workers there are."""
    return config.sync_every or max(1, config.workers // 2)
