"""Proximal policy optimisation (Schulman 2017): several epochs over one batch of rollouts, the ratio clipped."""

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
    backward,
    join,
    make_actor_critic,
    samples,
    standardised,
    whole,
)
from troupe.algos.options import Count, Fraction, Positive, Weight
from troupe.errors import ConfigError
from troupe.nets import ActorCritic
from troupe.parameters import Parameters
from troupe.types import Metrics, Place


class PPOConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PPO's own options."""

    rollout_steps: Annotated[Count, Meta(description="steps each environment plays per rollout")] = 64
    batch_steps: Annotated[
        int, Meta(ge=0, description="steps to gather before learning; 0: one rollout of every worker")
    ] = 0
    epochs: Annotated[Count, Meta(description="passes over each batch")] = 4
    minibatch: Annotated[Count, Meta(description="steps per gradient")] = 1024
    learning_rate: Annotated[Positive, Meta(description="Adam's step size at the start")] = 1e-3
    learning_rate_end: Annotated[
        Weight, Meta(description="what the step size falls to, as a fraction of the start")
    ] = 0.1
    gamma: Annotated[Fraction, Meta(description="discount")] = 0.99
    lam: Annotated[Fraction, Meta(description="lambda of the advantage estimates")] = 0.95
    clip: Annotated[Positive, Meta(description="how far the ratio may leave 1")] = 0.2
    entropy: Annotated[Weight, Meta(description="weight of the entropy bonus at the start")] = 0.01
    entropy_end: Annotated[Weight, Meta(description="what that falls to, as a fraction of the start")] = 0.0
    value_weight: Annotated[Positive, Meta(description="weight of the value loss")] = 0.5
    max_gradient_norm: Annotated[Positive, Meta(description="the whole gradient is scaled down to this")] = 0.5
    reward_scale: Annotated[Positive, Meta(description="factor on rewards, for learning only")] = 1.0


class PPO:
    """Holds rollouts until there is one batch of them, then learns from it epoch by epoch."""

    Config = PPOConfig
    make_network = staticmethod(make_actor_critic)
    lag_rollouts = 1  # the ratio says how far the policy that acted is away
    weights_may_move = False  # several epochs over what one policy played
    off_policy = False
    one_learner = False
    remembers = "rollouts"
    sift = staticmethod(whole)

    def __init__(
        self, config: PPOConfig, network: ActorCritic, parameters: Parameters, rng: np.random.Generator, place: Place
    ) -> None:
        self.config = config
        self.agent = ActorCriticAgent(network, parameters, rng)
        self.network, self.parameters = network, parameters
        self.enough = config.batch_steps or place.turn_steps
        if config.minibatch > self.enough:
            raise ConfigError(f"--minibatch {config.minibatch} is more than the {self.enough} steps that are gathered")
        self.act, self.remember = self.agent.act, self.agent.remember
        self.state, self.restore = self.agent.state, self.agent.restore
        self.entropy = config.entropy
        self.anneal(0.0)

    def anneal(self, progress: float) -> None:
        """Step size and entropy bonus fall in a line."""
        c = self.config
        self.parameters.learning_rate = c.learning_rate * (1 - progress * (1 - c.learning_rate_end))
        self.entropy = c.entropy * (1 - progress * (1 - c.entropy_end))

    def batches(self) -> Iterator[Samples]:
        """Minibatches in a fresh order each epoch; advantages from the weights before the first of them."""
        held = self.agent.take_held(self.enough)
        if not held:
            return
        c, parts = self.config, []
        for rollout in held:
            v = self.agent.values(rollout, c.reward_scale)
            advantages = returns.gae(
                v.rewards, v.values, v.next_values, v.terminated, v.ended, gamma=c.gamma, lam=c.lam
            )
            parts.append(samples(rollout, advantages, advantages + v.values))
        everything = join(parts)
        count = max(1, round(len(everything) / c.minibatch))
        for _ in range(c.epochs):
            order = torch.from_numpy(self.agent.rng.permutation(len(everything)))
            for index in order.tensor_split(count):
                yield everything.take(index)

    def gradient(self, batch: Samples) -> Metrics:
        """The clipped surrogate, the value loss and the entropy bonus."""
        c, network = self.config, self.agent.network
        log_probs, entropy = network.log_prob_entropy(batch.observations, batch.actions)
        ratio = torch.exp(log_probs - batch.log_probs)
        advantages = standardised(batch.advantages)
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - c.clip, 1 + c.clip) * advantages).mean()
        value_loss = (network.values(batch.observations) - batch.returns).square().mean()
        loss = c.value_weight * value_loss - surrogate - self.entropy * entropy.mean()
        metrics = backward(self.parameters, loss, c.max_gradient_norm)
        with torch.no_grad():
            metrics["clipped"] = float(((ratio - 1).abs() > c.clip).float().mean())
            metrics["kl"] = float((ratio - 1 - ratio.log()).mean())
        return {**metrics, "value_loss": value_loss.item(), "entropy": entropy.mean().item()}
