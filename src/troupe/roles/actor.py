"""Actor: play with the newest weights, send what happened, up and down again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from troupe.ports import Algorithm, Mailbox
from troupe.roles.cargo import pack_rollout
from troupe.roles.play import Player


def actor(
    algorithm: Algorithm,
    player: Player,
    mailbox: Mailbox,
    *,
    run: str,
    name: str,
    incarnation: int,
    steps: int,
    lag_rollouts: int,
    send_timeout_s: float,
) -> Iterator[None]:
    """Each turn one rollout, or a short wait for weights that know all but the last `lag_rollouts` of ours."""
    sent, me = 0, f"{name}.{incarnation}"
    learned = -1  # rollouts of ours in the weights at hand; -1: no weights have come yet
    while True:
        waiting = time.perf_counter()
        while True:
            news = mailbox.wait_latest("weights", 0.0 if 0 <= learned >= sent - lag_rollouts else 0.1)
            if news is not None:
                algorithm.parameters.load_weights(news.arrays["weights"], news.version)
                algorithm.anneal(float(news.meta["progress"]))
                learned = int(news.meta.get(me, 0))
            if 0 <= learned >= sent - lag_rollouts:
                break
            player.beat(0)
            yield
        playing, env_s = time.perf_counter(), player.env_s
        rollout = player.play(algorithm, steps)
        done = time.perf_counter()
        meta = {"wait_s": playing - waiting, "play_s": done - playing, "env_s": player.env_s - env_s}
        message = pack_rollout(rollout, run=run, sender=name, incarnation=incarnation, sequence=sent + 1, meta=meta)
        mailbox.send("learner", message, timeout_s=send_timeout_s)
        sent += 1
        yield
