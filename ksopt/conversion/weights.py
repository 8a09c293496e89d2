"""Weights of a whole model from a file, safely: no code in the file is ever run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.errors import InvalidInputError

_SHOWN = 5
# How transformers calls the list of the files of a model that is too large for one.
_INDEX = ".safetensors.index.json"


def load_weights(model: nn.Module, given: str | Path | Mapping[str, Tensor]) -> None:
    """Load weights into a model; every one must be there and fit, or nothing is changed.

    Of names that share a tensor in the model, such as tied embeddings, one is enough.

    Args:
        model: The model.
        given: A state_dict, or the path of a .safetensors file, of the .safetensors.index.json of
            several, or of a file of torch.save, which is read with weights_only=True.

    Raises:
        InvalidInputError: The file cannot be read, or names or shapes are not the model's.
    """
    what = "the weights" if isinstance(given, Mapping) else f"the weights of {given}"
    state = dict(given) if isinstance(given, Mapping) else read(Path(given))
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in state:
            tied = [other for other in state if other in own and _is_same(own[other], tensor)]
            if tied:
                state[name] = state[tied[0]]
    check(model, state, what)
    model.load_state_dict(state)


def _is_same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.is_meta:
        return False
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.numel() > 0


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name, on the CPU."""
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}")
    if _is_safe(path):
        names = list(shapes(path))
        return dict(zip(names, some(path, names), strict=True))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInputError(
            f"{path} cannot be read as weights alone, and nothing else is read from files: {reason}"
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise InvalidInputError(f"{path} holds no state_dict: tensors by name are wanted")
    return dict(state)


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors, by name; of .safetensors files nothing else is read."""
    if not path.is_file() or not _is_safe(path):
        return {name: tuple(tensor.shape) for name, tensor in read(path).items()}
    found = {}
    for part in _parts(path):
        with _opened(part) as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                found[name] = tuple(file.get_slice(name).get_shape())
    return found


def some(path: Path, names: Sequence[str]) -> list[Tensor]:
    """Tensors of a file, on the CPU; of .safetensors files only these are read."""
    if not path.is_file() or not _is_safe(path):
        tensors = read(path)
        return [tensors[name] for name in names]
    found = {}
    for part in _parts(path):
        with _opened(part) as file:
            for name in set(names) & set(file.keys()):
                found[name] = file.get_tensor(name)
    return [found[name] for name in names]


def _is_safe(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name.endswith(_INDEX)


def _parts(path: Path) -> list[Path]:
    """The .safetensors files of a path: itself, or those that an index lists."""
    if not path.name.endswith(_INDEX):
        return [path]
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted({str(name) for name in listed})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InvalidInputError(
            f"{path} is no index of .safetensors files: a JSON object with weight_map is wanted"
        ) from None
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInputError(
                f"{path} names {name!r}: the .safetensors files of an index lie beside it"
            )
        if not (path.parent / name).is_file():
            raise InvalidInputError(f"{path} names {name}, and there is no such file beside it")
    return [path.parent / name for name in files]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(f"{path} is not a safetensors file: {error}") from None


def check(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Raise InvalidInputError, which begins with ``what``, unless all names and shapes fit."""
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    for word, names in (("lack", missing), ("have", unknown)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            tail = "" if word == "lack" else ", which the model has not"
            raise InvalidInputError(f"{what} {word} {', '.join(names[:_SHOWN])}{more}{tail}")
    for name, tensor in own.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"{name} of the model is no tensor, and is not loaded")
        if tensor.shape != state[name].shape:
            raise InvalidInputError(
                f"{what} have {name} of shape {list(state[name].shape)}, but the model's has shape "
                f"{list(tensor.shape)}"
            )
