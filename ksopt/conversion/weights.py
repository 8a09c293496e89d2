"""Weights of a whole model from a file, safely: no code in the file is ever run."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.errors import InvalidInputError

_SHOWN = 5


def load_weights(model: nn.Module, given: str | Path | Mapping[str, Tensor]) -> None:
    """Load weights into a model; every one must be there and fit, or nothing is changed.

    Of names that share a tensor in the model, such as tied embeddings, one is enough.

    Args:
        model: The model.
        given: A state_dict, or the path of a .safetensors file or of a file of torch.save, which is
            read with weights_only=True.

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
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise InvalidInputError(f"{path} is not a safetensors file: {error}") from None
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
    """Shapes of a file's tensors, by name; of a .safetensors file nothing else is read."""
    if not path.is_file() or path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in read(path).items()}
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def some(path: Path, names: Sequence[str]) -> list[Tensor]:
    """Tensors of a file, on the CPU; of a .safetensors file only these are read."""
    if not path.is_file() or path.suffix != ".safetensors":
        tensors = read(path)
        return [tensors[name] for name in names]
    with _opened(path) as file:
        return [file.get_tensor(name) for name in names]


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
