"""Kernel problems of a request."""

from __future__ import annotations

from ksopt.kernels.problem import Epilogue, Problem, is_exact
from ksopt.patterns.chain import Chain
from ksopt.search.layer_request import LayerRequest


def epilogue_of(request: LayerRequest) -> Epilogue:
    """The epilogue of each layer."""
    return Epilogue.of_names(request.epilogue)


def problem_of(chain: Chain, request: LayerRequest) -> Problem:
    """The problem of a chain's forward pass with its epilogue and siblings.

    Example:
        >>> request = LayerRequest("4x4", epilogue=("bias", "gelu"), siblings=3)
        >>> problem = problem_of(Chain.parse("(1,4,4,1)"), request)
        >>> problem.epilogue.names, problem.out_features
        (('bias', 'gelu'), 12)
    """
    batch_last, exact = request.layout == "batch_last", is_exact(request.dtype)
    around = epilogue_of(request)
    return Problem(chain, request.dtype, batch_last, exact, around, request.siblings)
