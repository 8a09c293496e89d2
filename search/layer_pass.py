"""The timed pass of a layer: its product and epilogue, as in a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ksopt import ops
from ksopt.epilogue import parts_of_result, with_epilogue
from ksopt.measure.accuracy import Around
from ksopt.operators.base import StructuredOperator
from ksopt.operators.kronecker import KroneckerOperator
from ksopt.search.layer_request import LayerRequest
from ksopt.search.problems import epilogue_of
from ksopt.search.timed_call import Bind, Product


class LayerPass:
    """Binding of weights of operators, or of the dense layer, to the epilogue of a request.

    Args:
        request: With its batch resolved.
        draw: Random numbers of a shape, in the request's dtype, where it measures.
    """

    def __init__(self, request: LayerRequest, draw: Callable[..., Tensor]) -> None:
        self._layout, self._last = request.layout, request.layout == "batch_last"
        after, one = epilogue_of(request), request.size.out_features
        assert request.batch is not None
        features = parts_of_result(after.activation, request.siblings) * one
        shape = (features, request.batch) if self._last else (request.batch, features)
        bias = draw(request.siblings * one) if after.bias else None
        residual = draw(*shape) if after.residual else None
        self.around = Around(bias, after.activation, residual, request.siblings)
        """The epilogue of every product."""

    def bind(self, operator: StructuredOperator) -> Bind:
        """The function from an operator's weights, sibling after sibling, to its pass."""
        if isinstance(operator, KroneckerOperator):
            return self._of_chain
        return partial(self._of_operator, operator)

    def bind_dense(self, weights: Sequence[Tensor]) -> Product:
        """The pass of the dense layer with a matrix [siblings * out_features, in_features]."""
        (w,) = weights
        bias, activation, residual = self._behind
        if self._last:
            return lambda x: with_epilogue(torch.mm(w, x), bias, activation, residual, True)
        return lambda x: with_epilogue(F.linear(x, w, bias), None, activation, residual)

    def _of_chain(self, weights: Sequence[Tensor]) -> Product:
        bias, activation, residual = self._behind
        around = (bias, residual, activation, self._last, self.around.siblings)
        return lambda x: ops.chain(x, weights, *around, op="ks_linear")

    def _of_operator(self, operator: StructuredOperator, weights: Sequence[Tensor]) -> Product:
        length = len(weights) // self.around.siblings
        products = [
            operator.bind(weights[at : at + length], self._layout)
            for at in range(0, len(weights), length)
        ]
        behind = self._behind

        def product(x: Tensor) -> Tensor:
            parts = [one(x) for one in products]
            y = parts[0] if len(parts) == 1 else torch.cat(parts, 0 if self._last else -1)
            return with_epilogue(y, *behind, self._last)

        return product

    @property
    def _behind(self) -> tuple[Tensor | None, str, Tensor | None]:
        return self.around.bias, self.around.activation, self.around.residual
