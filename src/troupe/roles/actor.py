"""Actor: play with the newest weights, sift what happened, send what is worth it, up and down again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from troupe.errors import BadMessage
from troupe.ports import Algorithm, Mailbox
from troupe.roles.cargo import check_weights, pack
from troupe.roles.play import Player
from troupe.types import Message, Pace, Scalar


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
    """Each turn one rollout, or a short wait: for weights that know all but the last `lag_rollouts` that we sent, or
    for the rest that the learner asked for. Where several learners publish, their agents play in turn."""
    agents, sent, refused = Agents(f"{name}.{incarnation}"), 0, 0
    sifted = 0  # rollouts since the last message
    rested_s = time.monotonic()  # when the last message left, or a rest after it was over
    spent = {"wait_s": 0.0, "play_s": 0.0, "env_s": 0.0}  # since the last message
    while True:
        waiting = time.perf_counter()
        while True:
            ready = agents.learned >= max(0, sent - lag_rollouts) and time.monotonic() - rested_s >= agents.pace.rest_s
            news = mailbox.wait_latest("weights", 0.0 if ready else 0.1)
            if news is not None:
                try:
                    check_weights(news, run, len(algorithm.parameters.vector))
                except BadMessage as e:
                    refused += 1
                    print(f"troupe: {name} refused what was published: {e}", file=sys.stderr, flush=True)
                else:
                    agents.take(news, sent)
            elif ready:
                break
            else:
                player.beat(0)
                yield
        agents.enter(algorithm)
        playing, env_s = time.perf_counter(), player.env_s
        sifted += 1
        kept = algorithm.sift(player.play(algorithm, steps), hold=sifted < agents.pace.rollouts)
        spent["wait_s"] += playing - waiting
        spent["play_s"] += time.perf_counter() - playing
        spent["env_s"] += player.env_s - env_s
        if kept is not None:
            meta = {**spent, "refused": refused}
            message = pack(kept, run=run, sender=name, incarnation=incarnation, sequence=sent + 1, meta=meta)
            mailbox.send("learner", message, timeout_s=send_timeout_s)
            sent, sifted = sent + 1, 0
            spent, rested_s = dict.fromkeys(spent, 0.0), time.monotonic()
        yield


class Agents:
    """The newest weights of every learner."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._newest: dict[str, Message] = {}  # learner -> its weights; whose turn it is comes first
        self._loaded: Message | None = None
        self._lives: dict[str, Scalar] = {}  # learner -> which of its processes published last
        self._forgiven = 0  # messages of ours that a process took with it which is gone: nobody will learn from them
        self.learned = -1  # messages of ours that some learner has in its weights; -1: no weights have come yet
        self.pace = Pace()  # as the learner that published last asks for it

    def take(self, news: Message, sent: int = 0) -> None:
        """Somebody published, when we had sent `sent` messages."""
        life = news.meta.get("life", "")
        if self._lives.setdefault(news.sender, life) != life:
            self._lives[news.sender], self._forgiven = life, sent
        self._newest[news.sender] = news
        learned = (int(weights.meta.get(self._me, 0)) for weights in self._newest.values())
        self.learned = max(self._forgiven, *learned)
        self.pace = Pace(int(news.meta.get("rollouts", 1)), float(news.meta.get("rest_s", 0.0)))

    def enter(self, algorithm: Algorithm) -> None:
        """The next one plays."""
        sender = next(iter(self._newest))
        weights = self._newest.pop(sender)
        self._newest[sender] = weights
        if weights is not self._loaded:
            algorithm.parameters.load_weights(weights.arrays["weights"], weights.version)
            algorithm.anneal(float(weights.meta["progress"]))
            self._loaded = weights
