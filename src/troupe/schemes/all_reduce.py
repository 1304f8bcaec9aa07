"""All-reduce: the pipeline is cut after learn; everybody's gradients are averaged, and all take the same step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, FileStore, ProcessGroupGloo

from troupe.commons import Seat, SharedVector
from troupe.config import Config
from troupe.errors import PeerLost
from troupe.parameters import PAD, Parameters
from troupe.roles.report import listen
from troupe.schemes.scheme import Company, Links, Part, Who, refuses_one_learner, unused_options
from troupe.types import Metrics

MEET_S = 5.0  # to connect once everybody is ready; longer only where somebody died at that very moment
_FOREVER = timedelta(days=365)  # others may play for as long as they like; who is gone is noticed by the commons
_SPIN_S, _NAP_S = 100e-6, 50e-6
_PRESENT, _RATE = -2, -1  # places behind the gradient: who has one, and its learning rate
_abandoned: list[object] = []  # groups with an operation open: freeing one would wait for those that are gone


class AllReduceExchange:
    """Averages gradients with torch's gloo, on loopback.

    A lost worker is a change of membership: whoever notices calls everybody to a new meeting, by its number in the
    commons, and all go on from the weights there, which the lowest seat keeps up to date. A worker that has no batch
    left in this rollout goes on taking part, with nothing, until nobody has one.
    """

    def __init__(self, seat: Seat, workers: int, who: Who, *, meet_s: float) -> None:
        self._seat, self._rank, self._who, self._workers = seat, who.rank, who, workers
        self._commons, self._meet_s = seat.commons, meet_s
        self._group: ProcessGroupGloo | None = None
        self._met = 0  # the number of the meeting that the group is of
        self._open = torch.zeros(len(self._commons.vector) + PAD)
        self.waited_s = 0.0

    def begin(self, parameters: Parameters) -> None:
        """Call a meeting, or come to the one that somebody called since ours; then go on from the commons."""
        commons, self._group = self._commons, None
        meeting = max(commons.meeting(), self._met + 1) if self._met else commons.meeting() + 1
        while True:
            meeting = max(meeting, commons.meeting())
            self._seat.ready_for(meeting)
            if commons.all_at(meeting):
                if self._meet(meeting):
                    break
                meeting += 1
            self._who.on_wait()
            time.sleep(_NAP_S)
        SharedVector(self._seat).adopt(parameters, commons.version())
        for name, moment in commons.moments.items():
            parameters.moments[name].copy_(moment)
        parameters.moments["step"].fill_(parameters.version)

    def __call__(self, parameters: Parameters) -> Metrics:
        sound = parameters.sound()
        self._open.zero_()
        if sound:
            self._open[:-PAD] = parameters.gradient
            self._open[_PRESENT], self._open[_RATE] = 1.0, parameters.learning_rate
        applied = self._together(parameters) and sound
        return {"applied": float(applied), "refused": float(not sound), "lag": 0.0}

    def settle(self, parameters: Parameters) -> None:
        """Take part with nothing until nobody has a batch left."""
        while self._workers > 1:
            self._open.zero_()
            if not self._together(parameters):
                return

    def _together(self, parameters: Parameters) -> bool:
        """One step of all; False where nobody brought a gradient, or where somebody was lost on the way."""
        begin = time.perf_counter()
        try:
            whole = self._reduce()
            if not whole:
                self.begin(parameters)
        finally:
            self.waited_s += time.perf_counter() - begin
        present = float(self._open[_PRESENT]) if whole else 0.0
        if present == 0.0:
            return False
        torch.div(self._open[:-PAD], present, out=parameters.gradient)
        rate = parameters.learning_rate if self._workers == 1 else float(self._open[_RATE]) / present
        parameters.optimise(parameters.vector, parameters.gradient, parameters.moments, rate)
        parameters.version += 1
        if self._rank == 0:
            self._commons.vector.copy_(parameters.vector)
            for name, moment in self._commons.moments.items():
                moment.copy_(parameters.moments[name])
            self._seat.applied()
        return True

    def _reduce(self) -> bool:
        """Sum what is open over all workers; False where the group is no more."""
        assert self._group is not None
        if self._commons.meeting() != self._met:
            return False
        options = AllreduceOptions()
        options.timeout = _FOREVER
        begin = time.perf_counter()
        try:
            work = self._group.allreduce([self._open], options)  # type: ignore[attr-defined]
            while not work.is_completed():
                if time.perf_counter() - begin < _SPIN_S:
                    os.sched_yield()
                    continue
                if self._commons.meeting() != self._met:
                    self._abandon(work)
                    return False
                self._who.on_wait()
                time.sleep(_NAP_S)
            work.wait()
        except PeerLost:  # the run is stopping
            self._abandon(work)
            raise
        except RuntimeError:  # a peer is gone, and gloo says so first
            return False
        return True

    def _abandon(self, work: object) -> None:
        """Leave the group to itself; what it still writes to is ours no more."""
        _abandoned.extend((self._group, work, self._open))
        self._open = torch.zeros_like(self._open)

    def _meet(self, meeting: int) -> bool:
        """Connect to everybody, who are all about to do the same; False where one of them was lost meanwhile."""
        store = FileStore(str(self._who.folder / f"meeting-{meeting}"), self._workers)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # this machine, nothing but it
        options._timeout = timedelta(seconds=self._meet_s)
        try:
            self._group = ProcessGroupGloo(store, self._rank, self._workers, options)
        except RuntimeError:
            return False
        self._met = meeting
        return True


class AllReduce:
    """The gradients of all workers are averaged, and all take the same step."""

    plays_here, shares_vector = False, True

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """Several workers in one thread could only wait for each other."""
        if config.via == "memory" and config.workers > 1:
            return "scheme all-reduce needs a process for each worker: use --via shared, or --workers 1"
        return refuses_one_learner(config.scheme, algorithm) or unused_options(config, allowed=set())

    def parts(self, config: Config) -> list[Part]:
        """One worker a process; they cannot do without any of them."""
        return [Part("worker", rank, essential=True) for rank in range(config.workers)]

    def topics(self, weights_bytes: int) -> dict[str, int]:
        """Gradients travel among the workers alone."""
        return {}

    def main(self, company: Company) -> Iterator[None]:
        """Keep the books of what the workers report."""
        return listen(company.mailbox, company.ledger, run=company.run, refresh=company.refresh)

    def exchange(self, config: Config, seat: Seat, links: Links, who: Who) -> AllReduceExchange:
        """What a worker does with a gradient."""
        return AllReduceExchange(seat, config.workers, who, meet_s=min(MEET_S, config.step_timeout_s / 2))
