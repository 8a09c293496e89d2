"""What is asked of a search of several layer sizes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.search.layers import Layers
from ksopt.search.request import Budget, Dims, SearchRequest, command_line


@dataclass(frozen=True)
class LayersRequest:
    """Everything that decides what a search of several layer sizes measures.

    Make it with `of`. Each size has a study of its own in one storage, with its own budgets: a
    share is of its own dense weights.

    Args:
        sizes: The sizes, each once.
        each: What is asked of each, as of the first that can have all of it; see `requests`.
        trials: Chains to measure in all, those of earlier runs counted; None for so many as one
            layer's search takes, for each size.
        layers: The model's linear layers, if it is a model that is searched.
        asked_by: The options of the command line that name the sizes: ``dims``, or ``model`` or
            ``hf-config``, ``include``, ``exclude`` and ``measure-model``.

    Example:
        >>> request = LayersRequest.of(["64x64", "64x128"], budgets=("25%",), device="cpu")
        >>> [(str(one.size), one.steps[0].parameters, one.study) for one in request.requests]
        [('64x64', 1024, 'ksopt-search 64x64'), ('64x128', 2048, 'ksopt-search 64x128')]
    """

    sizes: tuple[Dims, ...]
    each: SearchRequest
    trials: int | None = None
    layers: Layers | None = None
    asked_by: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        what: Sequence[Dims | str] | Layers,
        *,
        trials: int | None = None,
        asked_by: Mapping[str, str] | None = None,
        **options: Any,
    ) -> LayersRequest:
        """A request for some sizes, or for those of a model's layers.

        Args:
            what: Sizes, such as ``("384x384", "384x1536")``, or a model's layers, from
                `layers_of_model` or `layers_of_config`.
            trials: Chains to measure in all; None for 72 of each size.
            asked_by: As in the class; None for ``--dims``.
            options: Those of `SearchRequest` besides dims and trials, for every size.

        Raises:
            InvalidInputError: A value is not allowed, whatever the size.
        """
        layers = what if isinstance(what, Layers) else None
        sizes = what.sizes if isinstance(what, Layers) else _sizes(what)
        if not sizes:
            raise InvalidInputError("search: give at least one layer size, such as 768x3072")
        if layers is not None and options.get("layout", "batch_first") != "batch_first":
            raise InvalidInputError(
                f"layout {options['layout']}: the layers of a model take batch_first; search the "
                "sizes with --dims for another"
            )
        if trials is not None and trials < len(sizes):
            raise InvalidInputError(
                f"trials {trials}: there are {len(sizes)} layer sizes, give at least one trial for "
                "each"
            )
        if asked_by is None:
            asked_by = {"dims": " ".join(map(str, sizes))}
        made = cls(sizes, _of_any(sizes, options), trials, layers, asked_by)
        made._weighed(sizes[0])  # refuses what no size can have
        return made

    @property
    def requests(self) -> tuple[SearchRequest, ...]:
        """What is asked of each size that can have it; its trials are shared out by `shared`.

        A budget that is more than a size's dense weights is none of its steps, and a rank that it
        cannot have becomes its full one: `notes` says so.
        """
        return tuple(one.request for one in self._fitted if one.request is not None)

    @property
    def impossible(self) -> dict[Dims, str]:
        """Why no budget is one of the other sizes, whose layers stay dense."""
        return {one.dims: one.sentence for one in self._fitted if one.request is None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a size is asked otherwise than was said, in a sentence each."""
        return tuple(one.sentence for one in self._fitted if one.request and one.sentence)

    @property
    def _fitted(self) -> list[_Fitted]:
        return [_fitted(self._weighed(dims), dims) for dims in self.sizes]

    def _weighed(self, dims: Dims) -> SearchRequest:
        """``each``, with what a size's layers are called in the file of weights, if there is one.

        Raises:
            InvalidInputError: Tensors are named, and layers of a model have names of their own.
        """
        if self.each.weights is None:
            return self.each
        from ksopt.search import trained_weights  # imports torch

        if self.layers is None:
            return replace(self.each, weights=trained_weights.of_sizes(self.each.weights))
        names = [
            (name, group.kind == "Conv1D")
            for group in self.layers.groups
            if group.dims == dims
            for name in group.matches
        ]
        return replace(self.each, weights=trained_weights.of_layers(self.each.weights, names))

    @property
    def name(self) -> str:
        """Of the sizes or the model, for a person."""
        if self.layers is not None:
            return self.layers.source
        return f"{len(self.sizes)} layer sizes"

    @property
    def command(self) -> str:
        """The command line that makes this request again."""
        options = {
            **self.each.options,
            "dims": self.asked_by.get("dims"),
            "budget": " ".join(self.each.budgets),
            "min-rank": self.each.min_rank,
            "trials": self.trials,
        }
        first = {name: value for name, value in self.asked_by.items() if name != "dims"}
        return command_line({**first, **options})

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes the same request of."""
        budgets = {"budgets": list(self.each.budgets)}
        return {
            "sizes": [str(dims) for dims in self.sizes],
            "each": {**self.each.to_json(), **budgets},
            "trials": self.trials,
            "layers": None if self.layers is None else self.layers.to_json(),
            "asked_by": dict(self.asked_by),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LayersRequest:
        """The request that `to_json` wrote."""
        layers = value["layers"]
        return cls(
            tuple(map(Dims.parse, value["sizes"])),
            SearchRequest.from_json(value["each"]),
            value["trials"],
            None if layers is None else Layers.from_json(layers),
            value["asked_by"],
        )


@dataclass(frozen=True)
class _Fitted:
    """What one size is asked; None, and why, if it cannot be asked; and what is not as was said."""

    dims: Dims
    request: SearchRequest | None
    sentence: str = ""


def _of_any(sizes: Sequence[Dims], options: Mapping[str, Any]) -> SearchRequest:
    """The request of the first size that can have all that is asked.

    Raises:
        InvalidInputError: None can; what the first lacks.
    """
    refusals = []
    for dims in sizes:
        try:
            return SearchRequest(dims, **options)
        except InvalidInputError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _fitted(each: SearchRequest, dims: Dims) -> _Fitted:
    changes: dict[str, Any] = {"dims": dims, "study": f"{each.study} {dims}"}
    differences = []
    full = min(dims.in_features, dims.out_features)
    if each.min_rank is not None and each.min_rank > full:
        changes["min_rank"] = full
        differences.append(f"its chains have full rank, {full}, which is less than {each.min_rank}")
    refusals = {}
    for text in each.budgets:
        try:
            Budget.parse(text, dims)
        except InvalidInputError as refusal:
            refusals[text] = str(refusal)
    if len(refusals) == len(each.budgets):
        return _Fitted(dims, None, "; ".join(refusals.values()))
    if refusals:
        changes["budgets"] = tuple(text for text in each.budgets if text not in refusals)
        differences.append(
            f"it has no step of {' and '.join(refusals)}, for its dense layer has "
            f"{dims.dense_parameters:,} weights"
        )
    if each.max_params is not None:
        try:
            Budget.parse(each.max_params, dims)
        except InvalidInputError:
            changes["max_params"] = None  # its dense layer has fewer
    sentence = f"{dims}: {'; '.join(differences)}." if differences else ""
    return _Fitted(dims, replace(each, **changes), sentence)


def shared(trials: int, candidates: Sequence[int]) -> list[int]:
    """Trials shared out between sizes: alike, but none gets more than it has chains.

    What one cannot use goes to the others; a remainder goes to the first.

    Args:
        trials: In all; at least as many as there are sizes.
        candidates: How many chains each size has to choose from, at least 1.

    Returns:
        Trials for each size, at least 1.

    Example:
        >>> shared(100, [500, 500, 500]), shared(100, [10, 500, 500])
        ([34, 33, 33], [10, 45, 45])
        >>> shared(100, [10, 20, 5])
        [10, 20, 5]
    """
    parts = [0] * len(candidates)
    for _ in range(trials):
        able = [place for place, most in enumerate(candidates) if parts[place] < most]
        if not able:
            break
        parts[min(able, key=parts.__getitem__)] += 1
    return parts


def quoted(names: Sequence[str]) -> str | None:
    """Words for a command line; None for none."""
    return " ".join(map(shlex.quote, names)) if names else None


def _sizes(sizes: Sequence[Dims | str]) -> tuple[Dims, ...]:
    each = (one if isinstance(one, Dims) else Dims.parse(one) for one in sizes)
    return tuple(dict.fromkeys(each))
