"""Networks: what is built from a shape or a class of the user's, and the actions that come out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from troupe.errors import ConfigError
from troupe.nets import ActorCritic, NetSpec, Read, action_size, body, features, load_object, widths
from troupe.parameters import Parameters
from troupe.roles.learn import learn
from troupe.schemes.exchange import apply_here
from troupe.types import Array

BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)
HERE = __name__


class Own(nn.Module):
    """A user's network."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(space.shape or ()), 11)

    def forward(self, observations: Tensor) -> Tensor:
        out: Tensor = self.layer(observations)
        return torch.relu(out)


class Flat(Own):
    """Forgets the batch."""

    def forward(self, observations: Tensor) -> Tensor:
        return super().forward(observations).flatten()


class Turned(Own):
    """Gives features by observations."""

    def forward(self, observations: Tensor) -> Tensor:
        return super().forward(observations).T


class Deep(Own):
    """Gives a feature map."""

    def forward(self, observations: Tensor) -> Tensor:
        return super().forward(observations)[:, None]


class Tupled(Own):
    """Gives no tensor."""

    def forward(self, observations: Tensor) -> Tensor:
        return super().forward(observations), None  # type: ignore[return-value]


class Raises(Own):
    """Fails in forward."""

    def forward(self, observations: Tensor) -> Tensor:
        raise RuntimeError("first line\nmat1 and mat2 do not fit")


def not_a_module(space: spaces.Space[Any]) -> list[int]:
    return [1]


def no_argument() -> nn.Module:
    return nn.Identity()


def act(network: ActorCritic, observations: Array, *, greedy: bool = False, seed: int = 0) -> tuple[Array, Array]:
    return network.act(observations, np.random.default_rng(seed), greedy=greedy)


def spread_out(network: ActorCritic, seed: int = 0) -> ActorCritic:
    """Far from the near-uniform policy that a network starts with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.6)
    return network


@pytest.mark.parametrize(("shape", "expected"), [("64x64", [64, 64]), ("8", [8]), ("128x256x512", [128, 256, 512])])
def test_widths(shape: str, expected: list[int]) -> None:
    assert widths(shape) == expected
    network, size = body(BOX, NetSpec(shape))
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert [m.out_features for m in layers] == expected
    assert size == expected[-1]


@pytest.mark.parametrize("shape", ["", "x", "64x", "0x64", "64x-1", "64*64", "sixty", "6.4"])
def test_what_is_no_shape_is_refused(shape: str) -> None:
    with pytest.raises(ConfigError, match="give widths such as 64x64, or your own module:Class"):
        body(BOX, NetSpec(shape))


@pytest.mark.parametrize(("name", "kind"), [("tanh", nn.Tanh), ("relu", nn.ReLU), ("elu", nn.ELU)])
def test_the_activation_stands_between_the_layers(name: Any, kind: type[nn.Module]) -> None:
    network, _ = body(BOX, NetSpec("8x8", activation=name))
    assert sum(type(m) is kind for m in network.modules()) == 2


def test_dropout_is_after_each_layer_and_only_in_gradients() -> None:
    torch.manual_seed(0)
    network = spread_out(ActorCritic(BOX, spaces.Discrete(3), NetSpec("32x32", dropout=0.5)))
    drops = [m for m in network.modules() if isinstance(m, nn.Dropout)]
    assert [m.p for m in drops] == [0.5] * 4  # two layers each in policy and value
    observations = np.ones((64, 4), np.float32)
    before = torch.get_rng_state()
    chosen, log_probs = act(network, observations, greedy=True)
    values = network.values(torch.from_numpy(observations))
    assert len(np.unique(chosen)) == len(np.unique(log_probs)) == len(set(values.tolist())) == 1
    assert torch.equal(torch.get_rng_state(), before)
    modes: list[bool] = []

    class Algorithm:
        def __init__(self) -> None:
            self.network, self.parameters = network, Parameters(network)

        def batches(self) -> Any:
            modes.append(drops[0].training)  # values are computed in here
            yield None

        def gradient(self, batch: object) -> dict[str, float]:
            modes.extend(m.training for m in drops)
            assert len(set(network.values(torch.from_numpy(observations)).tolist())) > 1
            return {}

    learn(Algorithm(), apply_here)  # type: ignore[arg-type]
    assert modes == [False, True, True, True, True]
    assert not any(m.training for m in network.modules())


def test_a_network_of_the_users_own() -> None:
    network = ActorCritic(BOX, spaces.Discrete(3), NetSpec(f"{HERE}:Own"))
    own = [m for m in network.modules() if isinstance(m, Own)]
    assert len(own) == 2  # policy and value share nothing
    assert own[0].layer.weight.data_ptr() != own[1].layer.weight.data_ptr()
    chosen, _ = act(network, np.zeros((5, 4), np.float32))
    assert chosen.shape == network.values(torch.zeros(5, 4)).shape == (5,)
    body(spaces.Box(-1.0, 1.0, (4,), np.float64), NetSpec(f"{HERE}:Own"))  # doubles are fed as floats


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("not_a_module", "it made a list, not a torch.nn.Module"),
        ("Flat", r"must become features \[2, F\], not \[22\]"),
        ("Turned", r"must become features \[2, F\], not \[11, 2\]"),
        ("Deep", r"must become features \[2, F\], not \[2, 1, 11\]"),
        ("Tupled", r"must become features \[2, F\], not tuple"),
        ("Raises", "cannot be used: RuntimeError: mat1 and mat2 do not fit"),
        ("no_argument", "cannot be used: TypeError: "),
        ("Absent", f"module '{HERE}' has no 'Absent'"),
    ],
)
def test_a_network_that_cannot_be_used_is_refused_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        body(BOX, NetSpec(f"{HERE}:{name}"))
    assert f"--net {HERE}:{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module_at_all:X", "there is no module 'no_such_module_at_all'"),
        ("troupe.no_such:X", "there is no module 'troupe.no_such'"),
        (":X", "write it as module:Class"),
        ("troupe:", "write it as module:Class"),
        (".nets:X", "write it as module:Class"),
    ],
)
def test_a_name_that_cannot_be_imported_says_which_half_is_wrong(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_object(name, "--net")


def test_a_discrete_observation_becomes_one_hot_from_its_start() -> None:
    space = spaces.Discrete(4, start=3)
    seen = Read(space, ())(torch.tensor([3, 6, 4]))
    assert seen.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert seen.dtype == torch.float32
    network = ActorCritic(space, spaces.Discrete(2), NetSpec("8"))
    assert act(network, np.array([3, 6]))[0].shape == (2,)


def test_observations_are_flattened_and_scaled() -> None:
    assert features(spaces.Box(0, 255, (2, 3), np.uint8)) == 6
    image = torch.full((1, 2, 3), 10, dtype=torch.uint8)
    assert Read(spaces.Box(0, 255, (2, 3), np.uint8), (0.5,))(image).tolist() == [[5.0] * 6]
    assert Read(BOX, (1.0, 2.0, 3.0, 4.0))(torch.ones(2, 4)).tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2
    assert Read(BOX, ())(torch.ones(1, 4)).tolist() == [[1.0] * 4]
    with pytest.raises(ConfigError, match="observation_scale has 3 numbers, but an observation has 4"):
        body(BOX, NetSpec(observation_scale=(1.0, 2.0, 3.0)))
    network = ActorCritic(BOX, spaces.Discrete(2), NetSpec("8", observation_scale=(2.0,)))
    assert len(list(network.parameters())) == 8  # the scale is fixed: it is not learned


@pytest.mark.parametrize("shape", ["64x64", f"{HERE}:Own"])
@pytest.mark.parametrize("space", [spaces.Dict({"a": BOX}), spaces.Tuple([BOX]), spaces.MultiBinary(3)])
def test_an_observation_space_that_cannot_be_read_is_named(space: spaces.Space[Any], shape: str) -> None:
    with pytest.raises(ConfigError, match=f"observation space {type(space).__name__} is not supported"):
        body(space, NetSpec(shape))


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([2, 2]), spaces.Box(-1, 1, (2, 2)), spaces.Dict({"a": BOX})])
def test_an_action_space_that_cannot_be_acted_in_is_named(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError, match=r"action space .* is not supported") as caught:
        action_size(space)
    assert str(space) in str(caught.value)
    with pytest.raises(ConfigError, match="action space"):
        ActorCritic(BOX, space, NetSpec())


@pytest.mark.parametrize("start", [0, 1, -2])
def test_sampled_actions_follow_the_softmax(start: int) -> None:
    network = spread_out(ActorCritic(BOX, spaces.Discrete(4, start=start), NetSpec("16")))
    one = np.array([[0.3, -0.2, 0.9, 0.1]], np.float32)
    draws = 20_000
    chosen, log_probs = act(network, np.repeat(one, draws, 0))
    assert chosen.dtype == np.int64
    with torch.no_grad():
        p = torch.softmax(network.policy(torch.from_numpy(one)), -1)[0].numpy()
    counts = np.bincount(chosen - start, minlength=4)
    assert len(counts) == 4
    chi_square = float(((counts - draws * p) ** 2 / (draws * p)).sum())
    assert chi_square < 16.27  # 0.1 % point at three degrees of freedom
    assert p.max() - p.min() > 0.1  # else a uniform choice would pass as well
    np.testing.assert_allclose(log_probs, np.log(p[chosen - start]), atol=1e-5)


@pytest.mark.parametrize("action", [spaces.Discrete(5), spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,))])
@pytest.mark.parametrize("greedy", [False, True])
def test_the_log_probabilities_are_those_that_learning_computes(action: spaces.Space[Any], greedy: bool) -> None:
    network = spread_out(ActorCritic(BOX, action, NetSpec("16x16")))
    observations = np.random.default_rng(1).normal(size=(200, 4)).astype(np.float32)
    chosen, log_probs = act(network, observations, greedy=greedy)
    with torch.no_grad():
        expected, _ = network.log_prob_entropy(torch.from_numpy(observations), torch.from_numpy(chosen))
    np.testing.assert_allclose(log_probs, expected.numpy(), atol=1e-5)
    assert log_probs.dtype == np.float32


def test_greedy_is_the_most_likely_action_and_draws_nothing() -> None:
    network = spread_out(ActorCritic(BOX, spaces.Discrete(5, start=1), NetSpec("16")))
    observations = np.random.default_rng(2).normal(size=(300, 4)).astype(np.float32)
    rng = np.random.default_rng(0)
    chosen, _ = network.act(observations, rng, greedy=True)
    with torch.no_grad():
        expected = network.policy(torch.from_numpy(observations)).argmax(-1).numpy() + 1
    np.testing.assert_array_equal(chosen, expected)
    assert len(np.unique(chosen)) > 2
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state


def test_the_same_stream_gives_the_same_actions() -> None:
    network = spread_out(ActorCritic(BOX, spaces.Discrete(4), NetSpec("16")))
    observations = np.random.default_rng(2).normal(size=(100, 4)).astype(np.float32)
    np.testing.assert_array_equal(act(network, observations, seed=3)[0], act(network, observations, seed=3)[0])
    assert (act(network, observations, seed=3)[0] != act(network, observations, seed=4)[0]).any()


def test_an_action_of_no_weight_is_never_drawn_and_huge_outputs_do_not_overflow() -> None:
    network = ActorCritic(BOX, spaces.Discrete(3), NetSpec("4"))
    with torch.no_grad():
        head = network.policy[-1]
        assert isinstance(head, nn.Linear)
        head.weight.zero_()
        head.bias.copy_(torch.tensor([1e4, -1e4, 1e4]))
    chosen, log_probs = act(network, np.zeros((2000, 4), np.float32))
    assert set(chosen.tolist()) == {0, 2}
    np.testing.assert_allclose(log_probs, math.log(0.5), atol=1e-6)


def test_gaussian_actions_are_torchs() -> None:
    network = spread_out(ActorCritic(BOX, spaces.Box(-1, 1, (3,)), NetSpec("16")))
    observations = np.random.default_rng(3).normal(size=(50, 4)).astype(np.float32)
    chosen, log_probs = act(network, observations)
    with torch.no_grad():
        mean = network.policy(torch.from_numpy(observations))
        reference: Any = torch.distributions.Normal(mean, network.log_std.exp())
        expected = reference.log_prob(torch.from_numpy(chosen)).sum(-1)
        again, entropy = network.log_prob_entropy(torch.from_numpy(observations), torch.from_numpy(chosen))
    assert chosen.shape == (50, 3)
    assert chosen.dtype == log_probs.dtype == np.float32
    np.testing.assert_allclose(log_probs, expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(again.numpy(), expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), reference.entropy().sum(-1).numpy(), atol=1e-5)
    np.testing.assert_allclose(act(network, observations, greedy=True)[0], mean.numpy(), atol=1e-6)
    many, _ = act(network, np.repeat(observations[:1], 20_000, 0))
    np.testing.assert_allclose(many.mean(0), mean[0].numpy(), atol=0.05)
    np.testing.assert_allclose(many.std(0), network.log_std.detach().exp().numpy(), rtol=0.03)


def test_entropy_of_a_discrete_policy_is_torchs() -> None:
    network = spread_out(ActorCritic(BOX, spaces.Discrete(4), NetSpec("16")))
    observations = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, entropy = network.log_prob_entropy(observations, torch.zeros(20, dtype=torch.int64))
        reference: Any = torch.distributions.Categorical(logits=network.policy(observations))
        expected = reference.entropy()
    torch.testing.assert_close(entropy, expected)


def test_a_new_policy_is_nearly_uniform_and_its_networks_share_nothing() -> None:
    network = ActorCritic(BOX, spaces.Discrete(4), NetSpec())
    _, log_probs = act(network, np.ones((100, 4), np.float32))
    np.testing.assert_allclose(log_probs, -math.log(4), atol=0.05)
    loss = network.values(torch.ones(1, 4)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in network.policy.parameters())
    assert all(p.grad is not None for p in network.value.parameters())
