"""Apply: what happens to a gradient where the vector has one owner."""

from __future__ import annotations

from troupe.parameters import Parameters
from troupe.types import Metrics


class ApplyHere:
    """The owner of the vector steps its own optimiser; there is nobody to wait for."""

    waited_s = 0.0

    def begin(self, parameters: Parameters) -> None:
        """The weights are at hand."""

    def __call__(self, parameters: Parameters) -> Metrics:
        return {"applied": float(parameters.apply())}

    def settle(self, parameters: Parameters) -> None:
        """Nothing is open between two rollouts."""


apply_here = ApplyHere()
