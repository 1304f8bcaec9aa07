"""Networks: a body by shape or of the user's own, and the heads that the algorithms need."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from troupe.errors import ConfigError, last_line
from troupe.types import Array

Activation = Literal["tanh", "relu", "elu"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


@dataclass(frozen=True)
class NetSpec:
    """What is asked of a network: `shape` is widths ("64x64") or the user's own "module:Class"."""

    shape: str = "64x64"
    activation: Activation = "tanh"
    dropout: float = 0.0
    observation_scale: tuple[float, ...] = ()  # fixed, per preset: a running one cannot be merged soundly


def widths(shape: str) -> list[int]:
    """`64x64` -> [64, 64]."""
    parts = shape.split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--net {shape}: give widths such as 64x64, or your own module:Class")
    return [int(part) for part in parts]


def load_object(name: str, what: str) -> Any:
    """The object that `module:name` stands for; ConfigError says which half is wrong."""
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ConfigError(f"{what} {name}: write it as module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name and module_name.startswith(e.name):
            raise ConfigError(f"{what} {name}: there is no module {e.name!r} to import here") from e
        raise
    try:
        return getattr(module, attribute)
    except AttributeError as e:
        raise ConfigError(f"{what} {name}: module {module_name!r} has no {attribute!r}") from e


def features(space: spaces.Space[Any]) -> int:
    """How many numbers an observation is; refuses spaces that no body here can read."""
    if isinstance(space, spaces.Box):
        return math.prod(space.shape)
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    raise ConfigError(
        f"observation space {type(space).__name__} is not supported: use Box or Discrete "
        "(gymnasium.wrappers.FlattenObservation turns Dict and Tuple into Box)"
    )


class Read(nn.Module):
    """Observation as it comes -> flat, scaled float32; Discrete becomes one-hot."""

    scale: Tensor

    def __init__(self, space: spaces.Space[Any], scale: tuple[float, ...]) -> None:
        super().__init__()
        size = features(space)
        if scale and len(scale) not in (1, size):
            raise ConfigError(f"observation_scale has {len(scale)} numbers, but an observation has {size}")
        self.one_hot = size if isinstance(space, spaces.Discrete) else 0
        self.start = int(space.start) if isinstance(space, spaces.Discrete) else 0
        self.scaled = bool(scale)
        self.register_buffer("scale", torch.tensor(scale or (1.0,)))

    def forward(self, observations: Tensor) -> Tensor:
        if self.one_hot:
            return nn.functional.one_hot(observations.long() - self.start, self.one_hot).float()
        flat = observations.flatten(1).float()
        return flat * self.scale if self.scaled else flat


def body(space: spaces.Space[Any], spec: NetSpec) -> tuple[nn.Module, int]:
    """Observation -> features, and how many features."""
    if ":" in spec.shape:
        return _own_body(space, spec.shape)
    layers: list[nn.Module] = [Read(space, spec.observation_scale)]
    size = features(space)
    for width in widths(spec.shape):
        layers += [_linear(size, width, math.sqrt(2)), _ACTIVATIONS[spec.activation]()]
        if spec.dropout:
            layers.append(nn.Dropout(spec.dropout))
        size = width
    return nn.Sequential(*layers), size


def _own_body(space: spaces.Space[Any], name: str) -> tuple[nn.Module, int]:
    features(space)  # refuses what no observation batch can be made of
    try:
        own = load_object(name, "--net")(space)
        if not isinstance(own, nn.Module):
            raise ConfigError(f"--net {name}: it made a {type(own).__name__}, not a torch.nn.Module")
        with torch.no_grad():
            out = own(torch.from_numpy(np.stack([space.sample()] * 2).astype(observation_dtype(space))))
    except ConfigError:
        raise
    except Exception as e:  # whatever the user's module may raise becomes one sentence that names it
        raise ConfigError(f"--net {name} cannot be used: {last_line(e)}") from e
    shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[0] != 2:
        raise ConfigError(f"--net {name}: observations [2, ...] must become features [2, F], not {shape}")
    return own, int(out.shape[1])


def observation_dtype(space: spaces.Space[Any]) -> Any:
    """What networks are fed: doubles become floats, all else stays."""
    return np.float32 if space.dtype == np.float64 else space.dtype


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


_PLAIN = (nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU, nn.ELU, Read)


class _Network(nn.Module):
    """What the agents' networks share: they are in evaluation mode but for gradients, and switching costs nothing."""

    def _settle(self) -> None:
        """Last of all in a constructor."""
        super().train(False)  # dropout is for gradients alone, see roles/learn
        self._moody = [module for module in self.modules() if module is not self and type(module) not in _PLAIN]

    def train(self, mode: bool = True) -> Self:
        """Switch only what differs by mode: a walk over every module, at every gradient, would cost 80 us."""
        for module in self._moody:
            module.train(mode)
        return self


class PolicyNetwork(_Network):
    """A policy alone: the chances of each action, or the mean of a Gaussian.

    The Gaussian's spread is learned with the rest, or, as whoever imitates needs it, set from outside.
    """

    log_std: Tensor  # [A]

    def __init__(
        self, observation: spaces.Space[Any], action: spaces.Space[Any], spec: NetSpec, *, learned_std: bool = True
    ) -> None:
        super().__init__()
        self.continuous = isinstance(action, spaces.Box)
        self.action_start = int(action.start) if isinstance(action, spaces.Discrete) else 0
        self.actions = outputs = action_size(action)
        policy, size = body(observation, spec)
        self.policy = nn.Sequential(policy, _linear(size, outputs, 0.01))  # near-uniform at the start
        if self.continuous and learned_std:
            self.log_std = nn.Parameter(torch.zeros(outputs))
        elif self.continuous:
            self.register_buffer("log_std", torch.zeros(outputs))
        self._settle()

    def log_prob_entropy(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """log pi(a|o) and the entropy of pi(.|o), [N] each."""
        out: Tensor = self.policy(observations)
        if self.continuous:
            z = (actions - out) * torch.exp(-self.log_std)
            log_prob = (-0.5 * z * z - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
            entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(out))
            return log_prob, entropy
        log_p = torch.log_softmax(out, -1)
        chosen = log_p.gather(-1, (actions - self.action_start)[:, None]).squeeze(-1)
        return chosen, -(log_p.exp() * log_p).sum(-1)

    def act(
        self, observations: Array, rng: np.random.Generator, *, greedy: bool, temperatures: Array | None = None
    ) -> tuple[Array, Array]:
        """Actions and their log-probabilities; numpy samples, since the random stream is ours to save.

        `temperatures`, [N]: how much flatter than the policy to choose.
        """
        with torch.inference_mode():
            out = self.policy(torch.from_numpy(observations)).numpy()
        if self.continuous:
            return self._act_gaussian(out, rng, greedy=greedy, temperatures=temperatures)
        if temperatures is not None:
            out /= temperatures[:, None]
        out -= out.max(-1, keepdims=True)
        weights = np.exp(out)
        edges = weights.cumsum(-1)
        if greedy:
            chosen = out.argmax(-1)
        else:
            u = rng.random((len(out), 1), np.float32) * edges[:, -1:]
            chosen = np.minimum((edges <= u).sum(-1), out.shape[-1] - 1)
        log_probs = np.take_along_axis(out, chosen[:, None], -1)[:, 0] - np.log(edges[:, -1])
        return chosen + self.action_start, log_probs

    def _act_gaussian(
        self, mean: Array, rng: np.random.Generator, *, greedy: bool, temperatures: Array | None
    ) -> tuple[Array, Array]:
        log_std = self.log_std.detach().numpy()
        if temperatures is not None:
            log_std = log_std + np.log(temperatures)[:, None]
        z = np.zeros_like(mean) if greedy else rng.standard_normal(mean.shape, np.float32)
        log_probs = (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        return mean + z * np.exp(log_std), log_probs.astype(np.float32)


class ActorCritic(PolicyNetwork):
    """A policy and a value network side by side; they share nothing but the vector."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any], spec: NetSpec) -> None:
        super().__init__(observation, action, spec)
        value, size = body(observation, spec)
        self.value = nn.Sequential(value, _linear(size, 1, 1.0))
        self._settle()

    def values(self, observations: Tensor) -> Tensor:
        """V(o), [N]."""
        out: Tensor = self.value(observations)
        return out.squeeze(-1)


class QNetwork(_Network):
    """The value of every action, [N, A]; dueling: as the value of the state and what each action adds to it."""

    def __init__(
        self, observation: spaces.Space[Any], action: spaces.Discrete, spec: NetSpec, *, dueling: bool = False
    ) -> None:
        super().__init__()
        self.observation_shape = observation.shape or ()
        self.observation_dtype = str(np.dtype(observation_dtype(observation)))
        self.actions, self.action_start, self.dueling = int(action.n), int(action.start), dueling
        features, size = body(observation, spec)
        self.q = nn.Sequential(features, _linear(size, self.actions + dueling, 0.01))  # no action is dear at the start
        self._settle()

    def forward(self, observations: Tensor) -> Tensor:
        out: Tensor = self.q(observations)
        if not self.dueling:
            return out
        advantages = out[:, 1:]
        return out[:, :1] + advantages - advantages.mean(1, keepdim=True)  # Wang 2016, eq. 9


def action_size(space: spaces.Space[Any]) -> int:
    """How many numbers the policy head gives; refuses spaces that no head here can act in."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return int(space.shape[0])
    raise ConfigError(
        f"action space {space} is not supported: the agents act in Discrete, or in a flat Box for continuous actions"
    )
