"""A trained network, and the replacement of its large layers by operators."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from ksopt.operators.base import StructuredOperator
from ksopt.operators.linear import StructuredLinear
from ksopt.patterns.size import Dims
from recipes.tasks import Task


class LargeLinear(nn.Linear):
    """A layer that an operator may replace, created by the factory of the task's networks."""


class ReferenceLinear(StructuredLinear):
    """A layer that computes its operator's reference, in place of kernels of other devices.

    It rounds and omits the same values, so that the network learns the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in_features] -> [*batch, out_features]."""
        y = self.operator.reference(x.reshape(-1, self.in_features), list(self.weights))
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Sizes:
    """The layers that are replaced.

    Args:
        names: By their size, in the network's order.
        rows: Of their input, in a batch.
    """

    names: Mapping[Dims, tuple[str, ...]]
    rows: int


def new_network(task: Task) -> nn.Module:
    """The network with dense large layers, of the width of the network with chains."""
    return task.build(task.sizes["chains"], LargeLinear)


def sizes_of(task: Task, model: nn.Module) -> Sizes:
    """The layers of a network that may be replaced, and the rows of their input."""
    names_of: dict[Dims, list[str]] = {}
    rows: set[int] = set()
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, LargeLinear):
            names_of.setdefault(Dims(layer.in_features, layer.out_features), []).append(name)
            hooks.append(layer.register_forward_hook(lambda _, x, y: rows.add(y[..., 0].numel())))
    x, _ = task.draw(torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    (seen,) = rows  # all layers of these networks see every token
    return Sizes({dims: tuple(names) for dims, names in names_of.items()}, seen)


def converted(
    dense: nn.Module, operators: Mapping[Dims, StructuredOperator]
) -> tuple[nn.Module, float]:
    """A copy with operators fitted to its large layers, and the total error of the fits."""
    model = copy.deepcopy(dense)
    missed = whole = 0.0
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, LargeLinear):
            continue
        operator = operators[Dims(layer.in_features, layer.out_features)]
        matrix = layer.weight.detach()
        fit = operator.nearest(matrix)
        # The parameters are in float32: operators of 16 bit are refused on every device.
        runs = operator.refusal(str(matrix.device), "float32") is None
        new = (StructuredLinear if runs else ReferenceLinear)(operator).to(matrix.device)
        with torch.no_grad():
            for own, weight in zip(new.weights, fit.weights, strict=True):
                own.copy_(weight)
            assert new.bias is not None
            new.bias.copy_(layer.bias)
        model.set_submodule(name, new)
        square = float(matrix.double().norm()) ** 2
        missed, whole = missed + square * fit.relative_error**2, whole + square
    return model, sqrt(missed / whole)


def matrix_of(model: nn.Module, name: str) -> Tensor:
    """The weight of a large layer."""
    layer = model.get_submodule(name)
    assert isinstance(layer, LargeLinear)
    return layer.weight.detach()
