r"""Initialization of the factors of a chain that preserves the variance of a signal.

Factor l with independent weights of mean 0 and variance v_l adds c_l inputs up to each of its
outputs, and sends each of its inputs to b_l outputs. So it multiplies the mean square of what comes
forward by c_l v_l, and that of the gradient that comes back by b_l v_l, whatever the correlation of
the inputs. A chain of L factors that is to multiply it by gain² shares that among them::

    v_l = gain^(2/L) / fan_l,   weights[l] ~ U(-β_l, β_l),   β_l = sqrt(3 v_l)

with fan_l = c_l for the signal that comes forward, and b_l for the gradient. For one factor
(1, M, N, 1) these are `torch.nn.init.kaiming_uniform_`'s modes fan_in and fan_out.

Source: He et al. 2015 (arXiv 1502.01852), for each factor; the gain is shared as `KSLinear` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ksopt.errors import InvalidInputError

MODES = ("fan_in", "fan_out", "mup")
LINEAR_GAIN = 3.0**-0.5
"""That of `torch.nn.Linear`: outputs of a third of the inputs' mean square."""


def chain_uniform_(weights: Iterable[Tensor], gain: float = 1.0, mode: str = "fan_in") -> None:
    """Draw the factors of a chain, in place.

    Args:
        weights: The factors, [a, b, c, d] each: ``layer.weights`` of a `KSLinear`.
        gain: The factor by which the chain scales the root mean square. 1 preserves it;
            `torch.nn.init.calculate_gain` has those for activations after the chain.
        mode: "fan_in" preserves the signal of the forward pass, "fan_out" the gradient.
            "mup" is the initialisation of Qiu et al. 2024, for `ksopt.param_groups`: fan_in with
            the variance of a factor that has fewer outputs than inputs times b_l/c_l, so that its
            spectral norm is about sqrt(b_l/c_l); it does not preserve a random signal there.

    Raises:
        InvalidInputError: The mode is unknown, or the gain is not above 0.

    Source: He et al. 2015 (arXiv 1502.01852); Qiu et al. 2024 (arXiv 2406.06248), section 3.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> weights = [torch.empty(1, 32, 16, 32), torch.empty(32, 16, 32, 1)]
        >>> chain_uniform_(weights)
        >>> [f"{weight.abs().max().item():.2f}" for weight in weights]  # sqrt(3/16), sqrt(3/32)
        ['0.43', '0.31']
    """
    if mode not in MODES:
        raise InvalidInputError(f"mode {mode!r} is unknown: it must be one of {', '.join(MODES)}")
    factors = list(weights)
    fans = []
    for weight in factors:
        _, b, c, _ = weight.shape
        fans.append(b if mode == "fan_out" else max(c, c * c / b) if mode == "mup" else c)
    product_uniform_(factors, fans, gain)


def product_uniform_(weights: Iterable[Tensor], fans: Sequence[float], gain: float = 1.0) -> None:
    """Draw the factors of a product of linear maps, in place.

    Args:
        weights: The factors, of any shapes.
        fans: For each, how many of its entries are added up to one output.
        gain: The factor by which the product scales the root mean square.

    Raises:
        InvalidInputError: The gain is not above 0.
    """
    if not gain > 0:
        raise InvalidInputError(f"gain {gain!r}: give a number above 0")
    share = gain ** (2.0 / len(fans))
    for weight, fan in zip(weights, fans, strict=True):
        bound = math.sqrt(3.0 * share / fan)
        nn.init.uniform_(weight, -bound, bound)


def bias_uniform_(bias: Tensor, in_features: int) -> None:
    """Draw a bias as `torch.nn.Linear` does, in place: U(-1/√N, 1/√N) for N inputs."""
    bound = 1.0 / math.sqrt(in_features)
    nn.init.uniform_(bias, -bound, bound)
