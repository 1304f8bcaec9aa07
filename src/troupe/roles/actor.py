"""Actor: play with the newest weights, sift what happened, send what is worth it, up and down again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from troupe.ports import Algorithm, Mailbox
from troupe.roles.cargo import pack
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
    """Each turn one rollout, or a short wait for weights that know all but the last `lag_rollouts` that we sent."""
    sent, me = 0, f"{name}.{incarnation}"
    learned = -1  # messages of ours in the weights at hand; -1: no weights have come yet
    spent = {"wait_s": 0.0, "play_s": 0.0, "env_s": 0.0}  # since the last message
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
        kept = algorithm.sift(player.play(algorithm, steps))
        spent["wait_s"] += playing - waiting
        spent["play_s"] += time.perf_counter() - playing
        spent["env_s"] += player.env_s - env_s
        if kept is not None:
            message = pack(kept, run=run, sender=name, incarnation=incarnation, sequence=sent + 1, meta=spent)
            mailbox.send("learner", message, timeout_s=send_timeout_s)
            sent += 1
            spent = dict.fromkeys(spent, 0.0)
        yield
