"""Workers rest while more waits than the learner can use, and no longer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from troupe.balance import LONGEST_S, MOST_ROLLOUTS, Balance
from troupe.types import Pace


@dataclass
class Queue:
    """A queue that fills and is emptied at rates of its own, a tenth of a second a tick."""

    made_per_s: float  # messages, by workers that never rest
    learned_per_s: float
    bound: int = 64
    waiting: float = 0.0
    starved: int = 0  # ticks that ended with nothing there

    @property
    def ready(self) -> int:
        return int(self.waiting)

    def run(self, ticks: int) -> list[int]:
        """What waited at each tick."""
        balance, seen = Balance(lambda: self), []
        for _ in range(ticks):
            made = 0.1 / (1 / self.made_per_s + balance.pace().rest_s)
            self.waiting = min(self.bound, max(0.0, self.waiting + made - 0.1 * self.learned_per_s))
            self.starved += self.ready == 0
            seen.append(self.ready)
        return seen


@pytest.mark.parametrize("times", [2, 20, 200])
def test_workers_that_are_too_fast_are_slowed_to_the_learners_pace_and_it_never_starves(times: int) -> None:
    queue = Queue(made_per_s=10.0 * times, learned_per_s=10.0)
    seen = queue.run(2000)
    assert max(seen[10:]) < queue.bound  # a second after the first burst
    assert queue.starved <= 2000 * 0.05
    assert max(seen[1000:]) - min(seen[1000:]) <= 2  # it settles, and does not swing


def test_where_the_learner_keeps_up_nobody_rests() -> None:
    queue = Queue(made_per_s=10.0, learned_per_s=50.0)
    queue.run(100)
    assert Balance(lambda: queue).pace() == Pace(rollouts=1, rest_s=0.0)


def test_a_rest_has_a_bound_and_ends_when_the_queue_is_nearly_empty() -> None:
    queue = Queue(made_per_s=1.0, learned_per_s=1.0, waiting=1000.0)
    assert Balance(lambda: queue).pace() == Pace(MOST_ROLLOUTS, LONGEST_S)
    queue.waiting = queue.bound / 8
    assert Balance(lambda: queue).pace() == Pace()


def test_the_more_that_waits_the_more_is_put_into_a_message() -> None:
    queue = Queue(made_per_s=1.0, learned_per_s=1.0)
    asked = []
    for waiting in range(queue.bound + 1):
        queue.waiting = waiting
        asked.append(Balance(lambda: queue).pace().rollouts)
    assert asked == sorted(asked)
    assert set(asked) == set(range(1, MOST_ROLLOUTS + 1))
