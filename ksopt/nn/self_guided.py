"""Self-guided training: a dense matrix beside each chain, which fades while both are trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ksopt.epilogue import with_epilogue
from ksopt.errors import InvalidInputError
from ksopt.functional import ks_linear
from ksopt.nn.layers import KSLinear, KSStacked
from ksopt.reference import is_batch_last


class SelfGuidedLinear(KSLinear):
    """y = act(α x Wᵀ + (1 - α) x (K_1 ... K_L)ᵀ + bias): a `KSLinear` while `SelfGuided` guides it.

    Attributes:
        dense: W: [out_features, in_features], a parameter.
        alpha: α, a tensor, so that a compiled model is not compiled again for each value.
    """

    dense: nn.Parameter
    alpha: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in_features] -> [*batch, out_features] (features first in batch_last)."""
        last = is_batch_last(self.layout)
        chain = ks_linear(x, self._factors(), layout=self.layout)
        dense = F.linear(x.movedim(0, -1) if last else x, self.dense)
        if last:
            dense = dense.movedim(-1, 0)
        y = torch.lerp(chain, dense, self.alpha.to(chain.dtype))
        bias = None if self.bias is None else self.bias.to(y.dtype)
        return with_epilogue(y, bias, self.activation or "none", batch_last=last)

    def to_dense(self) -> Tensor:
        """The matrix α W + (1 - α) K_1 ... K_L: [out_features, in_features]."""
        return torch.lerp(super().to_dense(), self.dense, self.alpha.to(self.dense.dtype))


class SelfGuided:
    r"""Trains the chains of a model with dense matrices beside them, which fade to nothing.

    Each `KSLinear` of the model computes for a while ::

        y = α x Wᵀ + (1 - α) x (K_1 ... K_L)ᵀ + bias,   α = (1 + cos(π t / steps)) / 2

    after t steps: the dense layer at t = 0, the chain alone at t = steps. Then W is dropped, and
    the model is what it was: the same modules, parameters and names in its state_dict. Until then
    each layer is a `SelfGuidedLinear` with one more parameter, ``dense``, and computes both
    products. Create the optimizer after this, because W must be among its parameters. A wrapper
    that lists the parameters once, such as DistributedDataParallel, is created again when W is
    dropped.

    Args:
        model: Its layers of the class `KSLinear` whose factors are trained are guided, those within
            `KSStacked` too. Layers that share their factors share W.
        steps: After how many steps W is dropped; half of the training in the source.
        dense: Where W starts. Default: at the product of the factors, for training from scratch.
            With the state_dict of a dense model whose layers have become chains, at their trained
            weights: ``NAME.weight`` for the layer NAME, [out_features, in_features]. That model's
            function then turns into the converted model's step by step.

    Attributes:
        layers: The layers that are guided; none when it is over.
        alpha: α of the next step.

    Raises:
        InvalidInputError: There is nothing to guide, one of the layers is guided already, steps is
            not positive, or dense lacks a layer's weight or has one of another shape.

    Source: Wei, Moalla, Pascanu, Gulcehre 2024 (arXiv 2406.16450), self-guided training.

    Example:
        >>> model = nn.Sequential(KSLinear(8, 8, "(1,4,2,2)*(2,2,4,1)"))
        >>> guide = SelfGuided(model, steps=10)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> for step in range(20):
        ...     loss = (model(torch.randn(4, 8)) - 1).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     guide.step(optimizer)
        >>> sorted(model.state_dict())
        ['0.bias', '0.weights.0', '0.weights.1']
    """

    def __init__(
        self, model: nn.Module, steps: int, dense: Mapping[str, Tensor] | None = None
    ) -> None:
        if not steps > 0:
            raise InvalidInputError(f"steps {steps!r}: give the number of steps to guide, above 0")
        if any(isinstance(module, SelfGuidedLinear) for module in model.modules()):
            raise InvalidInputError("the model is guided already: finish the other one first")
        self.steps = steps
        self.layers: list[SelfGuidedLinear] = []
        self._step = 0
        starts = _starts(model, dense)
        if not starts:
            raise InvalidInputError("the model has no KSLinear whose factors are trained")
        matrices: dict[tuple[int, ...], nn.Parameter] = {}
        for layer, start in starts.items():
            shared = tuple(map(id, layer.weights))
            if shared not in matrices:
                matrices[shared] = nn.Parameter(start.to(layer.weights[0], copy=True))
            layer.dense = matrices[shared]
            layer.register_buffer("alpha", torch.ones_like(start[0, 0]), persistent=False)
            # Names, hooks and the places in the model stay: so do torch's parametrizations.
            layer.__class__ = SelfGuidedLinear
            assert isinstance(layer, SelfGuidedLinear)
            self.layers.append(layer)

    @property
    def alpha(self) -> float:
        """The share of the dense matrices, from 1 to 0."""
        return 0.5 * (1 + math.cos(math.pi * self._step / self.steps)) if self.layers else 0.0

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Advance by a step, after the optimizer's; the last one is `finish`.

        Args:
            optimizer: One that shall forget the dense matrices when they are dropped.
        """
        if self.layers:
            self._step += 1
            if self._step >= self.steps:
                self.finish(optimizer)
            self._fill()

    def finish(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop the dense matrices now.

        Args:
            optimizer: One that drops them and their states too. Its groups stay.
        """
        dropped = {id(layer.dense): layer.dense for layer in self.layers}
        for layer in self.layers:
            del layer.dense, layer.alpha
            layer.__class__ = KSLinear  # type: ignore[assignment]
        self.layers = []
        if optimizer is not None:
            for group in optimizer.param_groups:
                group["params"] = [one for one in group["params"] if id(one) not in dropped]
            for matrix in dropped.values():
                optimizer.state.pop(matrix, None)

    def state_dict(self) -> dict[str, Any]:
        """The progress, for a checkpoint beside the model's and the optimizer's."""
        return {"step": self._step, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint whose model was loaded too.

        Raises:
            InvalidInputError: It is of another number of steps, or of one that was over.
        """
        if state["steps"] != self.steps or state["step"] >= self.steps:
            raise InvalidInputError(
                f"the checkpoint is of step {state['step']} of {state['steps']}, but "
                f"{self.steps} steps are to be guided"
            )
        self._step = state["step"]
        self._fill()

    def _fill(self) -> None:
        for layer in self.layers:
            layer.alpha.fill_(self.alpha)


def _starts(model: nn.Module, dense: Mapping[str, Tensor] | None) -> dict[KSLinear, Tensor]:
    """The layers to guide, and where the dense matrix of each starts."""
    starts: dict[KSLinear, Tensor] = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            parts = list(module.parts) if isinstance(module, KSStacked) else [module]
            layers = [one for one in parts if type(one) is KSLinear and one not in starts]
            trained = [one for one in layers if any(w.requires_grad for w in one.weights)]
            if not trained:
                continue
            if dense is None:
                starts.update((layer, layer.to_dense()) for layer in trained)
            else:
                matrix = _matrix(dense, name, module)
                sizes = [part.out_features for part in parts]
                starts.update(
                    (part, rows)
                    for part, rows in zip(parts, matrix.split(sizes), strict=True)
                    if part in trained
                )
    return starts


def _matrix(dense: Mapping[str, Tensor], name: str, layer: nn.Module) -> Tensor:
    """The dense weight of a layer, from a state_dict."""
    key = f"{name}.weight" if name else "weight"
    shape = (layer.out_features, layer.in_features)
    if key not in dense:
        raise InvalidInputError(f"dense has no {key}, where the layer's dense weight would be")
    if tuple(dense[key].shape) != shape:
        raise InvalidInputError(
            f"{key} is {list(dense[key].shape)}, but the layer's dense weight is {list(shape)}, "
            "[out_features, in_features]"
        )
    return dense[key]
