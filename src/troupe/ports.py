"""The interfaces that the pipeline is cut along. An algorithm never knows which scheme runs it, a scheme never knows
which transport carries it, and a transport never knows what it carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from torch import nn

from troupe.parameters import Parameters
from troupe.types import Array, Decision, Episodes, Message, Metrics, Rollout, State, Step


class Environments(Protocol):
    """B environments stepped together."""

    batch: int
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]

    def reset(self) -> Array:
        """Begin an episode in every environment; the first observations, [B, ...]."""

    def step(self, actions: Array) -> Step:
        """One step of each. Raises EnvironmentFault when one raises or returns something not finite."""

    def state(self) -> State | None:
        """Enough to rebuild the open episodes exactly, or None where that cannot be done."""

    def restore(self, state: State) -> Array:
        """Rebuild the open episodes; the observations they stood at."""

    def close(self) -> None: ...


class Algorithm(Protocol):
    """What is played and how it is learned from; arrays in, one flat gradient out."""

    parameters: Parameters
    network: nn.Module
    lag_rollouts: int  # how many of an actor's own rollouts the weights it plays with may be behind
    weights_may_move: bool  # others may change them while a rollout is learned from
    off_policy: bool  # what is remembered stays: nobody need wait for a gradient to be made of it
    one_learner: bool  # learns from one set of what everybody played, which no worker has for itself
    remembers: str  # "rollouts" or "episodes": what sift makes

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        """Choose actions for B observations. All randomness comes from `rng`."""

    def sift(self, rollout: Rollout, *, hold: bool = False) -> Rollout | Episodes | None:
        """What of it is worth remembering, where it was played; None where nothing is. What is dropped is counted, and
        told with the next that is not None. With `hold` it may keep what is worth it for the next as well."""

    def remember(self, played: Any) -> None:
        """Keep what `sift` made."""

    def batches(self) -> Iterator[object]:
        """What to learn from now, one batch a gradient; empty until there is enough."""

    def gradient(self, batch: object) -> Metrics:
        """Leave the gradient of the loss on `batch` in `parameters.gradient`."""

    def anneal(self, progress: float) -> None:
        """Training is `progress` done, 0 to 1: set the schedules by it."""

    def state(self) -> State:
        """What remember and batches hold between two rollouts, random streams included."""

    def restore(self, state: State) -> None: ...


class Exchange(Protocol):
    """What happens between a gradient and the next batch: the whole of a coordination scheme, seen from a worker."""

    @property
    def waited_s(self) -> float:
        """Seconds spent so far waiting for others: at a lock, for a server, for everybody."""

    def begin(self, parameters: Parameters) -> None:
        """Before the first rollout: take the weights that the others have."""

    def __call__(self, parameters: Parameters) -> Metrics:
        """The gradient at hand takes its way. "applied" of the metrics is 0 where it did not reach the weights, and
        "refused" 1 where that is its own fault."""

    def settle(self, parameters: Parameters) -> None:
        """All batches of a rollout were handed over."""


class Ledger(Protocol):
    """Where a learning role accounts for what it did."""

    def played(self, played: Rollout | Episodes, message: Message | None = None) -> None:
        """A rollout, or the best of several, was played here, or arrived in `message`, and will be learned from."""

    def rejected(self, message: Message, why: str) -> None:
        """A message was refused."""

    def learned(self, metrics: Metrics) -> None:
        """Gradients were made and applied; `metrics` is their mean."""

    def spent(self, what: str, seconds: float) -> None:
        """Time went into "play", "wait", "learn" or "send"."""

    def progress(self) -> float:
        """How much of the training is done, 0 to 1."""


class HeadLedger(Ledger, Protocol):
    """The ledger of the main process, which also hears of what happens elsewhere."""

    version: int  # updates applied so far, by everybody

    def reported(self, sender: str, report: Any) -> None:
        """What a worker that learns by itself did since its last report (roles/report.py)."""

    def refused(self, by: str, who: str, why: str, count: int) -> None:
        """`count` gradients of the worker `who` were refused."""


class Seat(Protocol):
    """A worker's own counters where many share one vector."""

    def played(self, steps: int) -> None:
        """So many more environment steps."""

    def reported(self) -> None:
        """All that was played is on its way to the books."""


class Mailbox(Protocol):
    """Messages from one role to another. Everything is bounded; every wait has a timeout."""

    def send(self, to: str, message: Message, timeout_s: float) -> None:
        """Blocks while the receiver is full, which is the back-pressure.

        Raises PeerLost after `timeout_s`, BadMessage for what no receiver could ever hold.
        """

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, each delivered at most once and never torn; None after `timeout_s`."""

    def publish(self, topic: str, message: Message) -> None:
        """Replace what `topic` holds. Never blocks, whoever reads."""

    def latest(self, topic: str) -> Message | None:
        """The newest message of `topic`, if it is newer than the one this mailbox returned last; else None."""

    def wait_latest(self, topic: str, timeout_s: float) -> Message | None:
        """`latest`, waited for; None after `timeout_s`."""

    def close(self) -> None: ...
