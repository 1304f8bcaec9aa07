"""All-reduce: the pipeline is cut after learn; everybody's gradients are averaged, and all take the same step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from troupe.commons import Seat, SharedVector
from troupe.config import Config
from troupe.parameters import PAD, Parameters
from troupe.roles.report import listen
from troupe.schemes.scheme import Company, Links, Part, Who, unused_options
from troupe.types import Metrics

MEET_S = 5.0  # one attempt to meet; whoever comes later is met at the next
_SPIN_S, _NAP_S = 100e-6, 50e-6
_PRESENT, _RATE = -2, -1  # places behind the gradient: who has one, and its learning rate


class AllReduceExchange:
    """Averages gradients with torch.distributed's gloo, on loopback.

    A lost worker is a change of membership: the others meet again with its successor, and all go on from what the
    commons hold, which the lowest seat keeps up to date. A worker that has no batch left in this rollout goes on
    taking part, with nothing, until nobody has one.
    """

    def __init__(self, seat: Seat, who: Who) -> None:
        self._seat, self._rank, self._folder, self._who = seat, who.rank, who.folder, who
        self._commons = seat.commons
        self._workers = len(self._commons.lives())
        self._met: tuple[int, ...] = ()
        self._open = torch.zeros(len(self._commons.vector) + PAD)
        self.waited_s = 0.0

    def begin(self, parameters: Parameters) -> None:
        """Meet the others, and begin where the commons are."""
        while True:
            lives = self._commons.lives()
            if all(lives) and lives != self._met and self._meet(lives):
                break
            self._who.on_wait()
            time.sleep(_NAP_S)
        self._met = lives
        SharedVector(self._seat).adopt(parameters, self._commons.version())
        for name, moment in self._commons.moments.items():
            parameters.moments[name].copy_(moment)
        parameters.moments["step"].fill_(parameters.version)

    def __call__(self, parameters: Parameters) -> Metrics:
        finite = parameters.finite()
        self._open.zero_()
        if finite:
            self._open[:-PAD] = parameters.gradient
            self._open[_PRESENT], self._open[_RATE] = 1.0, parameters.learning_rate
        return {"applied": float(self._together(parameters) and finite), "lag": 0.0}

    def settle(self, parameters: Parameters) -> None:
        """Take part with nothing until nobody has a batch left."""
        if self._workers == 1:
            return
        while True:
            self._open.zero_()
            if not self._together(parameters):
                return

    def _together(self, parameters: Parameters) -> bool:
        """One meeting of all; False where nobody brought a gradient, or where somebody was lost on the way."""
        begin = time.perf_counter()
        try:
            self._reduce()
        except RuntimeError:  # a peer is gone, and gloo with it
            self.begin(parameters)
            return False
        finally:
            self.waited_s += time.perf_counter() - begin
        present = float(self._open[_PRESENT])
        if present == 0.0:
            return False
        torch.div(self._open[:-PAD], present, out=parameters.gradient)
        rate = parameters.learning_rate if present == 1.0 and self._workers == 1 else float(self._open[_RATE]) / present
        parameters.optimise(parameters.vector, parameters.gradient, parameters.moments, rate)
        parameters.version += 1
        if self._rank == 0:
            self._commons.vector.copy_(parameters.vector)
            for name, moment in self._commons.moments.items():
                moment.copy_(parameters.moments[name])
            self._seat.applied()
        return True

    def _reduce(self) -> None:
        work = dist.all_reduce(self._open, async_op=True)
        begin = time.perf_counter()
        while not work.is_completed():
            if time.perf_counter() - begin < _SPIN_S:
                os.sched_yield()
            else:
                if self._commons.lives() != self._met:  # somebody's successor waits for us
                    raise RuntimeError("a worker was replaced")
                self._who.on_wait()
                time.sleep(_NAP_S)
        work.wait()

    def _meet(self, lives: tuple[int, ...]) -> bool:
        """Make a group of the incarnations `lives`; False where not all came."""
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this machine, and nothing but it
        store = FileStore(str(self._folder / f"meeting-{'-'.join(map(str, lives))}"), self._workers)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=self._rank, world_size=self._workers, timeout=timedelta(seconds=MEET_S)
            )
        except RuntimeError:
            return False
        return True


class AllReduce:
    """Synchronous data-parallel: as many rollouts as workers, one step."""

    plays_here, shares_vector = False, True

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """Several workers in one thread could only wait for each other."""
        if config.via == "memory" and config.workers > 1:
            return "scheme all-reduce needs a process for each worker: use --via shared, or --workers 1"
        return unused_options(config, allowed=set())

    def parts(self, config: Config) -> list[Part]:
        """One worker a process."""
        return [Part("worker", rank) for rank in range(config.workers)]

    def topics(self, weights_bytes: int) -> dict[str, int]:
        """Gradients travel among the workers alone."""
        return {}

    def main(self, company: Company) -> Iterator[None]:
        """Keep the books of what the workers report."""
        return listen(company.mailbox, company.ledger, run=company.run, refresh=company.refresh)

    def exchange(self, config: Config, seat: Seat, links: Links, who: Who) -> AllReduceExchange:
        """What a worker does with a gradient."""
        return AllReduceExchange(seat, who)
