"""The layer `StructuredLinear`, whose matrix is a structured operator's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ksopt.nn import init
from ksopt.operators.registry import Replacement, operator_of, parse
from ksopt.reference import is_batch_last


class StructuredLinear(nn.Module):
    """A layer y = x Wᵀ + bias of any registered structure; for chains, `KSLinear` has more options.

    Args:
        operator: The operator, or its text.
        bias: Whether to add a learnable bias.
        layout: "batch_first" for x [*batch, in_features], "batch_last" for [in_features, *batch].
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        weights: The operator's, in its order.
        bias: [out_features], or None.
        operator: The operator; ``in_features``, ``out_features`` and ``layout`` too.

    Weights are drawn so that outputs have the variance of `torch.nn.Linear`'s: see `KSLinear`. An
    operator may draw its weights itself: Strassen-Tile begins with Strassen's algorithm.

    Raises:
        InvalidInputError: There is no such operator, or no such layout.

    Example:
        >>> StructuredLinear("(1,4,4,2)*(2,4,4,1)")(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        operator: Replacement | str,
        bias: bool = True,
        layout: str = "batch_first",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        is_batch_last(layout)
        self.operator = operator_of(parse(operator) if isinstance(operator, str) else operator)
        self.in_features, self.out_features = self.operator.in_features, self.operator.out_features
        self.layout = layout
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            for shape in self.operator.parameter_shapes()
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values for all parameters."""
        self.operator.draw(list(self.weights), init.LINEAR_GAIN)
        if self.bias is not None:
            init.bias_uniform_(self.bias, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in_features] -> [*batch, out_features] (features first in batch_last)."""
        y = self.operator.bind(list(self.weights), self.layout)(x)
        if self.bias is None:
            return y
        last = is_batch_last(self.layout)
        return y + (self.bias.view(-1, *(1,) * (y.dim() - 1)) if last else self.bias)

    def to_dense(self) -> Tensor:
        """The matrix: [out_features, in_features], as nn.Linear's weight.

        For an operator that multiplies rows together, its product with the identity.
        """
        first = self.weights[0]
        eye = torch.eye(self.in_features, device=first.device, dtype=first.dtype)
        return self.operator.reference(eye, list(self.weights)).T

    def extra_repr(self) -> str:
        """The text between the parentheses of the module's repr."""
        return f"{self.operator}, bias={self.bias is not None}, layout={self.layout}"
