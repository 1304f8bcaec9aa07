"""Backpropagation written out, against autograd; and what is not plain goes through autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from troupe.nets import Activation, NetSpec, QNetwork, Read
from troupe.parameters import Parameters
from troupe.plain import plain

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
HERE = "tests.unit.test_plain" if __name__.startswith("tests") else __name__


class Own(nn.Module):
    """A user's network that computes something else than its layers say."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.layers = nn.Sequential(Read(space, ()), nn.Linear(3, 8), nn.ReLU())

    def forward(self, observations: Tensor) -> Tensor:
        out: Tensor = 2 * self.layers(observations)
        return out


def network(spec: NetSpec, space: spaces.Space[Any] = BOX) -> QNetwork:
    torch.manual_seed(0)
    made = QNetwork(space, spaces.Discrete(4), spec)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape) * 0.4)
    return made


@pytest.mark.parametrize("activation", ["relu", "tanh", "elu"])
@pytest.mark.parametrize("shape", ["16", "16x8", "8x16x32"])
def test_outputs_and_gradients_are_those_of_autograd(activation: Activation, shape: str) -> None:
    made = network(NetSpec(shape, activation, observation_scale=(0.5, 2.0, 1.0)))
    parameters, seen = Parameters(made), torch.randn(32, 3)
    ways = torch.randn(32, 4)
    made(seen).backward(ways)
    expected = parameters.gradient.clone()
    parameters.gradient[: parameters.count] = 7.0  # what lies there from before is overwritten
    written = plain(made.q)
    assert written is not None
    with torch.no_grad():
        kept = written.forward(seen)
        assert torch.equal(kept[-1], made(seen))
        written.backward(kept, ways)
    torch.testing.assert_close(parameters.gradient, expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 1


def test_it_follows_weights_that_are_put_elsewhere() -> None:
    made = network(NetSpec("8"))
    Parameters(made)
    written = plain(made.q)
    assert written is not None
    Parameters(made).vector.mul_(2.0)  # a second vector: the module's weights and gradients now lie in it
    with torch.no_grad():
        assert torch.equal(written.forward(torch.ones(1, 3))[-1], made(torch.ones(1, 3)))


def test_a_discrete_observation_is_plain_too() -> None:
    made = network(NetSpec("8"), spaces.Discrete(5, start=2))
    written = plain(made.q)
    assert written is not None
    with torch.no_grad():
        assert torch.equal(written.forward(torch.tensor([2, 6]))[-1], made(torch.tensor([2, 6])))


def test_what_is_not_plain_is_told() -> None:
    assert plain(network(NetSpec("8x8", dropout=0.5)).q) is None
    assert plain(network(NetSpec(f"{HERE}:Own")).q) is None
    assert plain(nn.Sequential(nn.Linear(3, 4))) is None
    assert plain(nn.Sequential(Read(BOX, ()), nn.Linear(3, 4, bias=False))) is None
    assert plain(nn.Sequential(Read(BOX, ()), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())) is None
