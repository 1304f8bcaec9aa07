"""Advantage actor-critic (Mnih 2016): one gradient per rollout, from n-step returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from troupe import returns
from troupe.algos.actor_critic import (
    ActorCriticAgent,
    Samples,
    join,
    make_actor_critic,
    policy_gradient,
    samples,
    standardised,
    whole,
)
from troupe.algos.options import Count, Fraction, Positive, Weight
from troupe.nets import ActorCritic
from troupe.parameters import Parameters
from troupe.types import Array, Decision, Metrics, Place


class A3CConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A3C's own options."""

    rollout_steps: Annotated[Count, Meta(description="steps each environment plays per rollout (n of the returns)")] = (
        16
    )
    learning_rate: Annotated[Positive, Meta(description="the optimiser's step size at the start")] = 1e-3
    learning_rate_end: Annotated[Fraction, Meta(description="what it falls to, as a fraction of the start")] = 0.1
    gamma: Annotated[Fraction, Meta(description="discount")] = 0.99
    epsilon: Annotated[Fraction, Meta(description="chance of a random action (System C: 0.01)")] = 0.0
    entropy: Annotated[Weight, Meta(description="weight of the entropy bonus")] = 0.01
    entropy_end: Annotated[Fraction, Meta(description="what it falls to, as a fraction of the start")] = 1.0
    value_weight: Annotated[Positive, Meta(description="weight of the value loss")] = 0.5
    max_gradient_norm: Annotated[Positive, Meta(description="the whole gradient is scaled down to this")] = 0.5
    reward_scale: Annotated[Positive, Meta(description="factor on rewards, for learning only")] = 1.0
    normalise: Annotated[bool, Meta(description="advantages of a batch have mean 0 and spread 1")] = False


class A3C:
    """Learns from every rollout once, with the weights that played it."""

    Config = A3CConfig
    make_network = staticmethod(make_actor_critic)
    lag_rollouts = 0  # its gradient is only right for the weights that acted
    weights_may_move = True
    off_policy = False
    one_learner = False
    remembers = "rollouts"
    sift = staticmethod(whole)

    def __init__(
        self, config: A3CConfig, network: ActorCritic, parameters: Parameters, rng: np.random.Generator, place: Place
    ) -> None:
        self.config = config
        self.agent = ActorCriticAgent(network, parameters, rng)
        self.network, self.parameters = network, parameters
        self.remember, self.state, self.restore = self.agent.remember, self.agent.state, self.agent.restore
        self.anneal(0.0)

    def anneal(self, progress: float) -> None:
        """Step size and entropy bonus fall in a line."""
        c = self.config
        self.entropy = c.entropy * (1 - progress * (1 - c.entropy_end))
        self.parameters.learning_rate = c.learning_rate * (1 - progress * (1 - c.learning_rate_end))

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        """Sample from the policy; with probability epsilon, from all actions alike."""
        decision = self.agent.act(observations, rng, greedy=greedy)
        if greedy or self.config.epsilon == 0 or self.agent.network.continuous:
            return decision
        stray = rng.random(len(observations)) < self.config.epsilon
        count, start = self.agent.network.actions, self.agent.network.action_start
        actions = np.where(stray, rng.integers(count, size=len(stray)) + start, decision.actions)
        return Decision(actions, decision.log_probs)

    def batches(self) -> Iterator[Samples]:
        """All that was played since the last gradient, as one batch."""
        parts = []
        for rollout in self.agent.take_held(1):
            v = self.agent.values(rollout, self.config.reward_scale)
            targets = returns.n_step_returns(v.rewards, v.next_values, v.terminated, v.ended, gamma=self.config.gamma)
            parts.append(samples(rollout, targets - v.values, targets))
        if parts:
            batch = join(parts)
            yield replace(batch, advantages=standardised(batch.advantages)) if self.config.normalise else batch

    def gradient(self, batch: Samples) -> Metrics:
        """Policy gradient with the advantage, value loss, entropy bonus."""
        c = self.config
        return policy_gradient(
            self.agent, batch, value_weight=c.value_weight, entropy_weight=self.entropy, max_norm=c.max_gradient_norm
        )
