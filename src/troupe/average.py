"""The mean of the weights of late: a steadier agent than any one of them, whose last gradients are mostly noise."""

from __future__ import annotations

import numpy as np

from troupe.parameters import Parameters
from troupe.types import Array


class Average:
    """Follows a vector while it is trained. A life of a run begins with the weights it finds."""

    def __init__(self, parameters: Parameters, share: float, steps: int = 0) -> None:
        """`share`: of the environment steps so far, the last part that the mean is over (exponentially weighted);
        0: the newest weights alone."""
        self._parameters, self._share, self._steps = parameters, share, steps
        self._mean = parameters.weights() if share else None

    def follow(self, steps: int) -> None:
        """Training has come to `steps`."""
        if self._mean is None or steps <= self._steps:
            return
        newer = min(1.0, (steps - self._steps) / (self._share * steps))
        self._mean += np.float32(newer) * (self._parameters.vector.numpy() - self._mean)
        self._steps = steps

    @property
    def version(self) -> int:
        """Of the newest weights in it."""
        return self._parameters.version

    def weights(self) -> Array:
        """A copy of the mean, for whoever evaluates or keeps it."""
        return self._parameters.weights() if self._mean is None else self._mean.copy()
