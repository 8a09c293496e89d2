"""Convertible layers and their replacements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ksopt.errors import InvalidInputError
from ksopt.nn import KSLinear, KSStacked
from ksopt.operators.linear import StructuredLinear
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# The dictionaries of a module from which handles remove their hooks.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class Place:
    """A layer of a model that computes x Wᵀ + bias.

    Args:
        layer: The module.
        names: All its names in the model, the first one its own.
        kind: "Linear" or "Conv1D" (of transformers, whose weight is [in, out]).
        in_features: Size of its inputs.
        out_features: Size of its outputs.
    """

    layer: nn.Module
    names: tuple[str, ...]
    kind: str
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        """The name by which it is reported."""
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        """The layer's own weight."""
        weight = self.layer._parameters["weight"]
        assert weight is not None
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The layer's own bias."""
        return self.layer._parameters.get("bias")

    @property
    def matrix(self) -> Tensor:
        """W: [out_features, in_features], a view of the weight."""
        weight = self.parameter.detach()
        return weight.T if self.kind == "Conv1D" else weight


@dataclass(frozen=True)
class Obstacle:
    """A linear layer that cannot be converted.

    Args:
        name: Its name in the model.
        in_features: Size of its inputs.
        out_features: Size of its outputs.
        reason: Why it cannot.
    """

    name: str
    in_features: int
    out_features: int
    reason: str


def find(model: nn.Module) -> tuple[list[Place], list[Obstacle]]:
    """The linear layers of a model, in its order: those that can be converted, and those not.

    Raises:
        InvalidInputError: The model is itself a linear layer, and so has no place for another.
    """
    if _kind(model) is not None:
        raise InvalidInputError(
            f"the model is itself a {type(model).__name__}, and layers are replaced in a larger "
            "one: put it into a torch.nn.Sequential, or make a ksopt.KSLinear"
        )
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    places, obstacles = [], []
    for module, own in names.items():
        kind = _kind(module)
        if kind is None:
            continue
        if kind == "Conv1D":
            columns, rows = module.get_parameter("weight").shape
        else:
            assert isinstance(module, nn.Linear)
            columns, rows = module.in_features, module.out_features
        reason = _obstacle(module)
        if reason:
            obstacles.append(Obstacle(own[0], columns, rows, reason))
        else:
            places.append(Place(module, tuple(own), kind, columns, rows))
    return places, obstacles


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear):
        return "Linear"
    cls = type(module)
    if cls.__name__ == "Conv1D" and cls.__module__.partition(".")[0] == "transformers":
        return "Conv1D"
    return None


def _obstacle(module: nn.Module) -> str:
    """The reason why a linear layer cannot be converted; empty if it can."""
    cls = type(module)
    if hasattr(module, "parametrizations"):
        return "its weight is parametrized (torch.nn.utils.parametrize)"
    if isinstance(module, nn.Linear) and cls is not nn.Linear:
        return f"it is a {cls.__name__}, which may compute something else than a Linear"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter of its own"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}"
    if weight.dtype not in DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if any(getattr(module, kind, None) for kind in _STATE_HOOKS):
        return "it has hooks on its state_dict, which know the dense weight"
    return ""


New = KSLinear | StructuredLinear | KSStacked
"""The replacement of a layer."""


def replacement(place: Place, chains: Sequence[Replacement]) -> New:
    """Layers of these chains with the place's bias, dtype, device, mode and requires_grad.

    The values of the weights are left to the caller. No random numbers are drawn.
    """
    weight, bias = place.parameter, place.bias
    parts, first = [], 0
    for chain in chains:
        shared = {"bias": bias is not None, "device": weight.device, "dtype": weight.dtype}
        if isinstance(chain, Chain):
            sizes = (chain.in_features, chain.out_features)
            part = nn.utils.skip_init(KSLinear, *sizes, chain, **shared)
        else:
            part = nn.utils.skip_init(StructuredLinear, chain, **shared)
        assert isinstance(part, (KSLinear, StructuredLinear))
        part.weights.requires_grad_(weight.requires_grad)
        if part.bias is not None and bias is not None:
            with torch.no_grad():
                part.bias.copy_(bias[first : first + chain.out_features])
            part.bias.requires_grad_(bias.requires_grad)
        first += chain.out_features
        parts.append(part)
    # A layer of another structure has all attributes that a part needs.
    new = parts[0] if len(parts) == 1 else KSStacked(parts)  # type: ignore[arg-type]
    return new.train(place.layer.training)


def hooks(module: nn.Module) -> int:
    """Number of forward and backward hooks of a module."""
    return sum(
        len(getattr(module, name, ())) for name in _HOOKS if not name.endswith(("kwargs", "called"))
    )


def share_hooks(old: nn.Module, new: nn.Module) -> None:
    """Share the old layer's hooks with the new one; their handles still remove them."""
    for name in (*_HOOKS, "_is_full_backward_hook"):
        if name in old.__dict__:
            setattr(new, name, getattr(old, name))


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set the submodule of a name."""
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = module
