"""Worker: actor and learner in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator

from troupe.ports import Algorithm, Exchange, Ledger
from troupe.roles.learn import learn
from troupe.roles.play import Player


def worker(algorithm: Algorithm, exchange: Exchange, player: Player, ledger: Ledger, *, steps: int) -> Iterator[None]:
    """Each turn: play, sift, remember, learn."""
    exchange.begin(algorithm.parameters)
    while True:
        begin = time.perf_counter()
        kept = algorithm.sift(player.play(algorithm, steps))
        played = time.perf_counter()
        ledger.spent("play", played - begin)
        if kept is None:
            yield
            continue
        ledger.played(kept)
        algorithm.anneal(ledger.progress())
        algorithm.remember(kept)
        waited_s = exchange.waited_s
        metrics = learn(algorithm, exchange)
        waited_s = exchange.waited_s - waited_s
        ledger.spent("exchange", waited_s)
        ledger.spent("learn", time.perf_counter() - played - waited_s)
        if metrics:
            ledger.learned(metrics)
        yield
