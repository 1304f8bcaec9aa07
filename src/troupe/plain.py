"""Forward and backward through plain layers, written out: autograd's bookkeeping costs small networks three times the
arithmetic. The same kernels, so the same gradient; a network that is anything else goes through autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from troupe.nets import Read

_InPlace = Callable[[Tensor], Tensor]
_Backward = Callable[[Tensor, Tensor], Tensor]  # (gradient of the outputs, outputs) -> gradient of the inputs
_aten = torch.ops.aten
_ACTIVATIONS: dict[type[nn.Module], tuple[_InPlace, _Backward]] = {
    nn.ReLU: (torch.relu_, lambda gradient, out: _aten.threshold_backward(gradient, out, 0)),
    nn.Tanh: (torch.tanh_, lambda gradient, out: _aten.tanh_backward(gradient, out)),
    nn.ELU: (nn.functional.elu_, lambda gradient, out: _aten.elu_backward(gradient, 1.0, 1, 1, True, out)),
}


class PlainNetwork:
    """A `Read`, then `Linear` layers with one activation between them; weights and gradients stay where they are."""

    def __init__(self, read: Read, layers: list[nn.Linear], activation: type[nn.Module]) -> None:
        self._read = read
        self._layers = [(layer.weight, layer.bias) for layer in layers]
        self._activate, self._activation_backward = _ACTIVATIONS[activation]

    def forward(self, observations: Tensor) -> list[Tensor]:
        """What goes into each layer, and last what comes out; call it without gradients."""
        kept = [self._read.forward(observations)]
        for weight, bias in self._layers[:-1]:
            kept.append(self._activate(linear(kept[-1], weight, bias)))
        kept.append(linear(kept[-1], *self._layers[-1]))
        return kept

    def backward(self, kept: list[Tensor], gradient: Tensor) -> None:
        """Write the gradient of all weights, from what `forward` kept and the gradient of what came out, [N, A]."""
        for i in range(len(self._layers) - 1, -1, -1):
            weight, bias = self._layers[i]
            torch.mm(gradient.t(), kept[i], out=weight.grad)
            torch.sum(gradient, 0, out=bias.grad)
            if i:
                gradient = self._activation_backward(torch.mm(gradient, weight), kept[i])


def plain(network: nn.Sequential) -> PlainNetwork | None:
    """`network` as a plain one, if that is what it is: Read, Linear, activation, Linear, activation... Linear."""
    modules = [module for module in network.modules() if type(module) is not nn.Sequential]
    read, layers, between = modules[0], modules[1::2], modules[2::2]
    kinds = {type(module) for module in between} or {nn.ReLU}
    if type(read) is not Read or len(layers) != len(between) + 1 or len(kinds) != 1 or not kinds <= set(_ACTIVATIONS):
        return None
    linears = [layer for layer in layers if type(layer) is nn.Linear and layer.bias is not None]
    return PlainNetwork(read, linears, kinds.pop()) if len(linears) == len(layers) else None
