"""Balance: how much workers generate for a message, and whether they rest, by how far the learner is behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from troupe.types import Pace

LONGEST_S: Final = 10.0
MOST_ROLLOUTS: Final = 8
_SHORTEST_S: Final = 0.01
_WANTED: Final = 1 / 8  # of the bound: enough that the learner never starves, and nothing in it is old


class Depth(Protocol):
    """How far the learner is behind."""

    @property
    def ready(self) -> int:
        """Messages that wait."""

    @property
    def bound(self) -> int:
        """Messages that may."""


class Balance:
    """Has workers generate more for each message, and rest after it, while more wait than are of use: they would only
    grow old, or be refused at the full queue and sent again.

    The pace depends on the queue alone, a rest being a thousand times as long at its end as where it begins: one that
    remembered what it said before would swing, since the queue remembers already.
    """

    def __init__(self, depth: Callable[[], Depth]) -> None:
        self._depth = depth

    def pace(self) -> Pace:
        """For each worker."""
        depth = self._depth()
        more = (depth.ready / depth.bound - _WANTED) / (1 - _WANTED)
        if more <= 0:
            return Pace()
        more = min(1.0, more)
        return Pace(1 + round(more * (MOST_ROLLOUTS - 1)), _SHORTEST_S * (LONGEST_S / _SHORTEST_S) ** more)
