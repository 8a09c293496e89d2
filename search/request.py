"""Request of a search: the layers' sizes, or a model, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.operators.registry import KRONECKER
from ksopt.patterns.size import Budget, Dims
from ksopt.patterns.surroundings import ALONE, Surroundings
from ksopt.patterns.validate import checked_int
from ksopt.search.layer_request import LayerRequest
from ksopt.search.layers import Layers
from ksopt.search.options import TRIALS, SearchOptions
from ksopt.search.storage_url import without_password
from ksopt.search.surroundings import reads_surroundings
from ksopt.system import option_fields
from ksopt.system.plurals import counted


@dataclass(frozen=True)
class SearchRequest(SearchOptions):
    """All settings that decide what a search measures, for one layer size, several or a model.

    Each size has its own study in one storage, with its own budgets: a share is relative to its
    dense weights.

    Args:
        dims: ``INxOUT`` or a `Dims`, several of them, or a model's layers, from `layers_of_model`
            or `layers_of_config`.
        model_options: The options of the command line that name a model: ``model`` or
        ``hf-config``,
            ``include``, ``exclude`` and ``measure-model``.

    The others are those of `SearchOptions`, for every size.

    Raises:
        InvalidInputError: A value is not allowed, whatever the size; the sentence states what is.

    Example:
        >>> request = SearchRequest(["64x64", "64x128"], budgets=("25%",), device="cpu")
        >>> [(str(one.size), one.steps[0].parameters, one.study) for one in request.layers]
        [('64x64', 1024, 'ksopt-search 64x64'), ('64x128', 2048, 'ksopt-search 64x128')]
        >>> [one.study for one in SearchRequest("64x64").layers]
        ['ksopt-search']
    """

    dims: Dims | str | Sequence[Dims | str] | Layers
    model_options: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.dims, Layers):
            object.__setattr__(self, "dims", _sizes(self.dims))
        super().__post_init__()
        sizes = self.sizes
        if not sizes:
            raise InvalidInputError("search: give at least one layer size, such as 768x3072")
        if self.model is not None and self.layout != "batch_first":
            raise InvalidInputError(
                f"layout {self.layout}: the layers of a model take batch_first; search the "
                "sizes with --dims for another"
            )
        if self.trials is not None:
            checked_int(self.trials, "trials", "search", minimum=1)
            if self.trials < len(sizes):
                raise InvalidInputError(
                    f"trials {self.trials}: there are {len(sizes)} layer sizes, give at least one "
                    "trial for each"
                )
        self._check_some_size_is_possible()
        self._weights(sizes[0])

    def _check_some_size_is_possible(self) -> None:
        refusals = []
        for dims in self.sizes:
            try:
                LayerRequest(dims, **self._layer_options)
            except InvalidInputError as refusal:
                refusals.append(refusal)
            else:
                return
        raise refusals[0]

    @property
    def sizes(self) -> tuple[Dims, ...]:
        """The distinct sizes of the layers."""
        if isinstance(self.dims, Layers):
            return self.dims.sizes
        assert isinstance(self.dims, tuple)
        return self.dims

    @property
    def model(self) -> Layers | None:
        """The model's linear layers, if it is a model that is searched."""
        return self.dims if isinstance(self.dims, Layers) else None

    @property
    def is_one_layer(self) -> bool:
        """Whether a single size is searched, and no model: its study has the search's name."""
        return self.model is None and len(self.sizes) == 1

    @property
    def layers(self) -> tuple[LayerRequest, ...]:
        """The requests of all sizes that have a budget; `shared` distributes the trials.

        A budget that is more than a size's dense weights is omitted, and a rank that is impossible
        becomes full rank: `notes` reports it.
        """
        return tuple(one.request for one in self._fitted if one.request is not None)

    @property
    def impossible(self) -> dict[Dims, str]:
        """Reasons why the other sizes have no budget, so that their layers stay dense."""
        return {one.dims: one.sentence for one in self._fitted if one.request is None}

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences of a size's request from the options, in a sentence each."""
        return tuple(one.sentence for one in self._fitted if one.request and one.sentence)

    @property
    def _fitted(self) -> list[_Fitted]:
        return [self._fit(dims) for dims in self.sizes]

    def _fit(self, dims: Dims) -> _Fitted:
        changes: dict[str, Any] = {"weights": self._weights(dims)}
        if not self.is_one_layer:
            changes["study"] = f"{self.study} {dims}"
        differences = []
        around = self._surroundings(dims)
        if around is not None:
            changes |= {"epilogue": around.epilogue, "siblings": around.siblings}
            differences.append(self._timed_as(dims, around))
        full = min(dims.in_features, dims.out_features)
        if self.min_rank is not None and self.min_rank > full:
            changes["min_rank"] = full
            differences.append(
                f"its chains have full rank, {full}, which is less than {self.min_rank}"
            )
        refusals = {}
        for text in self.budgets:
            try:
                Budget.parse(text, dims)
            except InvalidInputError as refusal:
                refusals[text] = str(refusal)
        if len(refusals) == len(self.budgets):
            return _Fitted(dims, None, "; ".join(refusals.values()))
        if refusals:
            changes["budgets"] = tuple(text for text in self.budgets if text not in refusals)
            differences.append(
                f"it has no step of {' and '.join(refusals)}, for its dense layer has "
                f"{counted(dims.dense_parameters, 'weight')}"
            )
        if self.max_params is not None:
            try:
                Budget.parse(self.max_params, dims)
            except InvalidInputError:
                changes["max_params"] = None  # its dense layer has fewer
        request = LayerRequest(dims, **{**self._layer_options, **changes})
        sentence = f"{dims}: {'; '.join(differences)}." if differences else ""
        return _Fitted(dims, request, sentence)

    def _surroundings(self, dims: Dims) -> Surroundings | None:
        """Surroundings of most layers of a size in a model's graph; None if they are not used."""
        if self.model is None or not reads_surroundings(self.options):
            return None
        around = self.model.around(dims)
        groups = [group for group in self.model.groups if group.dims == dims]
        return None if all(group.around == ALONE for group in groups) else around

    def _timed_as(self, dims: Dims, around: Surroundings) -> str:
        """Clause on the surroundings a size is timed with, and those of its other layers."""
        assert self.model is not None
        groups = [group for group in self.model.groups if group.dims == dims]
        others = [f"{one.role} is {one.around}" for one in groups if one.around != around]
        if not others:
            return f"its layers are timed as in the model, {around}"
        timed = f"its layers are timed as most of them are in the model, {around}"
        return f"{timed} ({'; '.join(others)})"

    @property
    def _layer_options(self) -> dict[str, Any]:
        return self.options | {"trials": TRIALS if self.trials is None else self.trials}

    def _weights(self, dims: Dims) -> str | None:
        """``weights``, with the names of a size's layers in the file, if there are several sizes.

        Raises:
            InvalidInputError: Tensors are named, and layers of a model have names of their own.
        """
        if self.weights is None or self.is_one_layer:
            return self.weights
        from ksopt.search import trained_weights  # imports torch

        if self.model is None:
            return trained_weights.of_sizes(self.weights)
        names = [
            (name, group.kind == "Conv1D")
            for group in self.model.groups
            if group.dims == dims
            for name in group.matches
        ]
        return trained_weights.of_layers(self.weights, names)

    def to_json(self) -> dict[str, Any]:
        """The request as JSON values, see `from_json`."""
        model = None if self.model is None else self.model.to_json()
        return super().to_json() | {
            "dims": [str(dims) for dims in self.sizes],
            "model": model,
            "asked_by": dict(self.model_options),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SearchRequest:
        """The inverse of `to_json`."""
        options = dict(value)
        model, options["model_options"] = options.pop("model"), options.pop("asked_by", {})
        return cls(**options if model is None else options | {"dims": Layers.from_json(model)})

    @classmethod
    def of_layer(cls, layer: LayerRequest) -> SearchRequest:
        """The request whose only layer request is this one."""
        budgets = tuple(step.text for step in layer.steps)
        return cls(layer.size, **{**layer.options, "budgets": budgets})

    @property
    def command(self) -> str:
        """The command line of this request.

        Example:
            >>> SearchRequest("768x3072", budgets=("25%",), batch=256, device="cpu").command
            'ksopt search --dims 768x3072 --budget 25% --batch 256 --dtype float32 \
--layout batch_first --device cpu --min-use 0.5 --min-rank 768 --factors 3 --trials 72 --seed 0'
        """
        instead: dict[str, Any] = {"budgets": self.budgets}
        if self.is_one_layer:  # the effective values
            (layer,) = self.layers
            budgets = tuple(step.text for step in layer.steps)
            instead = {"budgets": budgets, "trials": layer.trials}
            if layer.structures == (KRONECKER,):  # other operators have no default
                instead["min_rank"] = layer.rank
        if self.storage is not None:
            instead["storage"] = without_password(self.storage)
        what = [f"--{name} {value}" for name, value in self.model_options.items()]
        what = what or ["--dims", *map(str, self.sizes)]
        return " ".join(
            ["ksopt search", *what, *option_fields.words(self, first=("budgets",), **instead)]
        )


@dataclass(frozen=True)
class _Fitted:
    """The request of one size, or None and the reason; and its differences from the options."""

    dims: Dims
    request: LayerRequest | None
    sentence: str = ""


def shared(trials: int, candidates: Sequence[int]) -> list[int]:
    """Trials distributed evenly between sizes, but no more than a size has chains.

    Trials that one cannot use go to the others; a remainder goes to the first.

    Args:
        trials: In total; at least as many as there are sizes.
        candidates: Number of chains of each size, at least 1.

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


def _sizes(dims: Dims | str | Sequence[Dims | str]) -> tuple[Dims, ...]:
    several = [dims] if isinstance(dims, (Dims, str)) else dims
    return tuple(dict.fromkeys(d if isinstance(d, Dims) else Dims.parse(d) for d in several))
