"""Plans: which layers of a model become which chains. Pure Python, no torch.

`ksopt search` writes one, `ksopt convert` and `ksopt.convert` read it; a person can write one too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeGuard

from ksopt import drawing
from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.operators.base import StructuredOperator
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain
from ksopt.patterns.chain_texts import chain_of, is_named
from ksopt.patterns.surroundings import Surroundings
from ksopt.report import document, tables
from ksopt.report.document import Section
from ksopt.report.tables import Table
from ksopt.system import untrusted
from ksopt.system.atomic_files import write_whole

SCHEMA = "ksopt.plan/1"

_REPLACEMENTS = (Chain, StructuredOperator)
_DIMS = re.compile(r"([0-9]{1,9})[xX×]([0-9]{1,9})")
_RULE_KEYS = {"match", "in_features", "out_features", "chain", "chains", "where"}
_WHERE_KEYS = {"epilogue", "siblings"}
_PLAN_KEYS = {"schema", "layers", "made_by"}


@dataclass(frozen=True)
class Rule:
    """Conversion rule for the layers that it matches.

    Args:
        chains: One chain, or operator of another structure, for the layer. Or several, for a layer
            whose outputs are parts stacked on each other (a fused q, k, v): one for each part, in
            order, outputs adding up. None: the layer stays dense.
        match: A layer's name in the model, or a pattern for names in which ``*`` stands for any
            text, ``?`` for a character and ``[...]`` for one of some.
        in_features: If set, it matches only layers with this many inputs.
        out_features: If set, it matches only layers with this many outputs.
        where: If set, it holds only for layers with these surroundings in the model, see `holds`.

    Raises:
        InvalidInputError: Chains of different inputs, or of other sizes than the rule matches.

    Example:
        >>> rule = Rule((Chain.monarch(384, 1536, p=4),), match="encoder.*", in_features=384)
        >>> rule.matches("encoder.0.fc", 384, 1536), rule.matches("head", 384, 1536)
        (True, False)
    """

    chains: tuple[Replacement, ...]
    match: str = "*"
    in_features: int | None = None
    out_features: int | None = None
    where: Surroundings | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "chains", tuple(self.chains))
        if not self.chains:
            return
        columns = {chain.in_features for chain in self.chains}
        if len(columns) > 1:
            raise InvalidInputError(
                f"the plan's rule for {self.match!r} has chains of different numbers of inputs, "
                f"{sorted(columns)}: the parts of one layer share their input"
            )
        sizes = (self.in_features, self.out_features)
        for name, size, own in zip(("in_features", "out_features"), sizes, self._size, strict=True):
            if size is not None and size != own:
                raise InvalidInputError(
                    f"the plan's rule for {self.match!r} is for layers of {name}={size}, but "
                    f"{self.text} has {name}={own}"
                )

    @property
    def _size(self) -> tuple[int, int]:
        return self.chains[0].in_features, sum(chain.out_features for chain in self.chains)

    @property
    def text(self) -> str:
        """The chains of the rule as text, or "dense".

        Example:
            >>> Rule((Chain.dense(4, 2),)).text, Rule(()).text
            ('(1,2,4,1)', 'dense')
        """
        return " | ".join(map(str, self.chains)) or "dense"

    @property
    def is_exact(self) -> bool:
        """Whether the rule names one layer."""
        return not any(sign in self.match for sign in "*?[")

    def matches(self, name: str, in_features: int, out_features: int) -> bool:
        """Whether the rule matches a layer of this name and size."""
        return (
            fnmatchcase(name, self.match)
            and self.in_features in (None, in_features)
            and self.out_features in (None, out_features)
        )

    def holds(self, around: Surroundings | None) -> bool:
        """Whether the rule's condition is true of a layer with these surroundings.

        Args:
            around: The layer's surroundings in its model; None if they are not known, which
                fulfils no condition.

        Example:
            >>> siblings = Surroundings(("bias",), siblings=3)
            >>> rule = Rule((Chain.monarch(8, 8, p=2),), where=siblings)
            >>> rule.holds(siblings), rule.holds(Surroundings(("bias",))), rule.holds(None)
            (True, False, False)
        """
        return self.where is None or (around is not None and self.where.is_alike(around))

    def check(self, name: str, in_features: int, out_features: int) -> None:
        """Raise InvalidInputError if the rule's chains do not fit a layer that it matches."""
        if self.chains and self._size != (in_features, out_features):
            raise InvalidInputError(
                f"the layer {name} has in_features={in_features} and out_features={out_features}, "
                f"but the plan's rule for {self.match!r} gives it {self.text} with "
                f"in_features={self._size[0]} and out_features={self._size[1]}"
            )


@dataclass(frozen=True)
class Plan:
    """Ordered rules: the first that matches a layer decides; layers without a match stay dense.

    Args:
        rules: The rules.
        made_by: Origin of the plan, such as the command of a search.

    Raises:
        InvalidInputError: There are no rules.

    Example:
        >>> plan = Plan.of({"encoder.0.fc": None, "384x1536": "(1,768,192,2)*(2,192,192,1)"})
        >>> [rule.text for rule in plan.rules]
        ['dense', '(1,768,192,2)*(2,192,192,1)']
        >>> Plan.from_json(plan.to_json()) == plan
        True
        >>> [rule.text for rule in Plan.of({"384x1536": "monarch"}).rules]
        ['(1,384,96,4)*(4,96,96,1)']
    """

    rules: tuple[Rule, ...]
    made_by: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if not self.rules:
            raise InvalidInputError("a plan needs at least one rule, got none")

    @classmethod
    def of(cls, source: Plan | Mapping[str, Any] | str | Path) -> Plan:
        """A plan from a plan, a mapping, or the path of a file.

        Args:
            source: In a mapping, the keys are names, patterns for names, or sizes INxOUT as in
                ``nn.Linear(in, out)``; the values are chains, their texts, lists of either (one for
                each part of a fused layer), or None to keep a layer dense. Under a size a text may
                be the name of a family, such as "monarch".

        Raises:
            InvalidInputError: It is none of these, or something in it is not allowed.
        """
        if isinstance(source, Plan):
            return source
        if isinstance(source, (str, Path)):
            return cls.read(source)
        if not isinstance(source, Mapping):
            raise InvalidInputError(
                f"a plan is a Plan, a mapping from layers to chains, or the path of a plan.json; "
                f"got {type(source).__name__}"
            )
        rules = []
        for key, value in source.items():
            if not isinstance(key, str):
                raise InvalidInputError(f"a plan's keys are texts, got {key!r}")
            size = _DIMS.fullmatch(key)
            rules.append(
                Rule(
                    _chains(value, key, None if size is None else (int(size[1]), int(size[2]))),
                    match="*" if size else key,
                    in_features=int(size[1]) if size else None,
                    out_features=int(size[2]) if size else None,
                )
            )
        return cls(tuple(rules))

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan in a file; raises InvalidInputError if it cannot be read or is not one."""
        text = untrusted.text(Path(path), "the plan")
        try:
            return cls.from_json(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None

    @property
    def has_conditions(self) -> bool:
        """Whether a rule depends on what surrounds a layer in its model."""
        return any(rule.where is not None for rule in self.rules)

    def table(self) -> Table:
        """One row for each rule; a column for conditions, if a rule has one."""
        heads = ["layers", ">in_features", ">out_features", "become"]
        rows = [
            [rule.match, str(rule.in_features or "any"), str(rule.out_features or "any"), rule.text]
            for rule in self.rules
        ]
        if self.has_conditions:
            heads.append("where they are")
            for row, rule in zip(rows, self.rules, strict=True):
                row.append("" if rule.where is None else str(rule.where))
        return tables.of(heads, rows)

    def __str__(self) -> str:
        return self.table().plain()

    def _repr_html_(self) -> str:
        """Table and drawn chains for a notebook."""
        chains = {chain for rule in self.rules for chain in rule.chains if _is_drawn(chain)}
        drawn = [
            Section(f"{chain}, drawn", figure=drawing.figure_of(chain), is_folded=True)
            for chain in sorted(chains, key=str)
        ]
        return document.fragment([Section("Plan", table=self.table()), *drawn])

    def write(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all."""
        try:
            write_whole(Path(path), self.to_json())
        except OSError as error:
            raise InvalidInputError(f"the plan cannot be written to {path}: {error}") from None

    def to_json(self) -> str:
        """The plan as JSON, with the schema "ksopt.plan/1" (see docs/convert.md)."""
        layers = [_rule_to_json(rule) for rule in self.rules]
        value: dict[str, Any] = {"schema": SCHEMA, "layers": layers}
        if self.made_by:
            value["made_by"] = self.made_by
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`; raises InvalidInputError if the text is not of that form."""
        value = untrusted.parsed(text, "the plan")
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            schema = value.get("schema") if isinstance(value, dict) else type(value).__name__
            raise InvalidInputError(f"a plan has the schema {SCHEMA!r}, got {schema!r}")
        _no_other_keys(value, _PLAN_KEYS, "the plan")
        layers, made_by = value.get("layers"), value.get("made_by", "")
        if not isinstance(layers, list) or not isinstance(made_by, str):
            raise InvalidInputError("a plan has a list, 'layers', and may have a text, 'made_by'")
        return cls(tuple(map(_rule_from_json, layers)), made_by)


def _is_drawn(chain: Replacement) -> TypeGuard[Chain]:
    return isinstance(chain, Chain) and drawing.can_draw(chain)


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    value: dict[str, Any] = {"match": rule.match}
    for name in ("in_features", "out_features"):
        if getattr(rule, name) is not None:
            value[name] = getattr(rule, name)
    texts = [str(chain) for chain in rule.chains]
    if len(texts) > 1:
        value["chains"] = texts
    else:
        value["chain"] = texts[0] if texts else None
    if rule.where is not None:
        value["where"] = rule.where.to_json()
    return value


def _rule_from_json(value: Any) -> Rule:
    if not isinstance(value, dict):
        raise InvalidInputError(f"each of a plan's 'layers' is an object, got {value!r}")
    match = value.get("match", "*")
    _no_other_keys(value, _RULE_KEYS, f"the plan's rule for {match!r}")
    if ("chain" in value) == ("chains" in value):
        raise InvalidInputError(
            f"the plan's rule for {match!r} must have 'chain' (a text, or null to keep the layer "
            "dense) or 'chains' (a list of texts, one for each part of a fused layer)"
        )
    sizes = [value.get(name) for name in ("in_features", "out_features")]
    if not isinstance(match, str) or any(
        size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1)
        for size in sizes
    ):
        raise InvalidInputError(
            f"the plan's rule for {match!r}: 'match' is a text, 'in_features' and 'out_features' "
            "are whole numbers from 1"
        )
    chains = value["chains"] if "chains" in value else value["chain"]
    if "chain" in value and isinstance(chains, list):
        raise InvalidInputError(f"the plan's rule for {match!r}: a list belongs in 'chains'")
    columns, rows = sizes
    known = None if columns is None or rows is None else (columns, rows)
    where = _where(value["where"], match) if "where" in value else None
    return Rule(_chains(chains, match, known), match, columns, rows, where)


def _where(value: Any, match: str) -> Surroundings:
    """The condition of a rule."""
    rule = f"the plan's rule for {match!r}"
    if not isinstance(value, dict):
        raise InvalidInputError(
            f"{rule}: 'where' is an object with 'epilogue' and 'siblings', got {value!r}"
        )
    _no_other_keys(value, _WHERE_KEYS, f"'where' of {rule}")
    steps, siblings = value.get("epilogue", []), value.get("siblings", 1)
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise InvalidInputError(f"{rule}: 'epilogue' is a list of texts, got {steps!r}")
    try:
        return Surroundings.checked(steps, siblings, "where")
    except InvalidInputError as error:
        raise InvalidInputError(f"{rule}: {error}") from None


def _chains(value: Any, name: str, size: tuple[int, int] | None) -> tuple[Replacement, ...]:
    if value is None:
        return ()
    if isinstance(value, (*_REPLACEMENTS, str)):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise InvalidInputError(
            f"the plan's rule for {name!r} gives {value!r}: give a chain, its text, a list of "
            "either, or None to keep the layer dense"
        )
    chains = []
    for chain in value:
        if not isinstance(chain, (*_REPLACEMENTS, str)):
            raise InvalidInputError(f"the plan's rule for {name!r}: {chain!r} is not a chain")
        try:
            chains.append(_parsed(chain, size) if isinstance(chain, str) else chain)
        except InvalidInputError as error:
            raise InvalidInputError(f"the plan's rule for {name!r}: {error}") from None
    return tuple(chains)


def _parsed(text: str, size: tuple[int, int] | None) -> Replacement:
    if not is_named(text):
        return registry.parse(text)
    if size is None:
        raise InvalidInputError(
            f"{text!r} is a chain of a layer whose size is known: write the size for the key, such "
            'as "384x1536", or the chain\'s patterns'
        )
    return chain_of(text, *size)


def _no_other_keys(value: dict[str, Any], allowed: set[str], what: str) -> None:
    other = sorted(set(value) - allowed)
    if other:
        raise InvalidInputError(
            f"{what} has {', '.join(map(repr, other))}, but may have only "
            f"{', '.join(map(repr, sorted(allowed)))}"
        )
