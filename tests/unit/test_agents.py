"""An actor plays every learner's newest agent in turn, waits for what it owes, and rests as long as it is asked to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from troupe import build
from troupe.ports import Algorithm
from troupe.resolve import resolve
from troupe.roles.actor import Agents, actor
from troupe.roles.cargo import pack_weights
from troupe.transports.memory import MemoryHub
from troupe.types import Message

CONFIG = resolve({"env": "CartPole-v1", "algo": "a3c", "backend": "gymnasium", "envs": 2, "rollout_steps": 4})


@pytest.fixture
def algorithm() -> Algorithm:
    player = build.build_player(CONFIG, 0, 0)
    made = build.build_algorithm(CONFIG, player.envs.observation_space, player.envs.action_space)
    player.envs.close()
    return made


def weights(algorithm: Algorithm, sender: str, version: int, **meta: float) -> Message:
    vector = np.full_like(algorithm.parameters.weights(), version / 1000)
    return pack_weights(vector, "run", sender, version, {"progress": 0.0, **meta})


def test_the_agents_of_several_learners_play_in_turn_each_the_newest_of_its_learner(algorithm: Algorithm) -> None:
    agents, played = Agents("actor-0.0"), []
    for news in (weights(algorithm, "a", 1), weights(algorithm, "b", 11), weights(algorithm, "a", 2)):
        agents.take(news)
    for _ in range(4):
        agents.enter(algorithm)
        played.append(algorithm.parameters.version)
        assert algorithm.parameters.weights()[0] == np.float32(algorithm.parameters.version / 1000)
    assert played == [2, 11, 2, 11]
    agents.take(weights(algorithm, "b", 12))
    agents.enter(algorithm)
    agents.enter(algorithm)
    assert algorithm.parameters.version == 12


def test_what_any_learner_has_merged_is_learned_from(algorithm: Algorithm) -> None:
    agents = Agents("actor-0.3")
    assert agents.learned == -1
    agents.take(weights(algorithm, "a", 1, **{"actor-0.3": 2, "actor-0.2": 9}))
    assert agents.learned == 2
    agents.take(weights(algorithm, "b", 1, **{"actor-0.3": 5}))
    assert agents.learned == 5


def turns(rest_s: float, algorithm: Algorithm, count: int) -> int:
    """How many messages an actor sends in so many turns, where a learner merges each at once and asks for a rest."""
    hub = MemoryHub()
    learner, mine = hub.mailbox("learner"), hub.mailbox("actor-0")
    loop = actor(
        algorithm, build.build_player(CONFIG, 0, 0), mine, run="run", name="actor-0", incarnation=0, steps=4,
        lag_rollouts=0, send_timeout_s=1.0,
    )  # fmt: skip
    learner.publish("weights", weights(algorithm, "learner", 0, rest_s=rest_s))
    sent = 0
    for _ in range(count):
        next(loop)
        if (message := learner.receive(0.0)) is not None:
            sent += 1
            assert message.sequence == sent
            meta = {"actor-0.0": message.sequence, "rest_s": rest_s}
            learner.publish("weights", weights(algorithm, "learner", sent, **meta))
    return sent


def test_who_is_asked_to_rest_sends_nothing_meanwhile(algorithm: Algorithm) -> None:
    assert turns(0.0, algorithm, 20) == 20
    assert turns(3600.0, algorithm, 20) == 0


def test_what_a_learner_that_is_gone_was_sent_is_not_waited_for(algorithm: Algorithm) -> None:
    agents = Agents("actor-0.0")
    agents.take(life(weights(algorithm, "a", 1, **{"actor-0.0": 2}), "first"), 5)
    assert agents.learned == 2
    agents.take(life(weights(algorithm, "a", 2, **{"actor-0.0": 3}), "first"), 6)
    assert agents.learned == 3
    agents.take(life(weights(algorithm, "a", 1), "second"), 7)
    assert agents.learned == 7
    agents.take(life(weights(algorithm, "a", 2, **{"actor-0.0": 8}), "second"), 9)
    assert agents.learned == 8


def life(news: Message, which: str) -> Message:
    return replace(news, meta={**news.meta, "life": which})
