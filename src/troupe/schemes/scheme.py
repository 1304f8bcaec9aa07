"""What a coordination scheme is: who plays in which process, and what the main process does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from troupe.config import Config
from troupe.ports import Algorithm, Ledger, Mailbox
from troupe.roles.cargo import RolloutShape
from troupe.roles.play import Player


@dataclass(frozen=True)
class Part:
    """A role that somebody other than the main process plays."""

    role: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"


@dataclass
class Company:
    """What a scheme's main process is handed, already built."""

    config: Config
    run: str
    algorithm: Algorithm
    ledger: Ledger
    rollout_steps: int
    player: Player | None  # where the scheme plays in the main process
    mailbox: Mailbox | None  # where parts send to it
    shape: RolloutShape


class Scheme(Protocol):
    """One place to cut the pipeline."""

    plays_here: bool  # the main process steps environments itself

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """A sentence, where this scheme makes no sense with the rest of the config."""

    def parts(self, config: Config) -> list[Part]:
        """The roles to start beside the main process."""

    def topics(self, weights_bytes: int) -> Mapping[str, int]:
        """What the main process publishes to them, with the bytes of the largest message of each."""

    def main(self, company: Company) -> Iterator[None]:
        """What the main process does, a turn at a time."""


def one_memory(config: Config) -> str | None:
    """Where one process learns there is one memory, and nobody to share it with."""
    if config.hyper.get("replay") != "global":
        return None
    return (
        f"scheme {config.scheme} has one learner, whose memory holds everything already, so --replay global makes no "
        "sense: use --replay local"
    )
