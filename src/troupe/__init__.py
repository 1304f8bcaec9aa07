"""Troupe: train one deep-RL agent with every core and machine its user has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troupe.api import Agent as Agent
    from troupe.api import Outcome as Outcome
    from troupe.api import load as load
    from troupe.api import train as train

__version__ = "0.1.0"
__all__ = ["Agent", "Outcome", "load", "train"]


def __getattr__(name: str) -> Any:
    """Bring the API, and torch with it, only when it is used: `troupe --help` needs neither."""
    if name in __all__:
        from troupe import api

        return getattr(api, name)
    raise AttributeError(f"module 'troupe' has no attribute {name!r}")
