"""The vector: what the module sees, what the optimiser does with it, and what goes into a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from troupe.parameters import PAD, OptimiserName, Parameters
from troupe.types import State

OPTIMISERS: list[OptimiserName] = ["adam", "rmsprop"]


def network(seed: int = 0, hidden: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def backward(module: nn.Module, step: int) -> None:
    """A gradient that depends on the weights and on the step."""
    rng = np.random.default_rng(step)
    inputs = torch.from_numpy(rng.normal(size=(16, 5)).astype(np.float32))
    module(inputs).square().sum().backward()


def train(parameters: Parameters, module: nn.Module, steps: range) -> None:
    parameters.learning_rate = 0.01
    for step in steps:
        parameters.gradient.zero_()
        backward(module, step)
        assert parameters.apply()


def test_the_modules_parameters_and_gradients_are_views_into_the_vector() -> None:
    module = network()
    before = [p.detach().clone() for p in module.parameters()]
    parameters = Parameters(module)
    offset = 0
    for p, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.data_ptr() == parameters.vector[offset:].data_ptr()
        assert p.grad is not None
        assert p.grad.data_ptr() == parameters.gradient[offset:].data_ptr()
        offset += p.numel()
    assert offset == parameters.count
    parameters.vector.fill_(0.5)
    assert all(bool((p == 0.5).all()) for p in module.parameters())
    parameters.gradient.zero_()
    backward(module, 0)
    flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    assert torch.equal(parameters.gradient[: parameters.count], flat)
    assert bool((flat != 0).any())


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_flat_optimiser_is_torchs_own_tensor_by_tensor(name: OptimiserName) -> None:
    module = network()
    twin = copy.deepcopy(module)
    other: torch.optim.Optimizer
    if name == "adam":
        other = torch.optim.Adam(twin.parameters(), lr=0.01, eps=1e-5)
    else:
        other = torch.optim.RMSprop(twin.parameters(), lr=0.01, alpha=0.99, eps=1e-5)
    parameters = Parameters(module, optimiser=name, epsilon=1e-5)
    for step in range(30):
        train(parameters, module, range(step, step + 1))
        other.zero_grad()
        backward(twin, step)
        other.step()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert parameters.version == 30


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_padding_fills_whole_lanes_and_never_changes(name: OptimiserName, hidden: int) -> None:
    module = network(hidden=hidden)
    parameters = Parameters(module, optimiser=name)
    assert len(parameters.vector) == len(parameters.gradient) == -(-parameters.count // PAD) * PAD
    assert PAD == 64
    assert all(len(m) == len(parameters.vector) for m in parameters.moments.values() if m.ndim)
    train(parameters, module, range(10))
    parameters.clip_gradient(0.1)
    for vector in (parameters.vector, parameters.gradient, *(m for m in parameters.moments.values() if m.ndim)):
        assert bool((vector[parameters.count :] == 0).all())


def test_the_gradient_is_clipped_as_a_whole() -> None:
    module = network()
    twin = copy.deepcopy(module)
    parameters = Parameters(module)
    backward(module, 1)
    backward(twin, 1)
    expected = float(nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    assert parameters.clip_gradient(0.5) == pytest.approx(expected, rel=1e-6)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert float(torch.linalg.vector_norm(parameters.gradient)) == pytest.approx(0.5, rel=1e-5)
    before = parameters.gradient.clone()
    assert parameters.clip_gradient(10.0) == pytest.approx(0.5, rel=1e-5)
    assert torch.equal(parameters.gradient, before)


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 30, -1])
def test_a_gradient_that_is_not_finite_changes_nothing(name: OptimiserName, value: float, place: int) -> None:
    module = network()
    parameters = Parameters(module, optimiser=name)
    train(parameters, module, range(3))
    weights, moments = parameters.weights(), parameters.state().arrays
    parameters.gradient[: parameters.count][place] = value
    parameters.clip_gradient(1e6)
    assert not parameters.apply()
    assert parameters.weights().tobytes() == weights.tobytes()
    for key, array in parameters.state().arrays.items():
        assert array.tobytes() == moments[key].tobytes()
    assert (parameters.version, parameters.rejected) == (3, 1)
    train(parameters, module, range(3, 4))
    assert np.isfinite(parameters.weights()).all()
    assert parameters.version == 4


def named(*names: str, width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.rand(width, dtype=dtype)))
    return module


def test_the_fingerprint_is_the_layouts() -> None:
    same = Parameters(named("a", "b")).fingerprint
    assert Parameters(named("a", "b")).fingerprint == same  # other weights, same layout
    shaped = named("a", "b")
    shaped.register_parameter("a", nn.Parameter(torch.rand(2, 2)))  # as many numbers in another shape
    others = [named("b", "a"), named("a", "c"), named("a", "b", "c"), named("a", "b", width=5), shaped]
    found = {Parameters(module).fingerprint for module in others}
    assert same not in found
    assert len(found) == len(others)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_training_goes_on_bit_for_bit_from_what_was_stored(name: OptimiserName) -> None:
    module = network()
    straight = Parameters(module, optimiser=name)
    train(straight, module, range(5))
    straight.rejected = 2
    stored = State()
    stored.put("parameters", straight.state())
    weights = straight.weights()
    train(straight, module, range(5, 12))

    other = network(seed=1)
    resumed = Parameters(other, optimiser=name)
    train(resumed, other, range(2))  # moments of its own, to be replaced
    resumed.restore(weights, stored.get("parameters"))
    assert (resumed.version, resumed.rejected) == (5, 2)
    train(resumed, other, range(5, 12))
    assert resumed.weights().tobytes() == straight.weights().tobytes()
    for key, array in straight.state().arrays.items():
        assert resumed.state().arrays[key].tobytes() == array.tobytes()
    assert resumed.version == straight.version == 12


def test_what_was_stored_or_copied_does_not_change_with_training() -> None:
    module = network()
    parameters = Parameters(module)
    train(parameters, module, range(2))
    weights, state = parameters.weights(), parameters.state()
    copies = weights.copy(), {key: array.copy() for key, array in state.arrays.items()}
    train(parameters, module, range(2, 4))
    np.testing.assert_array_equal(weights, copies[0])
    for key, array in copies[1].items():
        np.testing.assert_array_equal(state.arrays[key], array)


def test_weights_are_lent_and_given_back() -> None:
    module = network()
    parameters = Parameters(module)
    train(parameters, module, range(2))
    own, inputs = parameters.weights(), torch.ones(1, 5)
    expected = network(seed=9)
    others = Parameters(expected).weights()

    def seen() -> Any:
        return module(inputs).detach().numpy()

    answer = seen()
    with parameters.lent(others):
        np.testing.assert_array_equal(seen(), expected(inputs).detach().numpy())
        assert parameters.version == 2
    np.testing.assert_array_equal(seen(), answer)
    with pytest.raises(KeyError), parameters.lent(others):
        raise KeyError
    assert parameters.weights().tobytes() == own.tobytes()
    assert parameters.version == 2
