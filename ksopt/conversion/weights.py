"""Safe reading of a whole model's weights from a file: no code in the file is ever run."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.errors import InvalidInputError
from ksopt.system import untrusted

_SHOWN = 5
# The name that transformers gives to the index of a model in several files.
_INDEX = ".safetensors.index.json"


def load_weights(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> None:
    """Load weights into a model; unless all are present and fit, nothing is changed.

    One of the names that share a tensor in the model, such as tied embeddings, is enough.

    Args:
        model: The model.
        source: A state_dict, or the path of a .safetensors file, of the .safetensors.index.json of
            several, or of a file of torch.save, which is read with weights_only=True.

    Raises:
        InvalidInputError: The file cannot be read, or names or shapes are not the model's.
    """
    what = "the weights" if isinstance(source, Mapping) else f"the weights of {source}"
    state = dict(source) if isinstance(source, Mapping) else read(Path(source))
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
    if not untrusted.is_file(path):
        raise InvalidInputError(f"there is no file {path}")
    if _is_safe(path):
        names = list(shapes(path))
        return dict(zip(names, read_named(path, names), strict=True))
    _check_size(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    # A malformed file makes the reader raise nearly anything (KeyError, IndexError, AssertionError,
    # struct.error, UnicodeDecodeError ...); each means that the file is invalid.
    except Exception as error:
        words = str(error).strip().splitlines() or ["nothing more"]
        raise InvalidInputError(
            f"{path} cannot be read as weights alone, and nothing else is read from files: "
            f"{type(error).__name__}: {words[0]}"
        ) from None
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and _is_plain(value) for name, value in state.items()
    ):
        raise InvalidInputError(f"{path} holds no state_dict: tensors by name are wanted")
    return dict(state)


def _is_plain(value: object) -> bool:
    """Whether a value is a plain tensor whose values take no more memory than the file."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _check_size(path: Path) -> None:
    """Reject an archive that unpacks to more than its size: torch.save never compresses."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except Exception:  # no archive, or a malformed one: torch.load reports it
        return
    if size > path.stat().st_size:
        raise InvalidInputError(
            f"{path} cannot be read: it says that it unpacks to {size:,} bytes, and files of "
            "torch.save are not packed"
        )


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors, by name; of .safetensors files nothing else is read."""
    if not untrusted.is_file(path) or not _is_safe(path):
        return {name: tuple(tensor.shape) for name, tensor in read(path).items()}
    shapes_by_name = {}
    for part in _parts(path):
        with _opened(part) as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                shapes_by_name[name] = tuple(file.get_slice(name).get_shape())
    return shapes_by_name


def read_named(path: Path, names: Sequence[str]) -> list[Tensor]:
    """Tensors of a file, on the CPU; of .safetensors files only these are read."""
    if not untrusted.is_file(path) or not _is_safe(path):
        tensors = read(path)
        return [tensors[name] for name in names]
    tensors = {}
    for part in _parts(path):
        with _opened(part) as file:
            for name in set(names) & set(file.keys()):
                tensors[name] = file.get_tensor(name)
    return [tensors[name] for name in names]


def _is_safe(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name.endswith(_INDEX)


def _parts(path: Path) -> list[Path]:
    """The .safetensors files of a path: the file itself, or those that an index lists."""
    if not path.name.endswith(_INDEX):
        return [path]
    try:
        index = untrusted.json_of(path, "the file")
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} is no index of .safetensors files: {error}") from None
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise InvalidInputError(
            f"{path} is no index of .safetensors files: a JSON object with weight_map is wanted"
        )
    files = sorted({str(name) for name in listed.values()})
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise InvalidInputError(
                f"{path} names {name!r}: the .safetensors files of an index lie beside it"
            )
        if not untrusted.is_file(path.parent / name):
            raise InvalidInputError(f"{path} names {name}, and there is no such file beside it")
    return [path.parent / name for name in files]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    # A malformed file also causes errors of torch: an unknown dtype, a shape that is too large.
    except Exception as error:
        raise InvalidInputError(f"{path} is not a safetensors file: {error}") from None


def check(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Raise InvalidInputError, beginning with ``what``, unless all names and shapes fit."""
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
