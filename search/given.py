"""The weights that a search is given: how near a chain comes to them is part of its answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ksopt.conversion.weights import read
from ksopt.errors import InvalidInputError
from ksopt.pattern import Chain
from ksopt.projection import project
from ksopt.search.request import Dims, SearchRequest

_SHOWN = 5
# Passes of alternating least squares, where a chain takes them: a search asks for many chains, and
# a conversion, which makes more for one, comes a little nearer.
_PASSES = 4


@dataclass(frozen=True)
class GivenWeights:
    """The dense layer's trained weight.

    Args:
        matrix: [out_features, in_features], on the device of the search.
        digest: What tells it from other weights when a study is resumed.
    """

    matrix: Tensor
    digest: str

    @classmethod
    def of(cls, request: SearchRequest, device: torch.device) -> GivenWeights | None:
        """The weights that a request names; None if it names none.

        Raises:
            InvalidInputError: The file cannot be read, or has no one tensor of the layer's shape.
        """
        if request.weights is None:
            return None
        path, name = Path(request.weights), ""
        if not path.exists() and ":" in request.weights:
            file, _, name = request.weights.rpartition(":")
            path = Path(file)
        tensors = read(path)
        name = _chosen(path, name, tensors, request.size)
        matrix = tensors[name]
        if not bool(torch.isfinite(matrix).all()):
            raise InvalidInputError(
                f"weights {path}: {name} has values that are not finite: no chain comes near it"
            )
        # Converted, because NumPy, and so hashlib, knows no bfloat16.
        values = matrix.to(torch.float64).contiguous().numpy().tobytes()
        digest = hashlib.sha256(values).hexdigest()
        return cls(matrix.to(device), digest[:16])

    def error(self, chain: Chain) -> float:
        """||W - W'|| / ||W|| (Frobenius norm) of the nearest product that is found."""
        return project(self.matrix, chain, iterations=_PASSES).relative_error


def _chosen(path: Path, name: str, tensors: dict[str, Tensor], dims: Dims) -> str:
    shape = (dims.out_features, dims.in_features)
    fitting = [own for own, tensor in tensors.items() if tuple(tensor.shape) == shape]
    if name:
        if name not in tensors:
            raise InvalidInputError(
                f"weights {path}: there is no tensor {name!r} in it; {_listed(fitting, shape)}"
            )
        if name not in fitting:
            raise InvalidInputError(
                f"weights {path}: {name} has shape {list(tensors[name].shape)}, but a layer of "
                f"in_features={dims.in_features} and out_features={dims.out_features} has "
                f"{list(shape)}"
            )
        fitting = [name]
    if len(fitting) != 1:
        raise InvalidInputError(
            f"weights {path}: name the tensor, as in {path}:NAME; {_listed(fitting, shape)}"
        )
    if not tensors[fitting[0]].is_floating_point():
        raise InvalidInputError(f"weights {path}: {fitting[0]} is not of floating point")
    return fitting[0]


def _listed(names: list[str], shape: tuple[int, int]) -> str:
    if not names:
        return f"none of its tensors has shape {list(shape)}"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"of shape {list(shape)} are {', '.join(names[:_SHOWN])}{more}"
