"""The linear layers of a model in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ksopt.conversion.layers import Place, find
from ksopt.conversion.model_call import ModelCall, evaluating
from ksopt.conversion.model_surroundings import surroundings_of_model
from ksopt.conversion.resolve import tied_to_others
from ksopt.errors import InvalidInputError
from ksopt.patterns.size import Dims
from ksopt.patterns.surroundings import ALONE, Surroundings
from ksopt.precision import dtype_name
from ksopt.search.layers import Layer, Layers, chosen, grouped


def layers_of_model(
    model: nn.Module,
    source: str = "the model",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    call: ModelCall | None = None,
) -> Layers:
    """The layers of a model that `ksopt.convert` can replace: Linear, and transformers' Conv1D.

    A layer that is applied several times under one name counts once. A fused q, k, v is one layer.
    A layer that shares its weight with another module, such as an embedding, is left dense.

    Args:
        model: The model; its parameters may be on the meta device.
        source: Its name in the list.
        include: Names or patterns for names: only these layers are searched.
        exclude: Names or patterns for names: these are not.
        call: Inputs of the model, which then runs, and whose graph determines the surroundings of
            each layer; None assumes no surroundings.

    Raises:
        InvalidInputError: It has no such layer, is itself one, or an entry of include or exclude
            matches nothing.

    Example:
        >>> layers = layers_of_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
        >>> [(str(group.dims), group.matches) for group in layers.groups]
        [('8x16', ('0',)), ('16x8', ('2',))]
    """
    places, obstacles = find(model)
    ties = {place.name: reason for place, reason in tied_to_others(model, places).items()}
    around: dict[str, Surroundings] = {}
    note = ""
    if call is not None:
        with evaluating(model):
            around, note = surroundings_of_model(model, call)
    all_layers = [_layer(place, around.get(place.name, ALONE)) for place in places]
    layers = [layer for layer in all_layers if layer.name not in ties]
    dense = {**ties, **{other.name: other.reason for other in obstacles}}
    if not layers:
        reasons = "".join(f"; {name}: {reason}" for name, reason in dense.items())
        raise InvalidInputError(
            f"{source} has no linear layer that can be searched: torch.nn.Linear and "
            f"transformers' Conv1D can{reasons}"
        )
    selected, left = chosen(layers, include, exclude, known=dense)
    # A layer that shares its weight with one that is left out cannot be converted without it.
    names = {layer.name for layer in selected}
    torn = tied_to_others(model, [place for place in places if place.name in names])
    left |= {place.name: reason for place, reason in torn.items()}
    selected = [layer for layer in selected if layer.name not in left]
    if not selected:
        raise InvalidInputError(
            f"{source}: no linear layer is left to search: see --include and --exclude"
        )
    searched = {layer.name for layer in selected}
    others = [layer for layer in all_layers if layer.name not in searched]
    others += [
        Layer(other.name, Dims(other.in_features, other.out_features), other.name)
        for other in obstacles
    ]
    return Layers(
        source=source,
        groups=grouped(selected, others),
        dense={**left, **dense},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        note=note,
    )


def _layer(place: Place, around: Surroundings) -> Layer:
    dims = Dims(place.in_features, place.out_features)
    return Layer(place.name, dims, str(id(place.parameter)), place.kind, around)


def placement(model: nn.Module) -> dict[str, str]:
    """Device and dtype of most linear layers' weights, as options of a search.

    Without a device if they are on the meta device.

    Example:
        >>> placement(nn.Sequential(nn.Linear(8, 16, dtype=torch.bfloat16)))
        {'dtype': 'bfloat16', 'device': 'cpu'}
    """
    devices, dtypes = Counter[torch.device](), Counter[torch.dtype]()
    for place in find(model)[0]:
        weight = place.parameter
        devices[weight.device] += weight.numel()
        dtypes[weight.dtype] += weight.numel()
    if not dtypes:
        return {}
    ((device, _),), ((dtype, _),) = devices.most_common(1), dtypes.most_common(1)
    named = {"dtype": dtype_name(dtype)}
    return named if device.type == "meta" else named | {"device": str(device)}


def batch_of(model: nn.Module, rows: Mapping[str, int]) -> dict[str, int]:
    """The batch for a search of a model's layers: the rows with which most is computed.

    Args:
        model: The model.
        rows: Rows that its layers see, by name.
    """
    work = Counter[int]()
    for place in find(model)[0]:
        seen = rows.get(place.name, 0)
        work[seen] += seen * place.in_features * place.out_features
    ((most, _),) = work.most_common(1)
    return {"batch": most} if most else {}
