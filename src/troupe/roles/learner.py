"""Learner: merge what was played as it comes, learn, publish the weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

from troupe.errors import BadMessage
from troupe.ports import Algorithm, Exchange, Ledger, Mailbox
from troupe.roles.cargo import Cargo, pack_weights
from troupe.roles.learn import learn
from troupe.types import Episodes, Message, Pace, Rollout, Scalar


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
    max_lag: int = 0,
) -> Iterator[None]:
    """Each turn one message, or a short wait for one. `pace` says how much actors shall send; `max_lag` how many
    versions old what they played may be, 0 any."""
    parameters = algorithm.parameters
    merged: dict[str, tuple[int, int]] = {}  # sender -> its incarnation, and which of its messages was done with last
    life = secrets.token_hex(4)  # of this process: whoever takes over knows nothing of what this one was sent

    def publish(progress: float) -> None:
        learned = {f"{sender}.{incarnation}": sequence for sender, (incarnation, sequence) in merged.items()}
        asked = pace()
        meta: dict[str, Scalar] = {
            **learned, "progress": progress, "rollouts": asked.rollouts, "rest_s": asked.rest_s, "life": life,
        }  # fmt: skip
        mailbox.publish("weights", pack_weights(parameters.weights(), run, name, parameters.version, meta))

    publish(ledger.progress())
    while True:
        begin, busy = time.perf_counter(), time.thread_time()
        message = mailbox.receive(timeout_s=0.1)
        played: Rollout | Episodes | None = None
        if message is not None:
            if message.run == run:  # whether it is refused or not: its sender need not wait for it
                merged[message.sender] = message.incarnation, message.sequence
            try:
                played = _opened(message, run, shape, parameters.version - max_lag if max_lag else 0)
            except BadMessage as e:
                ledger.rejected(message, str(e))
                publish(ledger.progress())
        arrived, parsed_s = time.perf_counter(), time.thread_time() - busy
        ledger.spent("parse", parsed_s)
        ledger.spent("wait", max(0.0, arrived - begin - parsed_s))
        if message is None or played is None:
            yield
            continue
        ledger.played(played, message)
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


def _opened(message: Message, run: str, shape: Cargo, oldest: int) -> Rollout | Episodes:
    """What is in it; BadMessage where it is of another run, not as agreed, or played with weights before `oldest`."""
    if message.run != run:
        raise BadMessage(f"{message.sender} plays for run {message.run!r}, this is {run!r}")
    played = shape.unpack(message)
    if played.version < oldest:
        raise BadMessage(f"{message.sender}: played with version {played.version}, --max-lag wants {oldest} or newer")
    return played
