"""Check of the results of a trial before timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ksopt.errors import KsoptError
from ksopt.measure.accuracy import AccuracyCheck, Errors, PlainProduct
from ksopt.operators.base import StructuredOperator
from ksopt.search import timed_call
from ksopt.search.layer_pass import LayerPass
from ksopt.search.layer_request import LayerRequest


class WrongResultError(KsoptError, RuntimeError):
    """A chain's product is wrong, so it is not timed."""


class ProductCheck:
    """Comparison of an operator's product, and with ``train`` its gradients, with float64.

    The whole batch is multiplied and must be finite; rows spread over it are compared.

    Args:
        operator: The operator.
        x: Its input.
        weights: Its weights, of all siblings.
        request: With the layout, and whether a step of training is timed.
        layer: Its epilogue.
    """

    def __init__(
        self,
        operator: StructuredOperator,
        x: Tensor,
        weights: Sequence[Tensor],
        request: LayerRequest,
        layer: LayerPass,
    ) -> None:
        self._operator, self._x, self._weights = operator, x, weights
        self._layout, self._train = request.layout, request.train
        self._around, self._bind = layer.around, layer.bind(operator)
        self.pytorch_error = 0.0
        """PyTorch's relative error, of the operator's plain product in the same dtype."""

    def errors(self) -> Errors:
        """The product's errors.

        Raises:
            WrongResultError: They are too large, or those of a gradient are.
        """
        with torch.inference_mode():
            y = self._bind(self._weights)(self._x)
            if not bool(torch.isfinite(y).all()):
                raise WrongResultError("its product is not finite")
            plain = self._plain(self._operator.reference, self._operator.terms())
            check = AccuracyCheck(
                self._x, self._weights, self._layout, product=plain, around=self._around
            )
            errors = check.errors(y)
        self.pytorch_error = check.pytorch.relative
        _refuse("its", check, errors)
        if self._train:
            self._check_gradients()
        return errors

    def _check_gradients(self) -> None:
        """Check that all gradients are finite, and that of the input is right on some rows."""
        gradient = torch.ones_like(self._bind(self._weights)(self._x))
        gradients = timed_call.training_step(self._bind, self._x, self._weights, gradient)()
        if not all(bool(torch.isfinite(one).all()) for one in gradients):
            raise WrongResultError("its gradients are not finite")
        # The longest dim of a weight bounds the number of summed terms.
        terms = [max(shape) for shape in self._operator.parameter_shapes()]
        plain = self._plain(self._input_gradient, terms)
        check = AccuracyCheck(gradient, self._weights, self._layout, product=plain)
        _refuse("its input gradient's", check, check.errors(gradients[0]))

    def _plain(
        self, of: Callable[[Tensor, Sequence[Tensor]], Tensor], terms: Sequence[int]
    ) -> PlainProduct:
        return PlainProduct(of, terms, self._operator.rows_together)

    def _input_gradient(self, gradient: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Input gradient for [rows, out_features]; by linearity it does not depend on the input."""
        shape = (gradient.shape[0], self._operator.in_features)
        x = gradient.new_zeros(shape, requires_grad=True)
        (of_x,) = torch.autograd.grad(self._operator.reference(x, weights), x, gradient)
        return of_x


def _refuse(whose: str, check: AccuracyCheck, errors: Errors) -> None:
    fault = check.fault(errors)
    if fault is not None:
        raise WrongResultError(
            f"{whose} {fault} (PyTorch's relative error is {check.pytorch.relative:.1e})"
        )
