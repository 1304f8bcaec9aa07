"""Reviews: when the agent is evaluated, what came of it, and whether that meets the goal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from troupe import panel
from troupe.average import Average
from troupe.books import Books
from troupe.config import Config
from troupe.goal import Goal
from troupe.ports import Mailbox
from troupe.roles.evaluator import Evaluation
from troupe.types import Message

Keep = Callable[[Message, dict[str, Any]], None]


class Reviews:
    """Asks the evaluator for one evaluation at a time and hears its answers."""

    def __init__(self, config: Config, run: str, goal: Goal, books: Books, average: Average, keep: Keep) -> None:
        self._config, self._run, self._goal, self._books, self._average = config, run, goal, books, average
        self._keep = keep  # the best so far
        self._asked = False
        self._heard_s = books.seconds_before
        self._taken_s = 0.0  # when the weights under review were taken
        self.best = -math.inf  # merit of an evaluation
        self.last: panel.Evaluation | None = None
        self.solved: panel.Evaluation | None = None  # the one that met the goal

    def ask_if_due(self, desk: Mailbox) -> None:
        """Again and again while the training mean is promising, else now and then."""
        if self._asked:
            return
        score, mean, wanted = self._goal.score, self._books.mean(), self._config.eval_from
        wanted = score if wanted is None else wanted
        promising = score is not None and wanted is not None and mean is not None and mean >= wanted
        if promising or self._books.seconds() - self._heard_s >= self._config.eval_every_s:
            self._ask(desk, may_give_up=True)

    def hear(self, desk: Mailbox, timeout_s: float = 0.0) -> None:
        """Take an evaluation that has arrived into the books."""
        message = desk.receive(timeout_s)
        if message is None:
            return
        self._asked, self._heard_s = False, self._books.seconds()
        meta, complete = message.meta, bool(message.meta["complete"])
        result = Evaluation(message.arrays["returns"], message.arrays["lengths"], complete, float(meta["seconds"]))
        mean, half = result.mean, result.half_interval
        self.last = panel.Evaluation(int(meta["steps"]), mean, result.sd, len(result.returns), mean - half, mean + half)
        figures = {
            "steps": self.last.steps, "version": message.version, "mean": mean, "sd": result.sd,
            "episodes": len(result.returns), "low": self.last.low, "high": self.last.high, "complete": complete,
            "seconds": result.seconds, "taken_s": round(self._taken_s, 6), "greedy": self._config.eval_greedy,
        }  # fmt: skip
        merit = self._goal.merit(result.returns, complete=complete)
        self._books.pages.write("eval", **figures, returns=result.returns)
        if merit > self.best:
            self.best = merit
            self._keep(message, {**figures, "merit": merit})
        if self._goal.met(result.returns, complete=complete):
            self.solved = self.last
            self._books.pages.write("solved", **figures)

    def lost(self) -> None:
        """The evaluator died: its answer will not come."""
        self._asked = False

    def last_of_all(self, desk: Mailbox, wait: Callable[[], bool], timeout_s: float) -> None:
        """The final weights' figure, whatever the goal was. `wait` is called between two looks; False ends it."""
        deadline = time.monotonic() + timeout_s
        if self._asked:  # one of older weights is under way: let it end first
            self._await(desk, wait, deadline)
        if not self.solved:
            self._ask(desk, may_give_up=False)
            self._await(desk, wait, deadline)

    def _await(self, desk: Mailbox, wait: Callable[[], bool], deadline: float) -> None:
        while self._asked and wait() and time.monotonic() < deadline:
            self.hear(desk, timeout_s=0.1)

    def _ask(self, desk: Mailbox, *, may_give_up: bool) -> None:
        goal, in_a_row = self._goal, self._goal.consecutive
        bar = goal.score if may_give_up and goal.score is not None else -math.inf
        meta = {
            "steps": self._books.steps, "episodes": in_a_row or self._config.eval_episodes,
            "give_up_below": -math.inf if in_a_row else bar, "fail_below": bar if in_a_row else -math.inf,
        }  # fmt: skip
        arrays = {"weights": self._average.weights()}
        self._asked, self._taken_s = True, self._books.seconds()
        desk.publish("candidate", Message("candidate", self._run, "desk", 0, 0, self._average.version, meta, arrays))
