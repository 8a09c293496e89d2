"""Chains whose factors can be merged to one matrix or factor.

Merging is for layers whose chain is slower than one product: a few rows, or factors that the
kernels are slow on.

Where the product's support is full, PyTorch multiplies by the dense matrix, and adds the bias in
the same launch. Where it is Kronecker-sparse, the product is a factor itself, and the fastest way
to multiply by that is taken. A dense matrix would hold zeros there, and zero times infinity is NaN,
also in outputs that do not depend on that input. Where no pattern has the support, a dense matrix
with zeros is taken on CUDA devices, and a kernel behind its product computes the rows again that it
spoilt (chain_repair.py). In float16 chains are not merged: a product of weights may overflow where
the layer's result does not.
"""

from __future__ import annotations

import functools

import torch

from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Chain, Pattern

_DTYPES = ("bfloat16", "float32")
_MOST_ELEMENTS = 2**26  # of a matrix with zeros: 128 MiB in 16 bit


@functools.lru_cache(maxsize=1024)
def merged_pattern(patterns: tuple[Pattern, ...]) -> Pattern:
    """The support of the product of such factors; a dense matrix's where no pattern has it."""
    chain = Chain(patterns)
    return chain.product_support or Pattern(1, chain.out_features, chain.in_features, 1)


@functools.lru_cache(maxsize=1024)
def holds_zeros(patterns: tuple[Pattern, ...]) -> bool:
    """Whether such factors merge to a dense matrix with zeros that no path leads to.

    Example:
        >>> holds_zeros(Chain.parse("(14,3,18,2)*(4,63,6,2)").patterns)
        True
        >>> holds_zeros(Chain.monarch(64, 64, 4).patterns)
        False
    """
    return Chain(patterns).product_support is None


def is_full(pattern: Pattern) -> bool:
    """Whether a factor of this pattern is a dense matrix."""
    return pattern.a == pattern.d == 1


def can_merge(problem: Problem) -> bool:
    """Whether a layer may be computed by the product of its factors.

    Example:
        >>> from ksopt.patterns.chain import Chain
        >>> monarch = Chain.monarch(64, 64, 4)
        >>> [can_merge(Problem(monarch, kind, False)) for kind in ("float32", "float16")]
        [True, False]
        >>> can_merge(Problem(Chain.parse("(4,8,12,2)*(1,48,9,2)"), "float32", False))
        True
    """
    if problem.second is not None or problem.dtype not in _DTYPES or len(problem.chain) == 1:
        return False
    patterns = problem.chain.patterns
    product = merged_pattern(patterns)
    if holds_zeros(patterns):
        return len(patterns) == 2 and problem.siblings == 1 and product.nnz <= _MOST_ELEMENTS
    return problem.siblings == 1 or is_full(product)


def factor_of(problem: Problem) -> Problem | None:
    """The product by one factor that a layer merges to; None where that is a dense matrix.

    Args:
        problem: one that can be merged.

    Example:
        >>> from ksopt.patterns.chain import Chain
        >>> print(factor_of(Problem(Chain.parse("(4,8,12,2)*(1,48,9,2)"), "float32", False)).chain)
        (1,32,9,2)
    """
    product = merged_pattern(problem.chain.patterns)
    if is_full(product):
        return None
    return Problem.of_factor(product, problem.dtype, problem.batch_last, problem.exact)


def product_bytes(problem: Problem) -> int:
    """The bytes of the matrix or factor that a layer merges to."""
    product = merged_pattern(problem.chain.patterns)
    size = getattr(torch, problem.dtype).itemsize
    return int(size) * problem.siblings * product.nnz


def product_in_words(problem: Problem) -> str:
    """The matrix or factor that a layer merges to, as text.

    Example:
        >>> from ksopt.patterns.chain import Chain
        >>> product_in_words(Problem(Chain.monarch(1024, 1024, 8), "bfloat16", False))
        'one dense matrix of 2.0 MiB'
        >>> product_in_words(Problem(Chain.parse("(4,512,12,8)*(1,48,512,8)"), "bfloat16", False))
        'one factor, (1,2048,512,8), of 16.0 MiB'
        >>> chain = Chain.parse("(14,3,18,2)*(4,63,6,2)")
        >>> product_in_words(Problem(chain, "bfloat16", False))
        'one dense matrix of 0.0 MiB with zeros, and a launch that looks for what is not finite'
    """
    size = f"{product_bytes(problem) / 2**20:.1f} MiB"
    if holds_zeros(problem.chain.patterns):
        look = "a launch that looks for what is not finite"
        return f"one dense matrix of {size} with zeros, and {look}"
    factor = factor_of(problem)
    return (
        f"one dense matrix of {size}"
        if factor is None
        else f"one factor, {factor.chain}, of {size}"
    )
