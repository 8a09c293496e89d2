"""A converted model in a folder: model.safetensors, config.json, report.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ksopt
from ksopt.conversion.apply import Conversion, ConvertedLayer, share_weights, swap
from ksopt.conversion.layers import New, Place, find, replacement
from ksopt.conversion.weights import check, read
from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.operators.registry import Replacement
from ksopt.patterns.validate import checked_int
from ksopt.report import tables
from ksopt.system import untrusted
from ksopt.system.atomic_files import new_folder

SCHEMA = "ksopt.model/1"
WEIGHTS, CONFIG, REPORT = "model.safetensors", "config.json", "report.md"


def save_converted(conversion: Conversion, folder: str | Path, source: str = "") -> Path:
    """Write a converted model to a new folder, whole or not at all.

    Args:
        conversion: The result of `ksopt.convert`.
        folder: A folder that does not exist yet, or is empty.
        source: Origin of the model, such as ``module:factory``.

    Returns:
        The folder, which holds model.safetensors (the state_dict), config.json (schema
        "ksopt.model/1", see docs/convert.md) and report.md.

    Raises:
        InvalidInputError: The folder is not empty, or cannot be written; or the state_dict holds
            something else than tensors.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    tensors, aliases = _distinct(conversion.model.state_dict())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    config = {
        "schema": SCHEMA,
        "ksopt": ksopt.__version__,
        "torch": str(torch.__version__),
        "model": source,
        "parameters": conversion.parameters,
        "dense_parameters": conversion.dense_parameters,
        "bytes": size,
        "layers": [_to_json(layer) for layer in conversion.layers],
        "dense": dict(conversion.dense),
        "aliases": aliases,
    }
    try:
        with new_folder(folder) as beside:
            save_file(tensors, beside / WEIGHTS, metadata={"format": "pt", "schema": SCHEMA})
            text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            (beside / CONFIG).write_text(text, encoding="utf-8")
            report = _report(conversion, source, size)
            (beside / REPORT).write_text(report, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{folder} cannot be written: {error}") from None
    return folder


def load_converted(folder: str | Path, model: nn.Module) -> nn.Module:
    """Load the chains and the weights of a folder into a model as its author builds it.

    Args:
        folder: Written by `ksopt.save_converted` or ``ksopt convert``.
        model: The model with its dense layers; changed in place. Its weights do not matter.

    Returns:
        The model.

    Raises:
        InvalidInputError: The folder holds no converted model, or one of another model; the model
            is then unchanged.

    Example:
        >>> import tempfile
        >>> build = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        >>> done = ksopt.convert(build(), {"0": "(1,8,4,2)*(2,4,4,1)"})
        >>> folder = save_converted(done, tempfile.mkdtemp())
        >>> load_converted(folder, build())[0].chain == done.model[0].chain
        True
    """
    folder = Path(folder)
    aliases, layers = _config(folder)
    state = read(folder / WEIGHTS)
    for alias, name in aliases.items():
        if name not in state:
            raise InvalidInputError(f"{folder / WEIGHTS} lacks {name}, which {alias} shares")
        state[alias] = state[name]
    places, obstacles = find(model)
    by_name = {name: place for place in places for name in place.names}
    reasons = {obstacle.name: obstacle.reason for obstacle in obstacles}
    swaps: list[tuple[Place, New]] = []
    known: dict[int, New] = {}
    for layer in layers:
        name, size = layer.name, (layer.in_features, layer.out_features)
        place = by_name.get(name)
        if place is None or (place.in_features, place.out_features) != size:
            reason = reasons.get(name, "there is no linear layer of that name and size")
            raise InvalidInputError(
                f"{folder} was converted from another model: its layer {name} has in_features="
                f"{size[0]} and out_features={size[1]}; in this model {reason}"
            )
        new = replacement(place, list(layer.chains))
        # Tied layers of the model stay tied.
        tied = known.setdefault(id(place.parameter), new)
        if tied is not new:
            share_weights(tied, new)
        swaps.append((place, new))
    undo = swap(model, swaps)
    try:
        check(model, state, f"the weights of {folder / WEIGHTS}")
    except InvalidInputError:
        while undo:
            undo.pop()()
        raise
    model.load_state_dict(state)
    return model


@dataclass(frozen=True)
class _Layer:
    """The entries of config.json for a converted layer that are read back."""

    name: str
    in_features: int
    out_features: int
    chains: tuple[Replacement, ...]


def _config(folder: Path) -> tuple[dict[str, str], list[_Layer]]:
    """The aliases of tensors, and the converted layers."""
    if not untrusted.is_file(folder / CONFIG):
        raise InvalidInputError(f"{folder} holds no converted model: there is no {CONFIG} in it")
    try:
        config = untrusted.json_of(folder / CONFIG, "the file")
    except InvalidInputError as error:
        raise InvalidInputError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("schema") != SCHEMA:
        schema = config.get("schema") if isinstance(config, dict) else type(config).__name__
        raise InvalidInputError(
            f"{folder / CONFIG}: a converted model has the schema {SCHEMA!r}, got {schema!r}"
        )
    with untrusted.of_its_form(f"{folder / CONFIG}", "it is not as ksopt writes it"):
        aliases = {str(alias): str(name) for alias, name in config["aliases"].items()}
        layers = [
            _Layer(
                str(layer["names"][0]),
                checked_int(layer["in_features"], "in_features", CONFIG),
                checked_int(layer["out_features"], "out_features", CONFIG),
                tuple(registry.parse(text) for text in layer["chains"]),
            )
            for layer in config["layers"]
        ]
    return aliases, layers


def _distinct(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, as the file format requires, and the aliases of names."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(
                f"{name} of the model's state_dict is of type {type(tensor).__name__}, and a "
                "safetensors file holds tensors only"
            )
        if tensor.is_meta:
            raise InvalidInputError(f"{name} is on the meta device: there is nothing to save")
        where = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and where in seen:
            aliases[name] = seen[where]
            continue
        seen[where] = name
        own = tensor.detach().contiguous()
        # A file holds no views: tensors that share memory are copied.
        if own.untyped_storage().nbytes() != own.numel() * own.element_size():
            own = own.clone()
        tensors[name] = own
    return tensors, aliases


def _to_json(layer: ConvertedLayer) -> dict[str, Any]:
    return {
        "names": list(layer.names),
        "kind": layer.kind,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "chains": [str(chain) for chain in layer.chains],
        "dense_parameters": layer.dense_parameters,
        "parameters": layer.parameters,
        "relative_error": layer.relative_error,
        "lower_bound": layer.lower_bound,
        "notes": list(layer.notes),
    }


def _report(conversion: Conversion, source: str, size: int) -> str:
    blocks = [f"# Converted model{f' {source}' if source else ''}", conversion.sentence]
    blocks.append(
        f"The weights take {size / 1e6:,.1f} MB. The error of a layer is ||W - W'|| / ||W|| in the "
        "Frobenius norm, W being its weight before and W' the product of its chain; no weights of "
        "that chain have an error below the last column. It does not say what the model still can "
        "do: measure that, and fine-tune."
    )
    blocks.append(conversion.table().markdown())
    notes = [
        f"- {layer.name}: {' '.join(layer.notes)}" for layer in conversion.layers if layer.notes
    ]
    if notes:
        blocks += ["## Notes", "\n".join(notes)]
    if conversion.dense:
        rows = [[name, reason] for name, reason in conversion.dense.items()]
        blocks += ["## Left dense", tables.of(("layer", "because"), rows).markdown()]
    return "\n\n".join(blocks) + "\n"
