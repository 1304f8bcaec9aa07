"""What a coordination scheme is: who plays in which process, and what the main process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from troupe.commons import Commons, Seat
from troupe.config import Config
from troupe.ports import Algorithm, Exchange, HeadLedger, Mailbox
from troupe.roles.cargo import Cargo
from troupe.roles.play import Player
from troupe.types import Pace

Links: TypeAlias = Mapping[str, Mailbox]  # hub -> the mailbox towards it

_OPTIONS = {"sync_every": 0, "shards": 1, "max_lag": 0, "accumulate": 1}  # of single schemes, unless given


@dataclass(frozen=True)
class Part:
    """A role that somebody other than the main process plays."""

    role: str
    rank: int
    essential: bool = False  # without it the run cannot go on
    at: str = ""  # the machine it plays on, where that is another one than the main process's

    @property
    def name(self) -> str:
        return f"{self.at}.{self.role}-{self.rank}" if self.at else f"{self.role}-{self.rank}"


@dataclass(frozen=True)
class Who:
    """A part that is being played: how its messages are signed, and what it does while it waits."""

    run: str
    name: str
    rank: int
    incarnation: int
    on_wait: Callable[[], None]  # says that it is alive, lets others have their turn; raises when the run is stopping
    folder: Path  # of the run's parts while it runs


@dataclass
class Company:
    """What a scheme's main process is handed, already built."""

    config: Config
    run: str
    algorithm: Algorithm
    ledger: HeadLedger
    rollout_steps: int
    player: Player | None  # where the scheme plays in the main process
    mailbox: Mailbox  # where parts send to it
    shape: Cargo
    commons: Commons | None  # where the scheme's workers share one vector
    pace: Callable[[], Pace] = Pace  # what is asked of actors, for balance

    def refresh(self) -> None:
        """The house's view of a vector that others change: its version, and Adam's count of steps with it."""
        if self.commons is None:
            return
        parameters = self.algorithm.parameters
        parameters.version = self.ledger.version = self.commons.version()
        parameters.moments["step"].fill_(parameters.version)


class Scheme(Protocol):
    """One place to cut the pipeline."""

    plays_here: bool  # the main process steps environments itself
    shares_vector: bool  # the workers learn; the vector lies in shared memory, see commons.py

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """A sentence, where this scheme makes no sense with the rest of the config."""

    def parts(self, config: Config) -> list[Part]:
        """The roles to start beside the main process."""

    def topics(self, weights_bytes: int) -> Mapping[str, int]:
        """What the main process publishes to them, with the bytes of the largest message of each."""

    def main(self, company: Company) -> Iterator[None]:
        """What the main process does, a turn at a time."""


class VectorScheme(Scheme, Protocol):
    """A scheme whose workers learn: what they share is one vector."""

    def exchange(self, config: Config, seat: Seat, links: Links, who: Who) -> Exchange:
        """What the worker `who` does with a gradient."""


def unused_options(config: Config, *, allowed: set[str]) -> str | None:
    """A sentence, where an option was given that only another scheme has."""
    for name, neutral in _OPTIONS.items():
        if name not in allowed and getattr(config, name) != neutral:
            return f"--{name.replace('_', '-')} means nothing to scheme {config.scheme}: leave it out"
    return None


def refuses_learning_workers(scheme: str, algorithm: Any) -> str | None:
    """A sentence, where the workers of a scheme that moves the weights under them could not learn by themselves."""
    if not algorithm.weights_may_move:
        return (
            f"scheme {scheme} moves the weights while {algorithm.__name__} still learns from the rollout they played: "
            "use --scheme all-reduce or actor-learner, or --algo a3c"
        )
    return refuses_one_learner(scheme, algorithm)


def refuses_one_learner(scheme: str, algorithm: Any) -> str | None:
    """A sentence, where the algorithm needs what everybody played in one place."""
    if not algorithm.one_learner:
        return None
    return (
        f"scheme {scheme} lets each worker learn from what it played itself, but {algorithm.__name__} imitates the "
        "best of what everybody played: use --scheme actor-learner"
    )


def one_memory(config: Config) -> str | None:
    """Where one process learns there is one memory, and nobody to share it with."""
    if config.hyper.get("replay") != "global":
        return None
    return (
        f"scheme {config.scheme} has one learner, whose memory holds everything already, so --replay global makes no "
        "sense: use --replay local"
    )
