"""What the actor-critic algorithms share: acting, and rollouts flattened into what a loss reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from troupe.nets import ActorCritic, NetSpec
from troupe.parameters import Parameters
from troupe.seeding import rng_state, set_rng_state
from troupe.types import Array, Decision, Metrics, Rollout, State


@dataclass(frozen=True, slots=True)
class Values:
    """A rollout's rewards beside the values that the present weights give; [T, B] each."""

    rewards: Array
    values: Array  # V(s[t])
    next_values: Array  # V of what really followed step t
    terminated: Array
    ended: Array


@dataclass(frozen=True, slots=True)
class Samples:
    """N transitions, ready for a loss."""

    observations: Tensor  # [N, ...]
    actions: Tensor  # [N] or [N, A]
    log_probs: Tensor  # [N], of the policy that acted
    advantages: Tensor  # [N]
    returns: Tensor  # [N], what V should be

    def __len__(self) -> int:
        return len(self.advantages)

    def take(self, index: Tensor) -> Samples:
        """The rows that `index` names."""
        return Samples(
            self.observations[index], self.actions[index], self.log_probs[index],
            self.advantages[index], self.returns[index],
        )  # fmt: skip


def make_actor_critic(
    config: object, observation: spaces.Space[Any], action: spaces.Space[Any], spec: NetSpec
) -> ActorCritic:
    """The network that all of them learn with, whatever their options."""
    return ActorCritic(observation, action, spec)


class ActorCriticAgent:
    """A network that acts, rollouts that wait to be learned from, and a random stream for what learning draws."""

    def __init__(self, network: ActorCritic, parameters: Parameters, rng: np.random.Generator) -> None:
        self.network = network
        self.parameters = parameters
        self.rng = rng
        self.held: list[Rollout] = []
        self.held_steps = 0

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        """Sample from the policy, or take its most likely action."""
        return Decision(*self.network.act(observations, rng, greedy=greedy))

    def remember(self, rollout: Rollout) -> None:
        """Hold the rollout until there is enough."""
        self.held.append(rollout)
        self.held_steps += rollout.valid.size

    def take_held(self, enough: int) -> list[Rollout]:
        """All that is held if it is at least `enough` steps, else nothing."""
        if self.held_steps < enough:
            return []
        taken, self.held, self.held_steps = self.held, [], 0
        return taken

    def values(self, rollout: Rollout, reward_scale: float) -> Values:
        """Value every observation of the rollout under the weights at hand, one network call."""
        length, batch = rollout.rewards.shape
        seen = rollout.observations.reshape(-1, *rollout.observations.shape[2:])
        finals = len(rollout.final_observations)
        with torch.inference_mode():
            everything = np.concatenate([seen, rollout.final_observations]) if finals else seen
            flat = self.network.values(torch.from_numpy(everything)).numpy()
        values = flat[: len(seen)].reshape(length + 1, batch)
        next_values = values[1:].copy()
        if finals:  # where a new episode's first observation stands in the row below
            next_values[rollout.final_index[:, 0], rollout.final_index[:, 1]] = flat[len(seen) :]
        ended = rollout.terminated | rollout.truncated
        return Values(rollout.rewards * np.float32(reward_scale), values[:-1], next_values, rollout.terminated, ended)

    def state(self) -> State:
        """The random streams, and what is held."""
        state = State(
            {"torch_rng": torch.get_rng_state().numpy()}, {"rng": rng_state(self.rng), "held": len(self.held)}
        )
        for i, rollout in enumerate(self.held):
            arrays = {name: getattr(rollout, name) for name in rollout.__slots__ if name != "version"}
            state.put(f"held{i}", State(arrays, {"version": rollout.version}))
        return state

    def restore(self, state: State) -> None:
        """Go on where `state` was taken."""
        torch.set_rng_state(torch.from_numpy(state.arrays["torch_rng"].copy()))
        set_rng_state(self.rng, state.values["rng"])
        self.held, self.held_steps = [], 0
        for i in range(int(state.values["held"])):
            part = state.get(f"held{i}")
            self.remember(Rollout(**part.arrays, version=int(part.values["version"])))


def whole(rollout: Rollout, *, hold: bool = False) -> Rollout:
    """The sift of whoever learns from everything that was played, a rollout at a time."""
    return rollout


def samples(rollout: Rollout, advantages: Array, returns: Array) -> Samples:
    """Flatten the valid steps of a rollout; [T, B] -> [N]."""
    valid = rollout.valid
    return Samples(
        torch.from_numpy(rollout.observations[:-1][valid]),
        torch.from_numpy(rollout.actions[valid]),
        torch.from_numpy(rollout.log_probs[valid]),
        torch.from_numpy(advantages[valid].astype(np.float32)),
        torch.from_numpy(returns[valid].astype(np.float32)),
    )


def join(parts: list[Samples]) -> Samples:
    """Many rollouts' samples as one."""
    if len(parts) == 1:
        return parts[0]
    return Samples(
        torch.cat([p.observations for p in parts]), torch.cat([p.actions for p in parts]),
        torch.cat([p.log_probs for p in parts]), torch.cat([p.advantages for p in parts]),
        torch.cat([p.returns for p in parts]),
    )  # fmt: skip


def standardised(advantages: Tensor) -> Tensor:
    """Mean 0, spread 1: the policy's steps are as large whatever rewards are counted in."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def backward(parameters: Parameters, loss: Tensor, max_norm: float) -> Metrics:
    """Leave the clipped gradient of `loss` in the flat vector."""
    parameters.gradient.zero_()
    loss.backward()  # type: ignore[no-untyped-call]
    return {"gradient_norm": parameters.clip_gradient(max_norm)}


def policy_gradient(
    agent: ActorCriticAgent, batch: Samples, *, value_weight: float, entropy_weight: float, max_norm: float
) -> Metrics:
    """The plain actor-critic loss: log pi times the advantage, the value error, the entropy bonus."""
    log_probs, entropy = agent.network.log_prob_entropy(batch.observations, batch.actions)
    value_loss = (agent.network.values(batch.observations) - batch.returns).square().mean()
    policy_loss = -(log_probs * batch.advantages).mean()
    loss = policy_loss + value_weight * value_loss - entropy_weight * entropy.mean()
    metrics = backward(agent.parameters, loss, max_norm)
    return {**metrics, "value_loss": value_loss.item(), "entropy": entropy.mean().item()}
