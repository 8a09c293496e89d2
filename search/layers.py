"""A model's linear layers, grouped by size and role. Pure Python: no torch, no model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.patterns.size import Dims
from ksopt.patterns.surroundings import ALONE, Surroundings
from ksopt.search.surroundings import most_frequent
from ksopt.system.plurals import counted

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# Names that an error message lists.
_SHOWN = 8


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model.

    Args:
        name: Its name in the model, such as ``encoder.layer.0.output.dense``.
        dims: Its size.
        weight: Identity of its weight; equal for layers that share a weight.
        kind: "Linear", or "Conv1D" of transformers.
        around: Its surroundings, if the model's graph was read.
    """

    name: str
    dims: Dims
    weight: str
    kind: str = "Linear"
    around: Surroundings = ALONE

    @property
    def pattern(self) -> str:
        """The name with a star for each number.

        Example:
            >>> Layer("encoder.layer.0.output.dense", Dims(8, 4), "").pattern
            'encoder.layer.*.output.dense'
        """
        return _NUMBER.sub("*", self.name)


@dataclass(frozen=True)
class Group:
    """Layers of one size and one role.

    Args:
        dims: Their size.
        role: The last components of their names, as many as distinguish it from other groups.
        count: Number of layers.
        weights: Number of weight matrices that no earlier group has: fewer if layers share one.
        matches: Their names in a plan: a pattern that fits no other layer of this size, or else all
            their names.
        kind: "Linear", or "Conv1D" of transformers.
        around: Surroundings of most of them, if the model's graph was read.
    """

    dims: Dims
    role: str
    count: int
    weights: int
    matches: tuple[str, ...]
    kind: str = "Linear"
    around: Surroundings = ALONE

    @property
    def dense_parameters(self) -> int:
        """Number of weights of all layers, shared ones once, without bias."""
        return self.weights * self.dims.dense_parameters

    def to_json(self) -> dict[str, Any]:
        """The group as JSON values, see `from_json`."""
        return {
            "dims": str(self.dims),
            "role": self.role,
            "count": self.count,
            "weights": self.weights,
            "matches": list(self.matches),
            "kind": self.kind,
            **self.around.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Group:
        """The inverse of `to_json`."""
        plain = {name: value[name] for name in ("role", "count", "weights", "kind")}
        around = Surroundings.from_json(value) if "siblings" in value else ALONE
        return cls(
            Dims.parse(value["dims"]), matches=tuple(value["matches"]), around=around, **plain
        )


@dataclass(frozen=True)
class Layers:
    """The linear layers of a model that are searched, and those that are not.

    Args:
        source: Description of their origin.
        groups: The searched layers, in the model's order.
        dense: Why other linear layers are not, by name.
        parameters: Parameters of the whole model, each counted once; None if it is not known.
        note: A remark on the list; may be empty.
    """

    source: str
    groups: tuple[Group, ...]
    dense: Mapping[str, str] = field(default_factory=dict)
    parameters: int | None = None
    note: str = ""

    @property
    def sizes(self) -> tuple[Dims, ...]:
        """The distinct sizes, those with the most weights in the model first."""
        total: dict[Dims, int] = {}
        for group in self.groups:
            total[group.dims] = total.get(group.dims, 0) + group.count * group.dims.dense_parameters
        return tuple(sorted(total, key=lambda dims: -total[dims]))

    def around(self, dims: Dims) -> Surroundings:
        """Surroundings of most layers of a size."""
        return most_frequent((one.around, one.count) for one in self.groups if one.dims == dims)

    @property
    def count(self) -> int:
        """Number of searched layers."""
        return sum(group.count for group in self.groups)

    @property
    def sentence(self) -> str:
        """Summary of the numbers of layers by size."""
        counts = dict.fromkeys(self.sizes, 0)
        for group in self.groups:
            counts[group.dims] += group.count
        listed = ", ".join(f"{count} of {dims}" for dims, count in counts.items())
        others = "1 other is" if len(self.dense) == 1 else f"{len(self.dense)} others are"
        left = f"; {others} left dense" if self.dense else ""
        layers = counted(self.count, "linear layer")
        return f"{self.source}: {layers} ({listed}){left}"

    def to_json(self) -> dict[str, Any]:
        """The list as JSON values, see `from_json`."""
        return {
            "source": self.source,
            "groups": [group.to_json() for group in self.groups],
            "dense": dict(self.dense),
            "parameters": self.parameters,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layers:
        """The inverse of `to_json`."""
        return cls(**{**value, "groups": tuple(map(Group.from_json, value["groups"]))})


def grouped(layers: Sequence[Layer], others: Sequence[Layer] = ()) -> tuple[Group, ...]:
    """Layers by size and role, in order of first occurrence.

    Two layers have one role if their names differ in numbers alone.

    Args:
        layers: The searched layers.
        others: Further layers of the model, which no group's ``matches`` may fit.

    Example:
        >>> layers = [
        ...     Layer(f"h.{i}.{name}", dims, f"h.{i}.{name}")
        ...     for i in range(2)
        ...     for name, dims in [("attn.c_proj", Dims(8, 8)), ("mlp.c_proj", Dims(32, 8))]
        ... ]
        >>> for group in grouped(layers):
        ...     print(group.dims, group.role, group.count, *group.matches)
        8x8 attn.c_proj 2 h.*.attn.c_proj
        32x8 mlp.c_proj 2 h.*.mlp.c_proj
    """
    members: dict[tuple[Dims, str], list[Layer]] = {}
    for layer in layers:
        members.setdefault((layer.dims, layer.pattern), []).append(layer)
    called = {key: own[0].name if len(own) == 1 else own[0].pattern for key, own in members.items()}
    groups, counted = [], set[str]()
    for (dims, _), own in members.items():
        names = [layer.name for layer in own]
        pattern = called[dims, own[0].pattern]
        alike = [
            layer.name
            for layer in (*layers, *others)
            if layer.dims == dims and fnmatchcase(layer.name, pattern)
        ]
        matches = (pattern,) if len(alike) == len(names) else tuple(names)
        weights = {layer.weight for layer in own} - counted
        counted |= weights
        own_role = role(pattern, called.values())
        around = most_frequent((layer.around, 1) for layer in own)
        groups.append(Group(dims, own_role, len(own), len(weights), matches, own[0].kind, around))
    return tuple(groups)


def role(pattern: str, patterns: Iterable[str]) -> str:
    """The shortest end of a pattern, in components, that no other pattern has.

    Example:
        >>> every = ["layer.*.attention.output.dense", "layer.*.output.dense", "layer.*.up"]
        >>> [role(pattern, every) for pattern in every]
        ['attention.output.dense', 'layer.*.output.dense', 'up']
    """
    parts = pattern.split(".")
    others = [other.split(".") for other in patterns if other != pattern]
    for length in range(1, len(parts) + 1):
        end = parts[-length:]
        if end[0] == "*" or end[0].isdigit():  # not meaningful by itself
            continue
        if not any(other[-length:] == end for other in others):
            return ".".join(end)
    return pattern


def words(names: str | Iterable[str]) -> tuple[str, ...]:
    """Names as a tuple, from one or several."""
    return (names,) if isinstance(names, str) else tuple(names)


def chosen(
    layers: Sequence[Layer],
    include: Sequence[str],
    exclude: Sequence[str],
    known: Iterable[str] = (),
) -> tuple[list[Layer], dict[str, str]]:
    """The selected layers, and by name why others are not.

    Args:
        layers: All that could be searched.
        include: Names, or patterns for names: if there are any, only these layers are selected.
        exclude: Names, or patterns for names, of layers that are not.
        known: Names of further layers, which an entry may name too.

    Raises:
        InvalidInputError: An entry matches no layer.
    """
    names = [layer.name for layer in layers]
    for word, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in (*names, *known)):
                more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
                listed = f"{', '.join(names[:_SHOWN])}{more}" or "none that can be searched"
                raise InvalidInputError(
                    f"{word} {pattern!r} matches no linear layer of the model; it has {listed}"
                )
    selected, left = [], {}
    for layer in layers:
        if include and not _any(layer.name, include):
            left[layer.name] = "it is not among those included"
        elif _any(layer.name, exclude):
            left[layer.name] = "it is excluded"
        else:
            selected.append(layer)
    return selected, left


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
