"""Learn and apply: what a learner and a worker do with a rollout that is remembered."""

from __future__ import annotations

from collections import defaultdict

from troupe.ports import Algorithm, Exchange
from troupe.types import Metrics


def learn(algorithm: Algorithm, exchange: Exchange) -> Metrics:
    """A gradient for every batch there is, handed to the exchange; the mean of their metrics, empty without a batch."""
    sums: dict[str, float] = defaultdict(float)
    gradients = 0
    for batch in algorithm.batches():
        algorithm.network.train()  # dropout and the like: in gradients, never in what is played or valued
        metrics = algorithm.gradient(batch)
        algorithm.network.eval()
        metrics |= exchange(algorithm.parameters)
        gradients += 1
        for name, value in metrics.items():
            sums[name] += value
    exchange.settle(algorithm.parameters)
    if not gradients:
        return {}
    return {**{name: value / gradients for name, value in sums.items()}, "gradients": float(gradients)}
