"""Parameter-server: the pipeline is cut after learn; gradients go up to servers that own slices, weights come down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch

from troupe.commons import Commons, Seat
from troupe.config import Config
from troupe.errors import ConfigError, PeerLost
from troupe.parameters import PAD, SLACK, Optimiser, Parameters
from troupe.ports import Mailbox
from troupe.roles.report import listen
from troupe.roles.server import Limits, server
from troupe.schemes.scheme import Company, Links, Part, Who, refuses_learning_workers, unused_options
from troupe.types import Array, Message, Metrics

SEND_S: Final = 30.0  # a server that is dead is back long before
MOST_WORKERS: Final = 120  # two descriptors each, and one packet carries 253 to the process that serves them


def cuts(size: int, shards: int) -> list[slice]:
    """The vector in `shards` slices, cut at multiples of PAD so that no kernel's lane is torn."""
    lanes = size // PAD
    if shards > lanes:
        raise ConfigError(f"--shards {shards} is more than the {lanes} pieces of {PAD} weights that this network has")
    edges = [PAD * (lanes * i // shards) for i in range(shards + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


class SharedSlice:
    """A server's slice of the commons: there the house sees it, and a server that died finds it as it left it."""

    def __init__(self, commons: Commons, cut: slice, seat: Seat, optimiser: Optimiser, *, first: bool) -> None:
        self._vector = commons.vector[cut]
        self._step = torch.zeros(())
        self._moments = {name: moment[cut] for name, moment in commons.moments.items()} | {"step": self._step}
        self._seat, self._optimiser, self._first = seat, optimiser, first
        self.version = seat.slice_version()
        self.size = len(self._vector)

    def weights(self) -> Array:
        """A view: a message is copied when it is written."""
        out: Array = self._vector.numpy()
        return out

    def apply(self, gradient: Array, learning_rate: float) -> None:
        """Step this slice."""
        self._step.fill_(self.version)
        self._optimiser(self._vector, torch.from_numpy(gradient), self._moments, learning_rate)
        self.version += 1
        self._seat.applied_slice(counts=self._first)


@dataclass
class _Shard:
    """A server, seen from a worker."""

    cut: slice
    mailbox: Mailbox
    name: str
    version: int = -1  # of the weights of it that we hold
    incarnation: int = -1
    handled: dict[str, Any] = field(default_factory=dict)


class ServerExchange:
    """Send each server its slice of the gradient, take the weights that came of the last one.

    With `overlap` the next gradient is made while the servers apply this one, so its weights lack the one before;
    without it, every gradient is waited for.
    """

    def __init__(self, shards: list[_Shard], who: Who, *, overlap: bool) -> None:
        self._shards, self._who, self._overlap = shards, who, overlap
        self._me, self._sequence = f"{who.name}.{who.incarnation}", 0
        self._sent: list[tuple[int, int]] = []  # of each shard: version and incarnation when the last gradient left
        self.waited_s = 0.0

    def begin(self, parameters: Parameters) -> None:
        """The weights that the servers have."""
        for shard in self._shards:
            while shard.version < 0:
                self._take(shard, parameters, 0.1)
        parameters.version = self._shards[0].version

    def __call__(self, parameters: Parameters) -> Metrics:
        if not parameters.sound():
            return {"applied": 0.0, "refused": 1.0}
        begin, lag = time.perf_counter(), 0
        if self._overlap:
            lag = self._await(parameters)
        self._send(parameters)
        if not self._overlap:
            lag = self._await(parameters)
        parameters.version = self._shards[0].version
        self.waited_s += time.perf_counter() - begin
        return {"applied": 1.0, "lag": float(lag)}

    def settle(self, parameters: Parameters) -> None:
        """What is on its way to the servers does not hold up the next rollout."""

    def _send(self, parameters: Parameters) -> None:
        self._sequence += 1
        gradient, meta = parameters.gradient.numpy(), {"learning_rate": parameters.learning_rate}
        self._sent = [(shard.version, shard.incarnation) for shard in self._shards]
        for shard in self._shards:
            message = Message(
                "gradient", self._who.run, self._who.name, self._who.incarnation, self._sequence, shard.version, meta,
                {"gradient": gradient[shard.cut]},
            )  # fmt: skip
            shard.mailbox.send(shard.name, message, SEND_S)

    def _await(self, parameters: Parameters) -> int:
        """Until the last gradient was handled; how many of others' were applied between its weights and it."""
        for shard, (_, served_by) in zip(self._shards, self._sent, strict=False):
            while shard.handled.get(self._me, 0) < self._sequence and shard.incarnation == served_by:
                self._take(shard, parameters, 0.1)  # a successor may never have seen it: one gradient more or less
        return max(0, self._shards[0].version - self._sent[0][0] - 1) if self._sent else 0

    def _take(self, shard: _Shard, parameters: Parameters, timeout_s: float) -> None:
        news = shard.mailbox.wait_latest("weights", timeout_s)
        if news is None:
            self._who.on_wait()
            return
        weights = news.arrays["weights"]
        expected = shard.cut.stop - shard.cut.start
        if weights.shape != (expected,):
            raise PeerLost(f"{shard.name} sent {weights.shape} weights, where its slice has {expected}")
        parameters.vector.numpy()[shard.cut] = weights
        shard.version, shard.handled = news.version, dict(news.meta)
        shard.incarnation = news.incarnation


class ParameterServer:
    """Workers send slices of their gradients to servers, which own the weights (Gorila, Nair 2015)."""

    plays_here, shares_vector = False, True

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """Not for algorithms whose weights must stand still."""
        if config.workers > MOST_WORKERS and config.via != "memory":
            return (
                f"a server can be handed the links of {MOST_WORKERS} workers at most, not of {config.workers}: use "
                f"--workers {MOST_WORKERS} or fewer, or --scheme hogwild"
            )
        allowed = {"shards", "max_lag", "accumulate"}
        return refuses_learning_workers(config.scheme, algorithm) or unused_options(config, allowed=allowed)

    def parts(self, config: Config) -> list[Part]:
        """The servers, then the workers."""
        servers = [Part("server", i, essential=True) for i in range(config.shards)]
        return servers + [Part("worker", i) for i in range(config.workers)]

    def topics(self, weights_bytes: int) -> dict[str, int]:
        """Servers publish, the main process does not."""
        return {}

    def main(self, company: Company) -> Iterator[None]:
        """Keep the books of what the workers report."""
        return listen(company.mailbox, company.ledger, run=company.run, refresh=company.refresh)

    def exchange(self, config: Config, seat: Seat, links: Links, who: Who) -> ServerExchange:
        """What a worker does with a gradient."""
        pieces = cuts(len(seat.commons.vector), config.shards)
        shards = [_Shard(cut, links[f"server-{i}"], f"server-{i}") for i, cut in enumerate(pieces)]
        return ServerExchange(shards, who, overlap=config.overlap)


def serve(
    config: Config, seat: Seat, rank: int, optimiser: Optimiser, workers: Mailbox, books: Mailbox, who: Who
) -> Iterator[None]:
    """The loop of server `rank`."""
    cut = cuts(len(seat.commons.vector), config.shards)[rank]
    slice_ = SharedSlice(seat.commons, cut, seat, optimiser, first=rank == 0)
    norm, rate = float(config.hyper["max_gradient_norm"]), float(config.hyper["learning_rate"])
    limits = Limits(config.max_lag, norm * SLACK, rate * SLACK)
    return server(
        slice_, workers, books, run=who.run, name=who.name, incarnation=who.incarnation,
        accumulate=config.accumulate, limits=limits, timeout_s=SEND_S,
    )  # fmt: skip
