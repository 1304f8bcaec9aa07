"""Apply: what happens to a gradient."""

from __future__ import annotations

from troupe.parameters import Parameters
from troupe.types import Metrics


def apply_here(parameters: Parameters) -> Metrics:
    """The owner of the vector steps its own optimiser."""
    return {"applied": float(parameters.apply())}
