"""Deep Q-learning (Mnih 2015): action values learned from replay, with n-step returns, Double and dueling networks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from msgspec import Meta, Struct
from torch import Tensor
from torch.nn.functional import huber_loss

from troupe.algos.actor_critic import backward, whole
from troupe.algos.options import Count, Fraction, Positive, Weight
from troupe.errors import ConfigError, TroupeError
from troupe.nets import NetSpec, QNetwork, action_size
from troupe.parameters import Parameters
from troupe.plain import plain
from troupe.replay import Replay, ReplayShape
from troupe.seeding import rng_state, set_rng_state
from troupe.transitions import n_step_transitions
from troupe.types import Array, Decision, Metrics, Place, Rollout, State

CHUNK_ROWS = 4096  # transitions drawn at once, for many gradients: small arrays cost more to handle than to fill


class DQNConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DQN's own options."""

    rollout_steps: Annotated[Count, Meta(description="steps each environment plays per rollout")] = 16
    batch: Annotated[Count, Meta(description="transitions per gradient")] = 128
    train_every: Annotated[Positive, Meta(description="environment steps per gradient; 0.5: two gradients a step")] = (
        4.0
    )
    learning_starts: Annotated[int, Meta(ge=0, description="transitions to have before the first gradient")] = 1000
    replay_size: Annotated[Count, Meta(description="transitions that each worker keeps")] = 100_000
    replay: Annotated[
        Literal["local", "global"], Meta(description="sample from what this worker played, or from what all did")
    ] = "local"
    with_replacement: Annotated[bool, Meta(description="a transition may be twice in one batch")] = True
    n_step: Annotated[Count, Meta(description="steps of reward before the bootstrap, within one rollout")] = 3
    double: Annotated[bool, Meta(description="the online network chooses what the target network values")] = True
    dueling: Annotated[bool, Meta(description="the network's head adds advantages to a value of the state")] = False
    target_every: Annotated[Count, Meta(description="updates after which the target network is made anew")] = 250
    learning_rate: Annotated[Positive, Meta(description="the optimiser's step size at the start")] = 1e-3
    learning_rate_end: Annotated[Fraction, Meta(description="what it falls to, as a fraction of the start")] = 0.1
    gamma: Annotated[Fraction, Meta(description="discount")] = 0.99
    exploration: Annotated[Fraction, Meta(description="share of the training in which epsilon falls from 1")] = 0.2
    epsilon_end: Annotated[Fraction, Meta(description="what the chance of a random action falls to")] = 0.05
    epsilon_spread: Annotated[
        Weight,
        Meta(description="the last environment's epsilon is the end's power 1 + this (Ape-X: 7); 0: one for all"),
    ] = 1.0
    huber: Annotated[Positive, Meta(description="the error from which the loss grows only linearly")] = 1.0
    max_gradient_norm: Annotated[Positive, Meta(description="the whole gradient is scaled down to this")] = 10.0
    reward_scale: Annotated[Positive, Meta(description="factor on rewards, for learning only")] = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """N transitions, ready for the loss."""

    observations: Tensor  # [N, ...]
    actions: Tensor  # [N, 1], counted from 0
    returns: Tensor  # [N, 1]
    next_observations: Tensor  # [N, ...]
    discounts: Tensor  # [N, 1]
    next_values: Tensor  # [N, A], the target network's


class DQN:
    """Plays epsilon-greedily, keeps every transition, and owes a gradient for every so many of them."""

    Config = DQNConfig
    lag_rollouts = 2
    weights_may_move = True
    off_policy = True
    one_learner = False
    remembers = "rollouts"
    sift = staticmethod(whole)

    def __init__(
        self, config: DQNConfig, network: QNetwork, parameters: Parameters, rng: np.random.Generator, place: Place
    ) -> None:
        shares = place.workers if config.replay == "global" else 1
        self.enough = max(config.learning_starts, config.batch)
        _check(config, self.enough, config.replay_size * shares)
        self.config, self.network, self.parameters, self.rng = config, network, parameters, rng
        self.plain = None if config.dueling else plain(network.q)
        shape = ReplayShape(config.replay_size, shares, network.observation_shape, network.observation_dtype)
        self.memory: Replay | None = None
        if config.replay == "local":
            self.memory = Replay(shape)
        elif place.replay_memory is not None:
            self.memory = Replay(shape, place.replay_memory, share=place.rank)
        self.target, self.target_vector = _twin(network, parameters)
        self.target_age = 0  # of the weights in it: their version // target_every
        self.owed_steps = 0.0  # environment steps that no gradient was made for yet
        self.end_epsilons = lane_epsilons(config.epsilon_end, config.epsilon_spread, place.envs)[place.lanes]
        self.value = 0.0  # what the target network expects of what was drawn last
        self.anneal(0.0)

    @staticmethod
    def make_network(
        config: DQNConfig, observation: spaces.Space[Any], action: spaces.Space[Any], spec: NetSpec
    ) -> QNetwork:
        """One output for each action, so there must be a number of them."""
        action_size(action)
        if not isinstance(action, spaces.Discrete):
            raise ConfigError(f"dqn chooses one of a few actions, but these are continuous ({action}): use --algo ppo")
        return QNetwork(observation, action, spec, dueling=config.dueling)

    def anneal(self, progress: float) -> None:
        """The step size falls in a line; epsilon too, from 1 and sooner."""
        c = self.config
        self.progress = progress
        self.parameters.learning_rate = c.learning_rate * (1 - progress * (1 - c.learning_rate_end))
        explored = min(1.0, progress / c.exploration) if c.exploration else 1.0
        self.epsilons = 1 + explored * (self.end_epsilons - 1)
        self.epsilon = float(self.epsilons.mean())

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        """The action of the highest value; for learning, with each environment's own epsilon a random one."""
        with torch.inference_mode():
            best: Array = self._values(torch.from_numpy(observations)).argmax(1).numpy()
        count, actions = len(best), self.network.actions
        if greedy:
            return Decision(best + self.network.action_start, np.zeros(count, np.float32))
        epsilons = self.epsilons if count == len(self.epsilons) else np.resize(self.epsilons, count)
        chosen = np.where(rng.random(count) < epsilons, rng.integers(actions, size=count), best)
        chances = epsilons / actions + (chosen == best) * (1 - epsilons)
        return Decision(chosen + self.network.action_start, np.log(chances).astype(np.float32))

    def remember(self, rollout: Rollout) -> None:
        """Make transitions of it; each of them calls for its part of a gradient."""
        c, memory = self.config, self._memory()
        memory.add(n_step_transitions(rollout, n=c.n_step, gamma=c.gamma, reward_scale=c.reward_scale))
        if len(memory) >= self.enough:
            self.owed_steps += rollout.steps

    def batches(self) -> Iterator[Batch]:
        """As many as are owed, drawn and valued by the target network many at a time, but never past its renewal."""
        c = self.config
        while self.owed_steps >= c.train_every:
            self._renew_target()
            to_renewal = c.target_every - self.parameters.version % c.target_every
            count = min(int(self.owed_steps / c.train_every), to_renewal, max(1, CHUNK_ROWS // c.batch))
            self.owed_steps -= count * c.train_every
            yield from self._draw(count)

    def _draw(self, count: int) -> Iterator[Batch]:
        c = self.config
        drawn = self._memory().sample(count, c.batch, self.rng, with_replacement=c.with_replacement)
        following = torch.from_numpy(drawn.next_observations)
        with torch.no_grad():
            next_values = self.target(following)
        self.value = float(next_values.amax(1).mean())
        columns = (
            torch.from_numpy(drawn.observations), torch.from_numpy(drawn.actions - self.network.action_start)[:, None],
            torch.from_numpy(drawn.returns)[:, None], following, torch.from_numpy(drawn.discounts)[:, None],
            next_values,
        )  # fmt: skip
        for parts in zip(*(column.split(c.batch) for column in columns), strict=True):
            yield Batch(*parts)

    def gradient(self, batch: Batch) -> Metrics:
        """Huber loss of Q(o, a) towards the n-step return and the value of the best action after it."""
        c, plain = self.config, self.plain
        with torch.no_grad():
            if c.double:  # van Hasselt 2016: who chooses the action does not value it
                best = self._values(batch.next_observations).argmax(1, keepdim=True)
                follows = batch.next_values.gather(1, best)
            else:
                follows = batch.next_values.amax(1, keepdim=True)
            targets = torch.addcmul(batch.returns, batch.discounts, follows)
        if plain is None:
            values = self.network(batch.observations).gather(1, batch.actions)
            loss = huber_loss(values, targets, delta=c.huber)
            metrics = backward(self.parameters, loss, c.max_gradient_norm)
        else:
            with torch.no_grad():
                kept = plain.forward(batch.observations)
                errors = kept[-1].gather(1, batch.actions).sub_(targets)
                slopes = errors.clamp(-c.huber, c.huber)  # of the Huber loss, by each value
                loss = slopes.mul(errors.sub_(slopes, alpha=0.5)).mean()
                slopes.div_(len(slopes))
                plain.backward(kept, torch.zeros_like(kept[-1]).scatter_(1, batch.actions, slopes))
            metrics = {"gradient_norm": self.parameters.clip_gradient(c.max_gradient_norm)}
        return {**metrics, "value_loss": loss.item(), "value": self.value, "epsilon": self.epsilon}

    def _values(self, observations: Tensor) -> Tensor:
        """Q(o, .) of the online network, where no gradient is wanted."""
        if self.plain is not None:
            return self.plain.forward(observations)[-1]
        values: Tensor = self.network(observations)
        return values

    def _renew_target(self) -> None:
        """By the version, which counts everybody's updates: a count of one's own would differ from worker to worker."""
        age = self.parameters.version // self.config.target_every
        if age != self.target_age:
            self.target_vector.copy_(self.parameters.vector)
            self.target_age = age

    def _memory(self) -> Replay:
        if self.memory is None:
            raise TroupeError("--replay global, but this worker was handed no memory: use --replay local")
        return self.memory

    def state(self) -> State:
        """The transitions, the target network, the random streams, the schedules and what is owed."""
        arrays = {"torch_rng": torch.get_rng_state().numpy(), "target": self.target_vector.numpy().copy()}
        values = {
            "rng": rng_state(self.rng), "owed_steps": self.owed_steps, "progress": self.progress,
            "target_age": self.target_age,
        }  # fmt: skip
        state = State(arrays, values)
        if self.memory is not None:
            state.put("memory", self.memory.state())
        return state

    def restore(self, state: State) -> None:
        """Go on where `state` was taken."""
        torch.set_rng_state(torch.from_numpy(state.arrays["torch_rng"].copy()))
        set_rng_state(self.rng, state.values["rng"])
        self.target_vector.copy_(torch.from_numpy(state.arrays["target"]))
        self.target_age = int(state.values["target_age"])
        self.owed_steps = float(state.values["owed_steps"])
        self.anneal(float(state.values["progress"]))
        if self.memory is not None and "memory" in state.values:
            self.memory.restore(state.get("memory"))


def lane_epsilons(end: float, spread: float, lanes: int) -> Array:
    """What epsilon falls to in each of all environments: end^(1 + i / (N - 1) * spread) (Ape-X, Horgan 2018), [N]."""
    return np.asarray(end ** (1 + np.linspace(0, 1, lanes) * spread))


def _check(config: DQNConfig, enough: int, capacity: int) -> None:
    if config.n_step > config.rollout_steps:
        raise ConfigError(
            f"--n-step {config.n_step} looks further than a rollout is long: take --rollout-steps {config.n_step} or "
            "more"
        )
    if enough > capacity:
        raise ConfigError(
            f"learning would wait for {enough} transitions (--learning-starts, --batch), but only {capacity} are "
            f"kept: take --replay-size {enough} or more"
        )


def _twin(network: QNetwork, parameters: Parameters) -> tuple[QNetwork, Tensor]:
    """A copy of the network that is not learned, its weights views into a flat vector of its own."""
    twin, vector, offset = copy.deepcopy(network).requires_grad_(False), parameters.vector.clone(), 0
    for p in twin.parameters():
        p.grad = None
        p.data = vector[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    return twin, vector
