"""Local: the pipeline is not cut; one process plays and learns. The reference every other scheme is tested against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from troupe.config import Config
from troupe.roles.worker import worker
from troupe.schemes.exchange import apply_here
from troupe.schemes.scheme import Company, Part, one_memory, unused_options


class Local:
    """One worker, in the main process."""

    plays_here, shares_vector = True, False

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """More than one worker has nowhere to be."""
        if config.workers > 1:
            return (
                f"scheme local is one process, so --workers {config.workers} makes no sense: use --scheme actor-learner"
            )
        return one_memory(config) or unused_options(config, allowed=set())

    def parts(self, config: Config) -> list[Part]:
        """Nobody else."""
        return []

    def topics(self, weights_bytes: int) -> Mapping[str, int]:
        """Nobody listens."""
        return {}

    def main(self, company: Company) -> Iterator[None]:
        """Play, remember, learn, apply."""
        assert company.player is not None
        return worker(company.algorithm, apply_here, company.player, company.ledger, steps=company.rollout_steps)
