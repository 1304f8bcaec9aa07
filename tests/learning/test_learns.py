"""Every algorithm learns CartPole in every scheme, with its preset, as the reference environment sees it."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

from troupe import api
from troupe.algos import ALGORITHMS
from troupe.errors import ConfigError
from troupe.resolve import check_pairs, resolve
from troupe.schemes import SCHEMES

ENV = "CartPole-v1"
BEST = 500.0
EPISODES = 100
STEPS = 600_000  # of training: several times what each of them takes
SEED = 1


@pytest.fixture(scope="module")
def random_score() -> float:
    """What choosing at random earns; about 22."""
    env, returns = gymnasium.make(ENV), []
    env.action_space.seed(SEED)
    for episode in range(EPISODES):
        env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return float(np.mean(returns))


def taken(scheme: str, algo: str) -> bool:
    """Whether `troupe train` takes the pair; which it refuses is told by name in tests/unit/test_config.py."""
    try:
        check_pairs(resolve({"env": ENV, "algo": algo, "scheme": scheme, "workers": 1}))
    except ConfigError:
        return False
    return True


PAIRS = [(scheme, algo) for scheme in sorted(SCHEMES) for algo in sorted(ALGORITHMS) if taken(scheme, algo)]


@pytest.mark.parametrize(("scheme", "algo"), PAIRS)
def test_cartpole_is_learned(
    scheme: str, algo: str, random_score: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path))
    workers = 2 if SCHEMES[scheme].shares_vector else 1  # who shares a vector shares it with somebody
    outcome = api.train(
        ENV, algo=algo, scheme=scheme, workers=workers, seed=SEED, name="run", until=f"solved,steps={STEPS}"
    )
    score = api.load("run").evaluate(EPISODES, seed=SEED + 1).mean  # other episodes than those that ended the training
    assert 15 < random_score < 30
    assert score > random_score + 0.8 * (BEST - random_score)
    assert outcome.met, f"{algo} in {scheme} did not solve it in {STEPS:,} steps: {outcome.evaluation}"
