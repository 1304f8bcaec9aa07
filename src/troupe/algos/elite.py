"""Elite imitation (the deep cross-entropy method): keep the best episodes, and learn to act as they did."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from msgspec import Meta, Struct
from torch import Tensor

from troupe.algos.options import Count, Fraction, Positive, Weight
from troupe.episodes import Assembler, Episode, EpisodeMemory, Kept, most_steps
from troupe.errors import ConfigError
from troupe.nets import NetSpec, PolicyNetwork
from troupe.parameters import Parameters
from troupe.plain import plain
from troupe.seeding import rng_state, set_rng_state
from troupe.types import Array, Decision, Episodes, Metrics, Place, Rollout, State

FIT_STEPS = 20_000  # that the baseline is fitted to
MOST_SQUARED, MOST_LINEAR = 32, 512  # entries of an observation
CHUNK_STEPS = 1 << 18  # drawn at once, for many gradients: small arrays cost more to handle than to fill


class EliteConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of elite imitation."""

    rollout_steps: Annotated[Count, Meta(description="steps each environment plays before it is sifted")] = 64
    rule: Annotated[
        Literal["adaptive", "fixed"],
        Meta(description="adaptive: the best of the recent episodes; fixed: take, clean and cut, kept for ever"),
    ] = "adaptive"
    round_episodes: Annotated[Count, Meta(description="episodes that call for another round of learning")] = 200
    batch: Annotated[Count, Meta(description="steps per gradient")] = 1024
    quantile: Annotated[Fraction, Meta(description="adaptive: episodes at or above this quantile are imitated")] = 0.8
    window_episodes: Annotated[
        Count, Meta(description="adaptive: episodes that the quantile is taken of; older ones are forgotten")
    ] = 1000
    gradients: Annotated[Count, Meta(description="adaptive: gradients of a round")] = 80
    better_steps: Annotated[
        float, Meta(gt=0, le=1, description="adaptive: share of the elites' steps to imitate, what went best")
    ] = 1.0
    gamma: Annotated[Fraction, Meta(description="discount of the rewards by which a step went well")] = 0.99
    goal: Annotated[float, Meta(description="fixed: the score that take and clean are shares of")] = 200.0
    take: Annotated[float, Meta(description="fixed: from this share of the goal on, an episode is kept whole")] = 0.95
    clean: Annotated[float, Meta(description="fixed: from this share on it is kept in part, below it not at all")] = 0.2
    cut: Annotated[
        float, Meta(description="fixed: of one kept in part stay the steps whose reward, normalised, is above this")
    ] = 0.0
    epochs: Annotated[Count, Meta(description="fixed: passes of a round over everything that is kept")] = 5
    memory_steps: Annotated[Count, Meta(description="steps that are kept at most, then the oldest go")] = 5_000_000
    episode_steps: Annotated[Count, Meta(description="steps of an episode, its first ones, that are kept at most")] = (
        1000
    )
    explorers: Annotated[Fraction, Meta(description="share of the environments that explores")] = 0.0
    temperature: Annotated[
        Positive, Meta(description="how much flatter explorers choose (softmax), or wider; 100: nearly at random")
    ] = 2.0
    spread: Annotated[Positive, Meta(description="continuous actions: standard deviation at the start")] = 1.0
    spread_end: Annotated[Fraction, Meta(description="what it falls to, as a fraction of the start")] = 0.2
    learning_rate: Annotated[Positive, Meta(description="the optimiser's step size at the start")] = 1e-3
    learning_rate_end: Annotated[Fraction, Meta(description="what it falls to, as a fraction of the start")] = 0.1
    entropy: Annotated[Weight, Meta(description="weight of the entropy bonus")] = 0.0
    max_gradient_norm: Annotated[Positive, Meta(description="the whole gradient is scaled down to this")] = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """N steps to be imitated."""

    observations: Tensor  # [N, ...]
    actions: Tensor  # [N] counted from 0, or [N, A]
    credits: Tensor  # [N], the discounted rewards from that step to the end of its episode

    def __len__(self) -> int:
        return len(self.credits)

    def take(self, rows: Tensor) -> Batch:
        """The rows that an index names."""
        return Batch(self.observations[rows], self.actions[rows], self.credits[rows])

    def split(self, index: Tensor, size: int) -> Iterator[Batch]:
        """The rows that `index` names, `size` at a time."""
        for rows in torch.split(index, size):
            yield self.take(rows)


class Elite:
    """Where it plays it sifts episodes; where it learns it imitates the best that everybody sent."""

    Config = EliteConfig
    lag_rollouts = 1_000_000  # whoever played an episode, it is as good an example: only a full mailbox holds actors up
    weights_may_move = True
    off_policy = True
    one_learner = True
    remembers = "episodes"

    def __init__(
        self, config: EliteConfig, network: PolicyNetwork, parameters: Parameters, rng: np.random.Generator,
        place: Place,
    ) -> None:  # fmt: skip
        if config.clean > config.take:
            raise ConfigError(f"--clean {config.clean:g} is above --take {config.take:g}: take a lower --clean")
        self.config, self.network, self.parameters, self.rng = config, network, parameters, rng
        self.plain = plain(network.policy)
        self.sieve = Sieve(config, place)
        window = config.window_episodes if config.rule == "adaptive" else None
        self.memory = EpisodeMemory(window=window, steps=config.memory_steps)
        self.owed_episodes = 0  # heard of since the last round
        self.least = 0.0  # the return that made an elite of an episode in the last round
        explores = np.arange(place.envs) < round(config.explorers * place.envs)
        self.temperatures = np.where(explores, config.temperature, 1.0).astype(np.float32)[place.lanes]
        self.anneal(0.0)

    @staticmethod
    def make_network(
        config: EliteConfig, observation: spaces.Space[Any], action: spaces.Space[Any], spec: NetSpec
    ) -> PolicyNetwork:
        """A policy, and nothing that values it."""
        return PolicyNetwork(observation, action, spec, learned_std=False)

    def anneal(self, progress: float) -> None:
        """The step size falls in a line; the spread of continuous actions too."""
        c = self.config
        self.parameters.learning_rate = c.learning_rate * (1 - progress * (1 - c.learning_rate_end))
        if self.network.continuous:
            self.network.log_std.fill_(math.log(c.spread * (1 - progress * (1 - c.spread_end))))

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        """Sample from the policy, which explorers flatten."""
        flatter = None if greedy or not self.config.explorers else np.resize(self.temperatures, len(observations))
        return Decision(*self.network.act(observations, rng, greedy=greedy, temperatures=flatter))

    def sift(self, rollout: Rollout, *, hold: bool = False) -> Episodes | None:
        """The episodes that ended and are good enough; None while there are none, or while they are held."""
        return self.sieve(rollout, hold=hold)

    def remember(self, played: Episodes) -> None:
        """Hear of all that was played; every `round_episodes` of them call for a round."""
        self.memory.add(played)
        self.owed_episodes += len(played.episode_returns)

    def batches(self) -> Iterator[Batch]:
        """The rounds that are owed, over the elites as they are now."""
        c, memory = self.config, self.memory
        if self.owed_episodes < c.round_episodes:
            return
        rounds, self.owed_episodes = divmod(self.owed_episodes, c.round_episodes)
        if c.rule == "adaptive":
            self.least = threshold(np.array(memory.returns), c.quantile)
        else:
            self.least = c.clean * c.goal
        elites = [kept for kept in memory.kept if kept.score >= self.least]
        if not elites:
            return
        steps = self._join(elites)
        if c.rule == "fixed":
            for _ in range(c.epochs):
                yield from steps.split(torch.from_numpy(self.rng.permutation(len(steps))), c.batch)
            return
        owed, at_once = rounds * c.gradients, max(1, CHUNK_STEPS // c.batch)
        if c.better_steps < 1:  # of as many as will be drawn, since more would only take longer to judge
            some = self.rng.permutation(len(steps))[: owed * c.batch]
            steps = better(steps.take(torch.from_numpy(some)), c.better_steps)
        for done in range(0, owed, at_once):
            drawn = self.rng.integers(len(steps), size=min(at_once, owed - done) * c.batch)
            yield from steps.split(torch.from_numpy(drawn), c.batch)

    def _join(self, elites: list[Kept]) -> Batch:
        """All their steps as one batch."""
        actions = np.concatenate([kept.actions for kept in elites])
        return Batch(
            torch.from_numpy(np.concatenate([kept.observations for kept in elites])),
            torch.from_numpy(actions - self.network.action_start),
            torch.from_numpy(np.concatenate([kept.credits for kept in elites])),
        )

    def gradient(self, batch: Batch) -> Metrics:
        """Cross-entropy of the actions that were played; of continuous ones the squared error."""
        c, plain = self.config, self.plain
        if plain is None:
            outputs = self.network.policy(batch.observations)
        else:
            with torch.no_grad():
                kept = plain.forward(batch.observations)
                outputs = kept[-1]
        slopes = regression_slopes if self.network.continuous else imitation_slopes
        with torch.no_grad():
            metrics, gradient = slopes(outputs, batch.actions, c.entropy)
            if plain is not None:
                plain.backward(kept, gradient)
        if plain is None:
            self.parameters.gradient.zero_()
            outputs.backward(gradient)
        norm = self.parameters.clip_gradient(c.max_gradient_norm)
        return {**metrics, "gradient_norm": norm, "elite_from": self.least}

    def state(self) -> State:
        """The memory, what is owed, the random streams; and the sieve, whose open episodes are this process's own."""
        values = {"rng": rng_state(self.rng), "owed_episodes": self.owed_episodes, "least": self.least}
        state = State({"torch_rng": torch.get_rng_state().numpy()}, values)
        state.put("memory", self.memory.state())
        state.put("sieve", self.sieve.state())
        return state

    def restore(self, state: State) -> None:
        """Go on where `state` was taken."""
        torch.set_rng_state(torch.from_numpy(state.arrays["torch_rng"].copy()))
        set_rng_state(self.rng, state.values["rng"])
        self.owed_episodes, self.least = int(state.values["owed_episodes"]), float(state.values["least"])
        self.memory.restore(state.get("memory"))
        self.sieve.restore(state.get("sieve"))


class Sieve:
    """Where episodes are played: puts them together, keeps the good ones, and counts everything towards the next
    that is sent."""

    def __init__(self, config: EliteConfig, place: Place) -> None:
        lanes = place.envs // place.workers
        self.config = config
        self.episodes = Assembler(lanes, config.episode_steps)
        self.most_told = most_steps(lanes, config.rollout_steps, config.episode_steps)
        self.recent: deque[float] = deque(maxlen=max(1, config.window_episodes // place.workers))  # returns
        self.steps = 0  # played since something was sent
        self.returns, self.lengths = np.zeros(0, np.float32), np.zeros(0, np.int64)  # ended since then
        self.held: list[Episode] = []  # good enough, and not sent yet

    def __call__(self, rollout: Rollout, *, hold: bool = False) -> Episodes | None:
        """Whole episodes as good as the best that were played here lately, or than the fixed rule asks for."""
        c, returns = self.config, rollout.episode_returns
        self.steps += rollout.steps
        self.returns = np.concatenate([self.returns, returns])
        self.lengths = np.concatenate([self.lengths, rollout.episode_lengths])
        self.recent.extend(returns.tolist())
        if c.rule == "fixed":
            whole, part = fixed_rule(returns, goal=c.goal, take=c.take, clean=c.clean)
            kept = [
                one if one.score >= c.take * c.goal else thinned(one, c.cut)
                for one in self.episodes.add(rollout, whole | part)
            ]
        else:
            least = threshold(np.array(self.recent), c.quantile) if self.recent else 0.0
            kept = self.episodes.add(rollout, returns >= least)
        kept = self._ready([one for one in kept if len(one)], hold=hold)
        if not kept:
            return None
        told, steps = self.most_told, self.steps
        sent = Episodes(
            np.concatenate([one.observations for one in kept]), np.concatenate([one.actions for one in kept]),
            np.concatenate([rewards_to_go(one.rewards, c.gamma) for one in kept]),
            np.array([len(one) for one in kept], np.int64), np.array([one.score for one in kept], np.float32),
            rollout.version, steps, self.returns[:told], self.lengths[:told],
        )  # fmt: skip
        self.steps, self.returns, self.lengths = 0, self.returns[told:], self.lengths[told:]
        return sent

    def _ready(self, kept: list[Episode], *, hold: bool) -> list[Episode]:
        """What is sent now, of what was held and what came: no more than one rollout could bring."""
        if sum(map(len, self.held)) + sum(map(len, kept)) > self.most_told:
            ready, self.held = self.held, kept
        elif hold:
            ready, self.held = [], [*self.held, *kept]
        else:
            ready, self.held = [*self.held, *kept], []
        return ready

    def state(self) -> State:
        """Open episodes, recent returns, and what is not told yet; nothing is held where state is saved."""
        recent = np.array(self.recent, np.float64)
        arrays: dict[str, Array] = {"recent": recent, "returns": self.returns, "lengths": self.lengths}
        state = State(arrays, {"steps": self.steps})
        state.put("episodes", self.episodes.state())
        return state

    def restore(self, state: State) -> None:
        """Go on where `state` was taken."""
        self.recent.clear()
        self.recent.extend(state.arrays["recent"].tolist())
        self.steps = int(state.values["steps"])
        self.returns, self.lengths = state.arrays["returns"], state.arrays["lengths"]
        self.episodes.restore(state.get("episodes"))


def threshold(returns: Array, quantile: float) -> float:
    """The return from which on an episode is among the best; one that was reached, so there always are some."""
    return float(np.quantile(returns, quantile, method="lower"))


def fixed_rule(returns: Array, *, goal: float, take: float, clean: float) -> tuple[Array, Array]:
    """Which episodes are kept whole, and which in part; [m] bool each."""
    whole = returns >= take * goal
    return whole, (returns >= clean * goal) & ~whole


def thinned(episode: Episode, cut: float) -> Episode:
    """What stays of an episode that is kept in part: steps whose reward, normalised within it, is above `cut`."""
    spread = float(episode.rewards.std())
    stays = (episode.rewards - episode.rewards.mean()) / (spread or 1.0) > cut
    return Episode(episode.observations[stays], episode.actions[stays], episode.rewards[stays], episode.score)


def rewards_to_go(rewards: Array, gamma: float) -> Array:
    """r[t] + gamma r[t+1] + ... to the end, [n] float32."""
    out, following = np.empty(len(rewards), np.float32), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = float(rewards[t]) + gamma * following
        out[t] = following
    return out


def better(steps: Batch, share: float) -> Batch:
    """The `share` of the steps after which most came in, beyond what is usual where they were taken."""
    usual = regression(baseline_features(steps.observations), steps.credits)
    advantages = steps.credits - usual
    least = advantages.kthvalue(max(1, math.ceil(len(steps) * (1 - share)))).values
    return steps.take(torch.nonzero(advantages >= least)[:, 0])


def regression(features: Tensor, targets: Tensor) -> Tensor:
    """What a linear model of the features, fitted to the targets, says of them; [N]."""
    fitted = slice(None, None, max(1, len(features) // FIT_STEPS))
    x, y = features[fitted].double(), targets[fitted].double()
    ridge = 1e-6 * len(x) * torch.eye(x.shape[1], dtype=torch.float64)  # features may be constant, or the same twice
    said: Tensor = features @ torch.linalg.solve(x.T @ x + ridge, x.T @ y).float()
    return said


def baseline_features(observations: Tensor) -> Tensor:
    """1, what is observed, and the products of every two of it where that is not too much (after Duan 2016); [N, F]."""
    flat = observations.flatten(1).float() if observations.ndim > 1 else observations[:, None].float()
    if flat.shape[1] > MOST_LINEAR:
        return torch.ones(len(flat), 1)
    scaled = ((flat - flat.mean(0)) / (flat.std(0, correction=0) + 1e-6)).clamp(-3, 3)
    features = [torch.ones(len(flat), 1), scaled]
    if flat.shape[1] <= MOST_SQUARED:
        one, other = torch.triu_indices(flat.shape[1], flat.shape[1])
        features.append(scaled[:, one] * scaled[:, other])
    return torch.cat(features, 1)


def imitation_slopes(outputs: Tensor, actions: Tensor, entropy_weight: float) -> tuple[Metrics, Tensor]:
    """Cross-entropy of the actions, less the entropy bonus: its figures, and its gradient by the logits, [N, A]."""
    log_p = torch.log_softmax(outputs, -1)
    p = log_p.exp()
    chosen = actions[:, None]
    entropy = -(p * log_p).sum(-1, keepdim=True)
    loss = -log_p.gather(1, chosen).mean()
    slopes = p.scatter_add(1, chosen, torch.full_like(entropy, -1.0))
    if entropy_weight:
        slopes += entropy_weight * p * (log_p + entropy)
    return {"imitation_loss": loss.item(), "entropy": entropy.mean().item()}, slopes.div_(len(outputs))


def regression_slopes(outputs: Tensor, actions: Tensor, _: float) -> tuple[Metrics, Tensor]:
    """Half the squared error of the mean action: its figure, and its gradient by the mean, [N, A]."""
    errors = outputs - actions
    loss = 0.5 * errors.square().sum(-1).mean()
    return {"imitation_loss": loss.item()}, errors.div_(len(outputs))
