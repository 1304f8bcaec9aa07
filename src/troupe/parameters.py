"""The vector: all weights of an agent in one flat float32 array, the optimiser's moments beside it, and a version."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from troupe.types import Array, State

PAD = 64  # floats; the fused kernels' vector and tail paths differ in the last bit, so no cut may fall inside a lane
OptimiserName = Literal["adam", "rmsprop"]
SLACK = 1.001  # of a norm after clipping, for rounding
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",)}


class Parameters:
    """Weights, gradient and moments of `module` as flat vectors; the module's own parameters become views into them.

    `version` counts the updates applied so far. `fingerprint` names the layout (layers, shapes, dtypes): two sides
    whose fingerprints differ must not exchange vectors.
    """

    def __init__(self, module: nn.Module, *, optimiser: OptimiserName = "adam", epsilon: float = 1e-5) -> None:
        named = list(module.named_parameters())
        layout = [f"{name}:{tuple(p.shape)}:{p.dtype}" for name, p in named]
        self.fingerprint = hashlib.sha256("\n".join(layout).encode()).hexdigest()[:16]
        self.count = sum(p.numel() for _, p in named)
        size = -(-self.count // PAD) * PAD
        self.vector = torch.zeros(size)
        self.gradient = torch.zeros(size)
        self._views = []
        offset = 0
        for _, p in named:
            self._views.append((p, offset, offset + p.numel()))
            self.vector[offset : offset + p.numel()].view(p.shape).copy_(p.detach())
            p.grad = self.gradient[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        self.version = 0
        self.learning_rate = 0.0
        self.rejected = 0  # gradients that were not sound
        self._longest = float("inf")  # what clipping leaves, once anything was clipped
        self.moments = {name: torch.zeros(size) for name in _MOMENTS[optimiser]} | {"step": torch.tensor(0.0)}
        self.optimise = Optimiser(optimiser, epsilon)
        self._point_views()

    def clip_gradient(self, max_norm: float) -> float:
        """Scale the whole gradient to at most `max_norm`, before anything slices it; its norm as it was."""
        norm = float(torch.linalg.vector_norm(self.gradient))
        if norm > max_norm:
            self.gradient.mul_(max_norm / norm)
        self._longest = max_norm * SLACK
        return norm

    def sound(self) -> bool:
        """Whether the gradient at hand may be applied: finite, and no longer than clipping leaves one.

        A single NaN, or a square that overflows, would stay in the moments for ever; so it is refused, and counted.
        """
        norm = float(torch.linalg.vector_norm(self.gradient))
        if math.isfinite(norm) and norm <= self._longest:
            return True
        self.rejected += 1
        return False

    def apply(self) -> bool:
        """One optimiser step with the gradient at hand; False, and nothing changed, where it is not sound."""
        if not self.sound():
            return False
        self.optimise(self.vector, self.gradient, self.moments, self.learning_rate)
        self.version += 1
        return True

    def lie_in(self, vector: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Move weights and moments, as they are, to memory that others see as well."""
        vector.copy_(self.vector)
        self.vector = vector
        for name, moment in moments.items():
            moment.copy_(self.moments[name])
            self.moments[name] = moment
        self._point_views()

    def _point_views(self) -> None:
        for p, begin, end in self._views:
            p.data = self.vector[begin:end].view(p.shape)

    def weights(self) -> Array:
        """A copy of the weights."""
        return self.vector.numpy().copy()

    def load_weights(self, weights: Array, version: int) -> None:
        """Take over weights that another process made."""
        self.vector.numpy()[:] = weights
        self.version = version

    @contextmanager
    def lent(self, weights: Array) -> Iterator[None]:
        """Use `weights` inside the block and the own ones again after it."""
        own, version = self.weights(), self.version
        self.load_weights(weights, version)
        try:
            yield
        finally:
            self.load_weights(own, version)

    def state(self) -> State:
        """Moments and version; the weights themselves lie beside it in a checkpoint."""
        arrays = {f"moment.{name}": np.atleast_1d(m.numpy().copy()) for name, m in self.moments.items()}
        return State(arrays, {"version": self.version, "fingerprint": self.fingerprint, "rejected": self.rejected})

    def restore(self, weights: Array, state: State) -> None:
        """Take over weights and what `state` returned; the layout must be the same."""
        self.load_weights(weights, int(state.values["version"]))
        for name, moment in self.moments.items():
            moment.copy_(torch.from_numpy(state.arrays[f"moment.{name}"]).view(moment.shape))
        self.rejected = int(state.values["rejected"])


class Optimiser:
    """torch's optimisers by their functional interface: the same kernels, with state that lies where we choose.

    Their classes import torch's compiler at the first call, which costs every process a second and 100 MB.
    """

    def __init__(self, name: OptimiserName, epsilon: float = 1e-5) -> None:
        self.name, self.epsilon = name, epsilon
        self.moments = _MOMENTS[name]  # vectors as long as the weights; "step" beside them is a number

    def __call__(self, vector: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], learning_rate: float) -> None:
        """One step on `vector`, or on a slice of it with the same slice of all else."""
        with torch.no_grad():
            (_adam if self.name == "adam" else _rmsprop)(vector, gradient, moments, self.epsilon, learning_rate)


def _adam(
    vector: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], epsilon: float, learning_rate: float
) -> None:
    adam(
        [vector], [gradient], [moments["exp_avg"]], [moments["exp_avg_sq"]], [], [moments["step"]], fused=True,
        amsgrad=False, beta1=0.9, beta2=0.999, lr=learning_rate, weight_decay=0.0, eps=epsilon, maximize=False,
    )  # fmt: skip


def _rmsprop(
    vector: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], epsilon: float, learning_rate: float
) -> None:
    rmsprop(
        [vector], [gradient], [moments["square_avg"]], [], [], [moments["step"]], foreach=False,
        lr=learning_rate, alpha=0.99, eps=epsilon, weight_decay=0.0, momentum=0.0, centered=False,
    )  # fmt: skip
