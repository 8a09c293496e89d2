"""Resolution of a plan: the chains of each layer, before the model is changed.

A rule with a condition needs to know what surrounds a layer in its model. That is read from the
graph of a call, as a search of a model reads it (`ksopt.conversion.model_surroundings`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ksopt.conversion.layers import Obstacle, Place, find
from ksopt.conversion.model_call import ModelCall, evaluating
from ksopt.conversion.plan import Plan, Rule
from ksopt.errors import InvalidInputError
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import Surroundings

# Names that an error message lists.
_SHOWN = 8
_NO_RULE = "no rule of the plan matches it"


@dataclass(frozen=True)
class Choice:
    """A layer to convert, and its chains."""

    place: Place
    chains: tuple[Replacement, ...]


def resolve(
    model: nn.Module,
    plan: Plan,
    include: Collection[str],
    exclude: Collection[str],
    call: ModelCall | None = None,
) -> tuple[list[Choice], dict[str, str]]:
    """The layers to convert, in the model's order, and by name why others are left dense.

    A rule with a condition that is not fulfilled, or not known to be, is skipped. Layers that
    include and exclude leave out have no reason.

    Args:
        model: The model; it runs only if the plan has conditions.
        plan: The plan.
        include: Names or patterns for names: only these layers are converted.
        exclude: Names or patterns for names: these are not.
        call: Inputs of the model, whose graph decides which conditions are fulfilled.

    Raises:
        InvalidInputError: A rule, or an entry of include or exclude, matches no layer; a rule's
            chains do not fit a layer; it names a layer that cannot be converted; or the model does
            not take the inputs.
    """
    places, obstacles = find(model)
    _check_all_match(plan, places, obstacles)
    known = _Known.of(model, plan, call)
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
        if not _is_selected(place, include, exclude):
            continue
        rule = _rule(plan, place, known.around.get(place.name))
        if rule is not None:
            rule.check(place.name, place.in_features, place.out_features)
        if rule is not None and rule.chains:
            converted[place] = rule, rule.chains
        elif where := conditions(plan, place):
            dense[place.name] = known.why_not(place.name, where)
        elif rule is not None:
            dense[place.name] = "the plan keeps it dense"
        else:
            dense[place.name] = _NO_RULE
    for other in obstacles:
        rule = _rule(plan, other, None)
        if rule is not None and rule.chains and rule.is_exact:
            raise InvalidInputError(f"the layer {other.name} cannot be converted: {other.reason}")
        if (rule is not None and rule.chains) or conditions(plan, other):
            dense[other.name] = other.reason
        elif rule is None and _is_selected(other, include, exclude):
            dense[other.name] = _NO_RULE
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


@dataclass(frozen=True)
class _Known:
    """What is known of the surroundings of a model's layers.

    Args:
        around: Surroundings by the layer's name.
        unread: Why those of other layers are not known, in a sentence.
    """

    around: Mapping[str, Surroundings]
    unread: str

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, call: ModelCall | None) -> _Known:
        """What a call shows; nothing is read for a plan without conditions.

        Raises:
            InvalidInputError: The model does not take the inputs.
        """
        if call is None or not plan.has_conditions:
            return cls(
                {},
                "What surrounds it is not known without inputs of the model (example_inputs of "
                "ksopt.convert and KSConfig, --inputs of the command)",
            )
        # The compiler is imported only where a plan has conditions.
        from ksopt.conversion.model_surroundings import surroundings_in_graph

        with evaluating(model):
            around, note = surroundings_in_graph(model, call)
            if note:
                call.run(model)  # Dynamo's error may be the inputs' fault: then this raises
        return cls(around, note.rstrip("."))

    def why_not(self, name: str, conditions: Sequence[Surroundings]) -> str:
        """Why a layer stays dense although the plan has chains for it under conditions."""
        where = ", or ".join(map(str, conditions))
        only = f"the plan has chains for such layers only where they are {where}"
        if name not in self.around:
            return f"{only}. {self.unread}"
        return f"{only}; this one is {self.around[name]}"


def _rule(plan: Plan, layer: Place | Obstacle, around: Surroundings | None) -> Rule | None:
    """The rule that decides about a layer with these surroundings."""
    matching = (rule for rule in plan.rules if _matches(rule, layer))
    return next((rule for rule in matching if rule.holds(around)), None)


def conditions(plan: Plan, layer: Place | Obstacle) -> list[Surroundings]:
    """The conditions under which a plan has chains for a layer."""
    rules = [rule for rule in plan.rules if _matches(rule, layer) and rule.chains]
    return list(dict.fromkeys(rule.where for rule in rules if rule.where is not None))


def _matches(rule: Rule, layer: Place | Obstacle) -> bool:
    return any(
        rule.matches(name, layer.in_features, layer.out_features) for name in _names_of(layer)
    )


def _is_selected(
    layer: Place | Obstacle, include: Collection[str], exclude: Collection[str]
) -> bool:
    return (not include or _any(layer, include)) and not _any(layer, exclude)


def _any(layer: Place | Obstacle, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in _names_of(layer) for pattern in patterns)


def _names_of(layer: Place | Obstacle) -> tuple[str, ...]:
    return layer.names if isinstance(layer, Place) else (layer.name,)


def _check_all_match(plan: Plan, places: list[Place], obstacles: list[Obstacle]) -> None:
    """Reject a rule that matches nothing, so that a typo in a name is noticed."""
    layers: list[Place | Obstacle] = [*places, *obstacles]
    for rule in plan.rules:
        if rule.where is not None and rule.match == "*":
            continue  # it is for any model that may have such layers
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
