"""Actor-learner: the pipeline is cut after play. Experience goes up, weights come down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from troupe.config import Config
from troupe.roles.learner import learner
from troupe.schemes.exchange import apply_here
from troupe.schemes.scheme import Company, Part, one_memory, unused_options


class ActorLearner:
    """Actors play, each in a process of its own; the main process learns."""

    plays_here, shares_vector = False, False

    def refuses(self, config: Config, algorithm: Any) -> str | None:
        """Goes with every algorithm that is here: each says by how many rollouts its actors may be behind."""
        return one_memory(config) or unused_options(config, allowed={"max_lag"})

    def parts(self, config: Config) -> list[Part]:
        """One actor a worker."""
        at = config.name if config.share else ""  # beside the workers of the learner whose queue is shared
        return [Part("actor", rank, at=at) for rank in range(config.workers)]

    def topics(self, weights_bytes: int) -> Mapping[str, int]:
        """The newest weights."""
        return {"weights": weights_bytes}

    def main(self, company: Company) -> Iterator[None]:
        """Merge what arrives, learn, publish."""
        return learner(
            company.algorithm, apply_here, company.mailbox, company.ledger, run=company.run, shape=company.shape,
            name=company.config.name if company.config.share else "learner", pace=company.pace,
            max_lag=company.config.max_lag,
        )  # fmt: skip
