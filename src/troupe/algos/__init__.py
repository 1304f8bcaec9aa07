"""The algorithms, by name. To add one: one file, one line here."""

from __future__ import annotations

from typing import Any

ALGORITHMS: dict[str, str] = {
    "ppo": "troupe.algos.ppo:PPO",
    "a3c": "troupe.algos.a3c:A3C",
    "impala": "troupe.algos.impala:IMPALA",
    "dqn": "troupe.algos.dqn:DQN",
    "elite": "troupe.algos.elite:Elite",
}


def algorithm_class(name: str) -> Any:
    """The class behind `name`; imported only when it is asked for, since it brings torch."""
    from importlib import import_module

    module, _, attribute = ALGORITHMS[name].partition(":")
    return getattr(import_module(module), attribute)
