"""The operands of a problem, and the problem of operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ksopt.kernels.problem import (
    SIXTEEN_BIT,
    Epilogue,
    Problem,
    ProblemKey,
    bits_of,
    is_exact,
    rows_of,
)
from ksopt.patterns.chain import Chain, Pattern
from ksopt.precision import dtype_name


@dataclass(frozen=True)
class Operands:
    """The operands of a problem.

    Attributes:
        x: (*batch, N), or (N, *batch) when batch_last.
        weights: (a, b, c, d) of the chain's factors, left to right, sibling after sibling; of two
            layers, the first one's and then the second one's.
        bias: one value for each feature of y; None where the epilogue has none.
        residual: of y's shape; None where the epilogue has none.
        hidden_bias: the first one's of two layers, as ``bias``, which is the second one's then.
    """

    x: Tensor
    weights: tuple[Tensor, ...]
    bias: Tensor | None = None
    residual: Tensor | None = None
    hidden_bias: Tensor | None = None

    @property
    def present(self) -> list[Tensor]:
        """All operands that are not None."""
        tensors = (self.x, *self.weights, self.bias, self.residual, self.hidden_bias)
        return [tensor for tensor in tensors if tensor is not None]

    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """The arguments of a `Call`, a `ChainCall` or an `MlpCall`."""
        if problem.is_factor:
            return self.x, self.weights[0]
        if problem.second is not None:
            return self.x, self.weights, self.hidden_bias, self.bias, self.residual
        return self.x, self.weights, self.bias, self.residual

    def copied(self) -> Operands:
        """The operands with copies of the weights, as a module would store them.

        Their prepared forms go with them.
        """
        with torch.inference_mode(False), torch.no_grad():
            copies = (weight.detach().clone() for weight in self.weights)
            stored = tuple(torch.nn.Parameter(copy, requires_grad=False) for copy in copies)
            return replace(self, weights=stored)


def problem_of(
    operands: Operands, activation: str, batch_last: bool, siblings: int, in_float32: bool = False
) -> Problem:
    """The problem of operands, at torch's present precision."""
    length = len(operands.weights) // siblings
    chain = Chain(tuple(Pattern(*weight.shape) for weight in operands.weights[:length]))
    bias, residual = operands.bias is not None, operands.residual is not None
    dtype = dtype_name(operands.x.dtype)
    is_cast = in_float32 and dtype in SIXTEEN_BIT
    epilogue = Epilogue(bias, activation, residual, is_cast)  # type: ignore[arg-type]
    return Problem(chain, dtype, batch_last, is_exact(dtype), epilogue, siblings)


def key_of(problem: Problem, x: Tensor) -> ProblemKey:
    """The key of choices for a problem with these rows."""
    batch = x.numel() // problem.chain.in_features
    return ProblemKey(problem, rows_of(x, problem.batch_last, batch), bits_of(batch))


def random_operands(problem: Problem, batch: int, device: torch.device) -> Operands:
    """Random operands of a problem with this number of rows, the same each time."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, problem.dtype)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    def rows(features: int) -> Tensor:
        return draw(features, batch) if problem.batch_last else draw(batch, features)

    x = rows(problem.chain.in_features)
    patterns = [p for chain in problem.chains for p in chain] * problem.siblings
    weights = tuple(draw(*p.weight_shape) / p.c**0.5 for p in patterns)
    last = problem.layers()[-1].epilogue
    bias = draw(problem.product_features) if last.bias else None
    residual = rows(problem.out_features) if last.residual else None
    has_hidden = problem.second is not None and problem.epilogue.bias
    hidden = draw(problem.chain.out_features) if has_hidden else None
    return Operands(x, weights, bias, residual, hidden)


def is_real(x: Tensor) -> bool:
    """Whether a tensor has memory; those that a compiler traces with have none."""
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"
    return is_plain and not torch._is_functional_tensor(x)


def has_known_weights(operands: Operands) -> bool:
    """Whether no size of a weight is symbolic."""
    return all(isinstance(size, int) for weight in operands.weights for size in weight.shape)


def size_hint(size: int | torch.SymInt) -> int | None:
    """A size, or this call's where it is dynamic; None if it depends on data."""
    value = size if isinstance(size, int) else size.node.hint
    return int(value) if isinstance(value, int) else None


def in_aligned_rows(tensor: Tensor) -> Tensor:
    """[rows, features], each row's elements side by side from a multiple of 16 bytes on."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    if flat.stride(1) != 1 or (flat.shape[0] > 1 and flat.stride(0) % 8) or flat.data_ptr() % 16:
        return flat.clone(memory_format=torch.contiguous_format)
    return flat
