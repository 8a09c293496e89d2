"""Replacement of a model's linear layers by chains, and its reversal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ksopt import drawing
from ksopt.conversion.layers import (
    New,
    Place,
    hooks,
    replacement,
    set_module,
    share_hooks,
)
from ksopt.conversion.model_call import ModelCall
from ksopt.conversion.plan import Plan
from ksopt.conversion.resolve import Choice, resolve
from ksopt.conversion.weights import load_weights
from ksopt.errors import InvalidInputError
from ksopt.nn import KSLinear, KSStacked
from ksopt.operators.base import Fit
from ksopt.operators.linear import StructuredLinear
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain
from ksopt.projection import project
from ksopt.projection.scale import exponent_of, scaled
from ksopt.report import document, tables
from ksopt.report.document import Fact, Section
from ksopt.report.tables import Table
from ksopt.system.plurals import counted


@dataclass(frozen=True)
class ConvertedLayer:
    """Record of one converted layer.

    Args:
        names: Its names in the model.
        kind: Its class before: "Linear" or "Conv1D".
        in_features: Size of its inputs.
        out_features: Size of its outputs.
        chains: Its chain, or one for each part of a fused layer.
        relative_error: ||W - W'|| / ||W|| (Frobenius norm), W' being the new weight.
        lower_bound: A relative error that no weights of these chains go below.
        seconds: Duration of the projection.
        notes: Remarks, in sentences.
    """

    names: tuple[str, ...]
    kind: str
    in_features: int
    out_features: int
    chains: tuple[Replacement, ...]
    relative_error: float
    lower_bound: float
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """First name of the layer."""
        return self.names[0]

    @property
    def dense_parameters(self) -> int:
        """Number of weights before, without bias."""
        return self.in_features * self.out_features

    @property
    def parameters(self) -> int:
        """Number of weights now, without bias."""
        return sum(chain.nnz for chain in self.chains)

    @property
    def chain_text(self) -> str:
        """The chains as text, parts separated by bars."""
        return " | ".join(map(str, self.chains))


@dataclass(frozen=True)
class Conversion:
    """A model in which chains replace some of the layers.

    It holds the dense layers, so that `revert` can restore them: delete it to free them.

    Args:
        model: The model, changed in place.
        layers: The layers that were converted, in the model's order.
        dense: Why the other layers were left dense, by name; without those that include and
            exclude leave out.
        parameters: Parameters of the whole model now, each counted once.
        dense_parameters: Parameters of the whole model before.
    """

    model: nn.Module
    layers: tuple[ConvertedLayer, ...]
    dense: Mapping[str, str]
    parameters: int
    dense_parameters: int
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def revert(self) -> nn.Module:
        """Restore the dense layers with their old weights, in place; return the model.

        Training of the chains since then is lost.

        Raises:
            InvalidInputError: It was reverted before, or a converted layer has been replaced since.
        """
        if not self._undo:
            raise InvalidInputError("there is nothing to revert: it was done before")
        for layer in self.layers:
            for name in layer.names:
                if not isinstance(self.model.get_submodule(name), New):
                    raise InvalidInputError(
                        f"the layer {name} is no longer the one that was put there: it was "
                        "replaced since, so the conversion cannot be reverted"
                    )
        while self._undo:
            self._undo.pop()()
        return self.model

    def table(self) -> Table:
        """One row for each converted layer."""
        rows = [
            [
                layer.name,
                f"{layer.in_features}x{layer.out_features}",
                layer.chain_text,
                f"{layer.dense_parameters:,}",
                f"{layer.parameters:,}",
                f"{100 * layer.parameters / layer.dense_parameters:.1f}%",
                f"{layer.relative_error:.4f}",
                f"{layer.lower_bound:.4f}",
            ]
            for layer in self.layers
        ]
        heads = (
            "layer",
            "INxOUT",
            "chain",
            ">dense",
            ">weights",
            ">of dense",
            ">error",
            ">at least",
        )
        return tables.of(heads, rows)

    def __str__(self) -> str:
        return "\n\n".join([self.sentence, *([self.table().plain()] if self.layers else [])])

    def _repr_html_(self) -> str:
        """Facts, table and drawn chains for a notebook."""
        errors = sorted(layer.relative_error for layer in self.layers)
        share = 100 * self.parameters / self.dense_parameters
        counts = f"{self.parameters:,} of {self.dense_parameters:,}"
        facts = [
            Fact(str(len(self.layers)), "layers converted", f"{len(self.dense)} left dense"),
            Fact(f"{share:.1f}%", "of the model's parameters", counts),
        ]
        if errors:
            facts.append(Fact(f"{errors[0]:.3f} to {errors[-1]:.3f}", "relative error"))
        chains = {chain for layer in self.layers for chain in layer.chains}
        drawn = [
            Section(f"{chain}, drawn", figure=drawing.figure_of(chain), is_folded=True)
            for chain in sorted(chains, key=str)
            if isinstance(chain, Chain) and drawing.can_draw(chain)
        ]
        answer = Section("Conversion", (self.sentence,), table=self.table(), facts=tuple(facts))
        return document.fragment([answer, *drawn])

    @property
    def sentence(self) -> str:
        """Summary in a sentence."""
        count = len(self.layers)
        if count == 0:
            still = counted(self.dense_parameters, "parameter")
            return f"No layer was converted; the model still has {still}."
        share = 100 * self.parameters / self.dense_parameters
        return (
            f"{counted(count, 'layer')} converted; the model has "
            f"{counted(self.parameters, 'parameter')}, {share:.1f}% of the "
            f"{self.dense_parameters:,} that it had."
        )


def convert(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    weights: str | Path | Mapping[str, Tensor] | None = None,
    refine: int = 0,
    max_error: float | None = None,
    example_inputs: object = None,
    progress: Callable[[str], None] | None = None,
) -> Conversion:
    """Replace linear layers of a model by chains whose products are near their weights.

    ``torch.nn.Linear`` and transformers' ``Conv1D`` become `KSLinear`, or `KSStacked` where the
    plan gives one chain for each part of a fused layer. The bias, dtype, device, requires_grad,
    training mode and hooks are preserved; layers that share a weight share the chain's weights if
    they become the same chain, and stay dense otherwise. Subclasses of Linear, parametrized and
    quantized layers stay dense. Every projection is computed before the first layer is replaced:
    after an error the model is unchanged.

    The error measures the distance of the weights, not the quality of the model: trained weights
    are seldom near a sparse product. Fine-tune afterwards (docs/convert.md has a recipe), with an
    optimizer that is created after the conversion: the parameters are new.

    Args:
        model: The model; changed in place.
        plan: A `Plan`, a mapping from layers to chains (`Plan.of`), or the path of a plan.json.
        include: Names or patterns for names: only these layers are converted.
        exclude: Names or patterns for names: these are not.
        weights: Weights to load into the model first: a .safetensors file, a file of torch.save
            (read with weights_only=True), or a state_dict.
        refine: Steps of gradient refinement of chains of three factors or more.
        max_error: Layers whose relative error would be larger stay dense.
        example_inputs: Inputs of the model: a tensor, a tuple of arguments or a mapping of keyword
            arguments. Rules with a condition need them: the model runs once, and its graph shows
            which layers are siblings, and what follows each. Without them such rules convert
            nothing, and `Conversion.dense` has the reason.
        progress: Called with a line of text before each layer.

    Returns:
        The conversion, with `Conversion.revert`.

    Raises:
        InvalidInputError: The plan does not fit the model, the model does not take the inputs, a
            layer has no values (meta device) or
            values that are not finite, or the weights do not fit.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> done = convert(model, {"8x16": "(1,8,4,2)*(2,4,4,1)"})
        >>> print(type(model[0]).__name__, done.layers[0].name, done.layers[0].parameters)
        KSLinear 0 96
        >>> done.revert()[0]
        Linear(in_features=8, out_features=16, bias=True)
    """
    if max_error is not None and not max_error >= 0:
        raise InvalidInputError(f"max_error {max_error!r}: give a relative error, 0 or more")
    call = ModelCall.of_model(model, example_inputs, "convert: example_inputs")
    choices, dense = resolve(model, Plan.of(plan), _words(include), _words(exclude), call)
    if weights is not None:
        load_weights(model, weights)
    before = _count(model)
    swaps: list[tuple[Place, New]] = []
    layers: list[ConvertedLayer] = []
    known: dict[int, tuple[New, ConvertedLayer]] = {}
    for number, choice in enumerate(choices, start=1):
        place = choice.place
        if progress is not None:
            progress(f"{number}/{len(choices)} {place.name}")
        tied = known.get(id(place.parameter))
        new, record = _projected(choice, refine) if tied is None else _tied(choice, *tied)
        if max_error is not None and record.relative_error > max_error:
            dense[place.name] = (
                f"its relative error would be {record.relative_error:.4f}, more than {max_error:g}"
            )
            continue
        known[id(place.parameter)] = new, record
        swaps.append((place, new))
        layers.append(record)
    undo = swap(model, swaps)
    return Conversion(model, tuple(layers), dense, _count(model), before, undo)


def swap(model: nn.Module, swaps: Iterable[tuple[Place, New]]) -> list[Callable[[], None]]:
    """Replace layers; return the functions that undo it, to be called in reverse order."""
    undo: list[Callable[[], None]] = []
    for place, new in swaps:
        share_hooks(place.layer, new)
        for name in place.names:
            set_module(model, name, new)
            undo.append(partial(set_module, model, name, place.layer))
    for module in model.modules():
        _leave_fast_path(module, undo)
    return undo


def _leave_fast_path(module: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Clear the flags with which PyTorch's transformer layers, in eval mode, pass weights of linear
    layers to one fused operation: it does not support chains.
    """
    first = module
    if isinstance(module, nn.TransformerEncoder) and len(module.layers) > 0:
        flag, first = "use_nested_tensor", module.layers[0]
    elif isinstance(module, nn.TransformerEncoderLayer):
        flag = "activation_relu_or_gelu"
    else:
        return
    if any(isinstance(child, New) for child in first.children()):
        value = getattr(module, flag, False)
        setattr(module, flag, type(value)(0))
        undo.append(partial(setattr, module, flag, value))


def _projected(choice: Choice, refine: int) -> tuple[New, ConvertedLayer]:
    place = choice.place
    began = time.monotonic()
    if place.parameter.is_meta:
        raise InvalidInputError(
            f"the layer {place.name} is on the meta device and has no values to project: load its "
            "weights first"
        )
    new = replacement(place, choice.chains)
    parts = list(new.parts) if isinstance(new, KSStacked) else [new]
    # Scaled near 1, because squares of very large or small entries over- or underflow.
    exponent = exponent_of(place.matrix)
    whole = scaled(place.matrix.to(torch.float64), -exponent).norm().item()
    error = floor = 0.0
    first = 0
    for part in parts:
        assert isinstance(part, (KSLinear, StructuredLinear))
        matrix = place.matrix[first : first + part.out_features]
        first += part.out_features
        try:
            nearest, least = _nearest(part, matrix, refine)
        except InvalidInputError as wrong:
            raise InvalidInputError(f"the layer {place.name}: {wrong}") from None
        with torch.no_grad():
            for own, weight in zip(part.weights, nearest.weights, strict=True):
                own.copy_(weight)
        part_of_it = scaled(matrix.to(torch.float64), -exponent).norm().item()
        share = part_of_it / whole if whole > 0 else 0.0
        error += (nearest.relative_error * share) ** 2
        floor += (least * share) ** 2
    return new, _record(choice, math.sqrt(error), math.sqrt(floor), time.monotonic() - began)


def _nearest(part: KSLinear | StructuredLinear, matrix: Tensor, refine: int) -> tuple[Fit, float]:
    """Weights near a matrix, and a lower bound of the relative error of the structure."""
    if isinstance(part, StructuredLinear):
        return part.operator.nearest(matrix), 0.0
    projected = project(matrix, part.chain, refine=refine)
    return Fit(projected.weights, projected.relative_error), projected.lower_bound


def _tied(choice: Choice, first: New, record: ConvertedLayer) -> tuple[New, ConvertedLayer]:
    """A layer that shares its weight with one converted before: it shares the chain's weights."""
    new = replacement(choice.place, choice.chains)
    share_weights(first, new)
    tied = _record(choice, record.relative_error, record.lower_bound, 0.0)
    notes = (*tied.notes, f"It shares its weights with {record.name}, as it did.")
    return new, replace(tied, notes=notes)


def share_weights(first: nn.Module, second: nn.Module) -> None:
    """Let the second layer share the first one's weights; both have the same chains."""
    for own, other in zip(first.modules(), second.modules(), strict=True):
        if isinstance(own, (KSLinear, StructuredLinear)) and type(other) is type(own):
            for index, weight in enumerate(own.weights):
                other.weights[index] = weight


def _record(choice: Choice, error: float, floor: float, seconds: float) -> ConvertedLayer:
    place = choice.place
    notes = []
    count = hooks(place.layer)
    if count:
        notes.append(f"Its {counted(count, 'hook')} went along.")
    if place.parameter._backward_hooks:
        notes.append("Hooks on its weight's gradient did not go along: the weight is another one.")
    if place.parameter.grad is not None:
        notes.append("The gradient of its weight was left behind.")
    return ConvertedLayer(
        names=place.names,
        kind=place.kind,
        in_features=place.in_features,
        out_features=place.out_features,
        chains=choice.chains,
        relative_error=error,
        lower_bound=floor,
        seconds=seconds,
        notes=tuple(notes),
    )


def _words(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
