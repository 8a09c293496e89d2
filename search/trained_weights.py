"""Trained weights of a search: the distance of chains to them is part of its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from ksopt.conversion.weights import read_named, shapes
from ksopt.errors import InvalidInputError
from ksopt.operators.registry import Replacement, operator_of
from ksopt.patterns.size import Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.system import untrusted

_SHOWN = 5
MOST_MATRICES = 4
"""Maximal number of matrices of one size that chains are fitted to, evenly spread over all."""
TRANSPOSED = "^T"
"""Suffix of names of tensors [in_features, out_features], as in transformers' Conv1D."""


@dataclass(frozen=True)
class TrainedWeights:
    """The trained weights of the layers of one size.

    Args:
        matrices: Each [out_features, in_features], on the device of the search.
        names: Of the tensors.
        available: Number of matrices that these were taken from.
        digest: Identifies the weights when a study is resumed.
    """

    matrices: tuple[Tensor, ...]
    names: tuple[str, ...]
    available: int
    digest: str

    @classmethod
    def of(cls, request: LayerRequest, device: torch.device) -> TrainedWeights | None:
        """The weights that a request names; None if it names none.

        Raises:
            InvalidInputError: The file cannot be read, or has no tensor of the layer's shape, or
                several of which none is named.
        """
        if request.weights is None:
            return None
        path, texts = split(request.weights)
        known = shapes(path)
        names = _chosen(path, texts, known, request.size)
        taken = _spread(names)
        tensors = read_named(path, [name.removesuffix(TRANSPOSED) for name in taken])
        matrices = []
        digest = hashlib.sha256()
        for name, tensor in zip(taken, tensors, strict=True):
            if not tensor.is_floating_point():
                raise InvalidInputError(f"weights {path}: {name} is not of floating point")
            if not bool(torch.isfinite(tensor).all()):
                raise InvalidInputError(
                    f"weights {path}: {name} has values that are not finite: no chain comes near it"
                )
            matrix = tensor.T if name.endswith(TRANSPOSED) else tensor
            # Converted, because NumPy does not support bfloat16.
            digest.update(matrix.to(torch.float64).contiguous().numpy().tobytes())
            matrices.append(matrix.to(device))
        return cls(tuple(matrices), tuple(taken), len(names), digest.hexdigest()[:16])

    @property
    def sentence(self) -> str:
        """Sentence on the fitted matrices; empty for one matrix."""
        count = len(self.matrices)
        if self.available == 1:
            return ""
        size = f"{self.matrices[0].shape[1]}x{self.matrices[0].shape[0]}"
        if self.available == count:
            return f"the error of a {size} chain is that of {count} matrices together"
        return (
            f"the error of a {size} chain is that of {count} of {self.available} matrices "
            f"together: {', '.join(self.names)}"
        )

    def error(self, chain: Replacement) -> float:
        """||W - W'|| / ||W|| (Frobenius norm) of the nearest products, all matrices together."""
        missed = whole = 0.0
        operator = operator_of(chain)
        for matrix in self.matrices:
            norm = float(matrix.double().norm()) if len(self.matrices) > 1 else 1.0
            missed += (norm * operator.nearest(matrix).relative_error) ** 2
            whole += norm**2
        return sqrt(missed / whole) if whole > 0 else 0.0


def split(text: str) -> tuple[Path, tuple[str, ...]]:
    """A file, and the names and patterns for names that follow it.

    Example:
        >>> split("model.safetensors:*.query.weight,*.key.weight")
        (PosixPath('model.safetensors'), ('*.query.weight', '*.key.weight'))
    """
    path = Path(text)
    if untrusted.is_file(path) or ":" not in text:
        return path, ()
    file, _, names = text.rpartition(":")
    return Path(file), tuple(name.strip() for name in names.split(",") if name.strip())


def of_layers(text: str, names: Sequence[tuple[str, bool]]) -> str:
    """The option ``weights`` for a model's layers in a file of its state_dict.

    Args:
        text: The file.
        names: Of the layers, or patterns for them, and whether the weight is [in, out].

    Raises:
        InvalidInputError: The text names tensors too.
    """
    path, own = split(text)
    if own:
        raise InvalidInputError(
            f"weights {text!r}: the layers of a model have names of their own, which their weights "
            f"are looked up by: give the file alone, {path}"
        )
    tensors = [f"{name}.weight{TRANSPOSED if turned else ''}" for name, turned in names]
    return f"{text}:{','.join(tensors)}"


def of_sizes(text: str) -> str:
    """The option ``weights`` for layers of several sizes: each takes the tensors of its shape."""
    return text if split(text)[1] else f"{text}:*"


def _chosen(
    path: Path, texts: Sequence[str], known: Mapping[str, tuple[int, ...]], dims: Dims
) -> list[str]:
    """Names of the tensors of a size's layers, with a mark for transposed ones."""
    shape = (dims.out_features, dims.in_features)
    if not texts:
        fitting = [name for name, own in known.items() if own == shape]
        if len(fitting) != 1:
            raise InvalidInputError(
                f"weights {path}: name the tensor, as in {path}:NAME; {_listed(fitting, shape)}"
            )
        return fitting
    names: dict[str, None] = {}
    for text in texts:
        names |= dict.fromkeys(_named(path, text, known, shape, alone=len(texts) == 1))
    if not names:
        fitting = [name for name, own in known.items() if own == shape]
        raise InvalidInputError(
            f"weights {path}: none of {', '.join(texts[:_SHOWN])} is a tensor of a {dims} layer; "
            f"{_listed(fitting, shape)}"
        )
    return list(names)


def _named(
    path: Path,
    text: str,
    known: Mapping[str, tuple[int, ...]],
    shape: tuple[int, int],
    alone: bool,
) -> Iterator[str]:
    """Tensors of a shape that match a name or pattern."""
    mark = TRANSPOSED if text.endswith(TRANSPOSED) and text not in known else ""
    expected = shape[::-1] if mark else shape
    name = text.removesuffix(mark) if mark else text
    if name not in known:
        if not set("*?[") & set(name):
            fitting = [own for own, has in known.items() if has == expected]
            raise InvalidInputError(
                f"weights {path}: there is no tensor {name!r} in it; {_listed(fitting, expected)}"
            )
        for own, has in known.items():
            if has == expected and fnmatchcase(own, name):
                yield own + mark
    elif known[name] == expected:
        yield text
    elif alone:  # of several, the others are of other sizes
        turned = known[name] == expected[::-1] and not mark
        raise InvalidInputError(
            f"weights {path}: {name} has shape {list(known[name])}, but a layer of "
            f"in_features={shape[1]} and out_features={shape[0]} has {list(shape)}"
            + (f"; if it is stored as [in, out], write {name}{TRANSPOSED}" if turned else "")
        )


def _spread(names: Sequence[str]) -> list[str]:
    """At most ``MOST_MATRICES`` names, evenly spread, including the first and the last."""
    if len(names) <= MOST_MATRICES:
        return list(names)
    last, steps = len(names) - 1, MOST_MATRICES - 1
    return [names[round(place * last / steps)] for place in range(MOST_MATRICES)]


def _listed(names: Sequence[str], shape: tuple[int, ...]) -> str:
    if not names:
        return f"none of its tensors has shape {list(shape)}"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"of shape {list(shape)} are {', '.join(names[:_SHOWN])}{more}"
