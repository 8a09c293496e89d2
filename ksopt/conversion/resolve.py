"""Resolution of a plan: the chains of each layer, before the model is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ksopt.conversion.layers import Obstacle, Place, find
from ksopt.conversion.plan import Plan, Rule
from ksopt.errors import InvalidInputError
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain

# Names that an error message lists.
_SHOWN = 8


@dataclass(frozen=True)
class Choice:
    """A layer to convert, and its chains."""

    place: Place
    chains: tuple[Replacement, ...]


def resolve(
    model: nn.Module, plan: Plan, include: Iterable[str], exclude: Iterable[str]
) -> tuple[list[Choice], dict[str, str]]:
    """The layers to convert, in the model's order, and by name why others are left dense.

    Layers without a matching rule are omitted.

    Raises:
        InvalidInputError: A rule, or an entry of include or exclude, matches no layer; a rule's
            chains do not fit a layer; or it names a layer that cannot be converted.
    """
    places, obstacles = find(model)
    _check_all_match(plan, places, obstacles)
    for word, patterns in (("include", tuple(include)), ("exclude", tuple(exclude))):
        for pattern in patterns:
            names = [name for place in places for name in place.names]
            others = [obstacle.name for obstacle in obstacles]
            if not any(fnmatchcase(name, pattern) for name in (*names, *others)):
                raise InvalidInputError(
                    f"{word} {pattern!r} matches no linear layer of the model; {_listed(names)}"
                )
    converted: dict[Place, tuple[Rule, tuple[Replacement, ...]]] = {}
    dense: dict[str, str] = {}
    for place in places:
        if include and not _any(place, include):
            continue
        if _any(place, exclude):
            continue
        rule = _rule(plan, place)
        if rule is None:
            continue
        rule.check(place.name, place.in_features, place.out_features)
        if rule.chains:
            converted[place] = rule, rule.chains
        else:
            dense[place.name] = "the plan keeps it dense"
    for other in obstacles:
        rule = _rule(plan, other)
        if rule is not None and rule.chains:
            if rule.is_exact:
                raise InvalidInputError(
                    f"the layer {other.name} cannot be converted: {other.reason}"
                )
            dense[other.name] = other.reason
    for place, reason in _torn_ties(model, converted).items():
        rule, _ = converted.pop(place)
        if rule.is_exact:
            raise InvalidInputError(f"the layer {place.name} cannot be converted: {reason}")
        dense[place.name] = reason
    return [Choice(place, chains) for place, (_, chains) in converted.items()], dense


def tied_to_others(model: nn.Module, places: Sequence[Place]) -> dict[Place, str]:
    """Layers that stay dense even if all of one size become one chain, and why.

    They share their weight with another module, such as an embedding.
    """
    converted = {
        place: (Rule(()), (Chain.dense(place.in_features, place.out_features),)) for place in places
    }
    return _torn_ties(model, converted)


def _rule(plan: Plan, layer: Place | Obstacle) -> Rule | None:
    return next((rule for rule in plan.rules if _matches(rule, layer)), None)


def _matches(rule: Rule, layer: Place | Obstacle) -> bool:
    names = layer.names if isinstance(layer, Place) else (layer.name,)
    return any(rule.matches(name, layer.in_features, layer.out_features) for name in names)


def _any(place: Place, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in place.names for pattern in patterns)


def _check_all_match(plan: Plan, places: list[Place], obstacles: list[Obstacle]) -> None:
    """Reject a rule that matches nothing, so that a typo in a name is noticed."""
    layers: list[Place | Obstacle] = [*places, *obstacles]
    for rule in plan.rules:
        if not any(_matches(rule, layer) for layer in layers):
            sizes = [
                f"{name}={size}"
                for name, size in (
                    ("in_features", rule.in_features),
                    ("out_features", rule.out_features),
                )
                if size is not None
            ]
            of = f" of {' and '.join(sizes)}" if sizes else ""
            known = [f"{p.name} ({p.in_features}x{p.out_features})" for p in places]
            raise InvalidInputError(
                f"the plan's rule for {rule.match!r}{of} matches no linear layer of the model; "
                f"{_listed(known)}"
            )


def _torn_ties(
    model: nn.Module, converted: Mapping[Place, tuple[Rule, tuple[Replacement, ...]]]
) -> dict[Place, str]:
    """Places that share their weight with a module that does not become the same chains."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    torn: dict[Place, str] = {}
    changed = True
    while changed:  # removing a place may leave its partner alone
        changed = False
        for place, (_, chains) in converted.items():
            own = {f"{name}.weight" for name in place.names}
            if place in torn or own.issuperset(owners[id(place.parameter)]):
                continue
            alike = {
                f"{name}.weight"
                for other, (_, theirs) in converted.items()
                if other not in torn and theirs == chains and other.kind == place.kind
                for name in other.names
            }
            alone = [name for name in owners[id(place.parameter)] if name not in alike]
            if alone:
                torn[place] = (
                    f"its weight is shared with {alone[0]}, which does not become the same"
                )
                changed = True
    return torn


def _listed(names: list[str]) -> str:
    if not names:
        return "it has none that can be converted"
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return f"it has {', '.join(names[:_SHOWN])}{more}"
