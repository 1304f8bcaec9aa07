"""Learner: merge what was played as it comes, learn, publish the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from troupe.errors import BadMessage
from troupe.ports import Algorithm, Exchange, Ledger, Mailbox
from troupe.roles.cargo import Cargo, pack_weights
from troupe.roles.learn import learn
from troupe.types import Episodes, Pace, Rollout


def learner(
    algorithm: Algorithm,
    exchange: Exchange,
    mailbox: Mailbox,
    ledger: Ledger,
    *,
    run: str,
    shape: Cargo,
    name: str = "learner",
    pace: Callable[[], Pace] = Pace,
) -> Iterator[None]:
    """Each turn one message, or a short wait for one. `pace` says how much actors shall send."""
    parameters = algorithm.parameters
    merged: dict[str, tuple[int, int]] = {}  # sender -> its incarnation, and which of its messages was remembered last

    def publish(progress: float) -> None:
        learned = {f"{sender}.{life}": sequence for sender, (life, sequence) in merged.items()}
        asked = pace()
        meta = {**learned, "progress": progress, "rollouts": asked.rollouts, "rest_s": asked.rest_s}
        mailbox.publish("weights", pack_weights(parameters.weights(), run, name, parameters.version, meta))

    publish(ledger.progress())
    while True:
        begin, busy = time.perf_counter(), time.thread_time()
        message = mailbox.receive(timeout_s=0.1)
        played: Rollout | Episodes | None = None
        if message is not None:
            try:
                if message.run != run:
                    raise BadMessage(f"{message.sender} plays for run {message.run!r}, this is {run!r}")
                played = shape.unpack(message)
            except BadMessage as e:
                ledger.rejected(message, str(e))
        arrived, parsed_s = time.perf_counter(), time.thread_time() - busy
        ledger.spent("parse", parsed_s)
        ledger.spent("wait", max(0.0, arrived - begin - parsed_s))
        if message is None or played is None:
            yield
            continue
        ledger.played(played, message)
        merged[message.sender] = message.incarnation, message.sequence
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
