"""Learning rates for the factors of chains, as parameter groups of an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from ksopt.errors import InvalidInputError
from ksopt.nn.layers import KSLinear


def param_groups(model: nn.Module, lr: float, base: int | None = None) -> list[dict[str, Any]]:
    """Parameter groups that set the learning rate of each factor of a chain by its fan-in.

    Adam changes every entry of a weight by about lr, whatever the gradient's size, so the outputs
    of a product with fan-in n change by about n lr. A factor has a fan-in of c_l where a dense
    layer has N = in_features. For updates of the dense layer's size, shared by L factors::

        lr of weights[l] = lr · base / (c_l L)

    It is derived for optimizers of Adam's type without weight decay, signals that keep their size
    from factor to factor (`ksopt.nn.init.chain_uniform_`) and the large-width limit, in which
    updates are aligned with inputs. AdamW decays a weight by the learning rate of its group times
    ``weight_decay``, so by more where that rate is larger. Every other parameter keeps lr: biases,
    norms, embeddings, dense layers, parametrized factors, and layers of other structures. A
    parameter that occurs twice is in one group, with the smaller rate; frozen ones are in none.

    Args:
        model: Its `KSLinear` are found at any depth, those within `ksopt.nn.KSStacked` too.
        lr: The learning rate of a dense layer with ``base`` inputs, and of all other parameters.
        base: The in_features that lr was tuned at. Default: each layer's own, so that lr is that
            of the dense layer in its place. With the width of a narrower model, lr may be tuned
            there, as muP does; scaling other hidden layers by base / N is then up to the caller.

    Returns:
        Groups for ``torch.optim.AdamW(groups)``, from the smallest rate to the largest. Schedulers
        that multiply (LambdaLR, CosineAnnealingLR to 0) keep their ratios; OneCycleLR takes
        ``max_lr=[group["lr"] for group in groups]``.

    Raises:
        InvalidInputError: lr is negative, or base is not positive.

    Source: Qiu et al. 2024 (arXiv 2406.06248), section 3, and its code's multiplier, "d_in_orig /
    d_in / num_matrices"; Yang et al. 2022 (arXiv 2203.03466) for muP.

    Example:
        >>> model = nn.Sequential(KSLinear(64, 64, "(1,16,16,4)*(4,16,16,1)"), nn.LayerNorm(64))
        >>> [(len(group["params"]), group["lr"]) for group in param_groups(model, lr=0.001)]
        [(3, 0.001), (2, 0.002)]
    """
    if not lr >= 0:
        raise InvalidInputError(f"lr {lr!r}: give a learning rate, 0 or more")
    if base is not None and not base > 0:
        raise InvalidInputError(f"base {base!r}: give the in_features that lr was tuned at")
    multipliers: dict[nn.Parameter, float] = {}
    for layer in model.modules():
        if isinstance(layer, KSLinear):
            width = layer.in_features if base is None else base
            for weight in layer.weights.parameters(recurse=False):
                multiplier = width / (weight.shape[2] * len(layer.chain))
                multipliers[weight] = min(multiplier, multipliers.get(weight, multiplier))
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(multipliers.get(parameter, 1.0), []).append(parameter)
    return [{"params": groups[at], "lr": lr * at} for at in sorted(groups)]
