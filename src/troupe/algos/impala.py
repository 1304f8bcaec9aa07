"""IMPALA (Espeholt 2018): actor-critic that corrects for rollouts played by older weights, with V-trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta, Struct

from troupe import returns
from troupe.algos.actor_critic import (
    ActorCriticAgent,
    Samples,
    join,
    make_actor_critic,
    policy_gradient,
    samples,
    whole,
)
from troupe.algos.options import Count, Fraction, Positive, Weight
from troupe.nets import ActorCritic
from troupe.parameters import Parameters
from troupe.types import Array, Metrics, Place, Rollout


class IMPALAConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """IMPALA's own options."""

    rollout_steps: Annotated[Count, Meta(description="steps each environment plays per rollout")] = 32
    minibatch: Annotated[Count, Meta(description="steps per gradient")] = 512
    passes: Annotated[Count, Meta(description="how often each rollout is learned from; V-trace anew before each")] = 1
    learning_rate: Annotated[Positive, Meta(description="the optimiser's step size at the start")] = 1e-3
    learning_rate_end: Annotated[Fraction, Meta(description="what it falls to, as a fraction of the start")] = 0.1
    gamma: Annotated[Fraction, Meta(description="discount")] = 0.99
    lam: Annotated[Fraction, Meta(description="lambda of V-trace's corrections")] = 1.0
    rho_max: Annotated[Positive, Meta(description="bound of the importance ratios")] = 1.0
    entropy: Annotated[Weight, Meta(description="weight of the entropy bonus")] = 0.01
    value_weight: Annotated[Positive, Meta(description="weight of the value loss")] = 0.5
    max_gradient_norm: Annotated[Positive, Meta(description="the whole gradient is scaled down to this")] = 0.5
    reward_scale: Annotated[Positive, Meta(description="factor on rewards, for learning only")] = 1.0


class IMPALA:
    """Learns from whatever arrives, however old the weights that played it."""

    Config = IMPALAConfig
    make_network = staticmethod(make_actor_critic)
    lag_rollouts = 2
    weights_may_move = True
    off_policy = False
    one_learner = False
    remembers = "rollouts"
    sift = staticmethod(whole)

    def __init__(
        self, config: IMPALAConfig, network: ActorCritic, parameters: Parameters, rng: np.random.Generator, place: Place
    ) -> None:
        self.config = config
        self.agent = ActorCriticAgent(network, parameters, rng)
        self.network, self.parameters = network, parameters
        self.act, self.remember = self.agent.act, self.agent.remember
        self.state, self.restore = self.agent.state, self.agent.restore
        self.anneal(0.0)

    def anneal(self, progress: float) -> None:
        """The step size falls in a line."""
        c = self.config
        self.parameters.learning_rate = c.learning_rate * (1 - progress * (1 - c.learning_rate_end))

    def batches(self) -> Iterator[Samples]:
        """Each pass corrects with the weights at hand, then goes over the steps in a fresh order."""
        held = self.agent.take_held(1)
        if not held:
            return
        for _ in range(self.config.passes):
            everything = join([self._corrected(rollout) for rollout in held])
            order = torch.from_numpy(self.agent.rng.permutation(len(everything)))
            for index in order.tensor_split(max(1, round(len(everything) / self.config.minibatch))):
                yield everything.take(index)

    def _corrected(self, rollout: Rollout) -> Samples:
        c, v = self.config, self.agent.values(rollout, self.config.reward_scale)
        targets, advantages = returns.vtrace(
            self._log_probs_now(rollout) - rollout.log_probs, v.rewards, v.values, v.next_values, v.terminated, v.ended,
            gamma=c.gamma, lam=c.lam, rho_max=c.rho_max,
        )  # fmt: skip
        return samples(rollout, advantages, targets)

    def _log_probs_now(self, rollout: Rollout) -> Array:
        """log pi(a|o) under the weights at hand, [T, B]."""
        length, batch = rollout.rewards.shape
        observations = rollout.observations[:-1].reshape(length * batch, *rollout.observations.shape[2:])
        actions = rollout.actions.reshape(length * batch, *rollout.actions.shape[2:])
        with torch.inference_mode():
            log_probs, _ = self.agent.network.log_prob_entropy(
                torch.from_numpy(observations), torch.from_numpy(actions)
            )
        out: Array = log_probs.numpy().reshape(length, batch)
        return out

    def gradient(self, batch: Samples) -> Metrics:
        """Policy gradient with the corrected advantage, value loss towards vs, entropy bonus."""
        c = self.config
        return policy_gradient(
            self.agent, batch, value_weight=c.value_weight, entropy_weight=c.entropy, max_norm=c.max_gradient_norm
        )
