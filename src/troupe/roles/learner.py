"""Learner: merge what was played as it comes, learn, publish the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator

from troupe.errors import BadMessage
from troupe.ports import Algorithm, Exchange, Ledger, Mailbox
from troupe.roles.cargo import Cargo, pack_weights
from troupe.roles.learn import learn


def learner(
    algorithm: Algorithm, exchange: Exchange, mailbox: Mailbox, ledger: Ledger, *, run: str, shape: Cargo
) -> Iterator[None]:
    """Each turn one message, or a short wait for one."""
    parameters = algorithm.parameters
    merged: dict[str, int] = {}  # messages of each sender's incarnation that were remembered

    def publish(progress: float) -> None:
        weights, version = parameters.weights(), parameters.version
        mailbox.publish("weights", pack_weights(weights, run=run, version=version, learned=merged, progress=progress))

    publish(ledger.progress())
    while True:
        begin = time.perf_counter()
        message = mailbox.receive(timeout_s=0.1)
        arrived = time.perf_counter()
        ledger.spent("wait", arrived - begin)
        if message is None:
            yield
            continue
        try:
            if message.run != run:
                raise BadMessage(f"{message.sender} plays for run {message.run!r}, this is {run!r}")
            played = shape.unpack(message)
        except BadMessage as e:
            ledger.rejected(message, str(e))
            yield
            continue
        ledger.played(played, message)
        merged[f"{message.sender}.{message.incarnation}"] = message.sequence
        progress = ledger.progress()
        algorithm.anneal(progress)
        algorithm.remember(played)
        metrics = learn(algorithm, exchange)
        learned = time.perf_counter()
        ledger.spent("learn", learned - arrived)
        if metrics:
            ledger.learned(metrics)
        if metrics or algorithm.off_policy:
            publish(progress)
            ledger.spent("send", time.perf_counter() - learned)
        yield
