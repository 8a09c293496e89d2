"""The chains that replace the linear layers of a model: by a rule for sizes, or by a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from ksopt.conversion.layers import Place, find
from ksopt.conversion.model_call import ModelCall
from ksopt.conversion.plan import Plan, Rule
from ksopt.conversion.resolve import Choice, resolve
from ksopt.errors import InvalidInputError, UnavailableError
from ksopt.patterns.chain import Chain

_HALF = "(1,out/4,mid/4,4)*(4,mid/4,in/4,1)"
_QUARTER = "(1,out/8,mid/8,8)*(8,mid/8,in/8,1)"
_PAPER = "(1,out/2,mid/2,2)*(6,mid/6,in/6,1)"
_PAPER_SQUARE = "(1,out/2,in/8,2)*(2,in/8,in/2,1)"
NAMED = {"half": (_HALF, _HALF), "quarter": (_QUARTER, _QUARTER), "paper": (_PAPER, _PAPER_SQUARE)}
"""Names of rules, for layers of two sizes and for square ones. Half and quarter are the shares of a
square layer's weights; paper is what the paper takes for a ViT-S/16."""

_TERM = re.compile(r"\b(in|out|mid)\b(?:\s*/\s*([0-9]{1,9}))?")
_HEADS = ("classifier", "lm_head")
_FUSED = ".c_attn"  # GPT-2's layer for q, k and v: three siblings


def chain_of(rule: str, n_in: int, n_out: int) -> Chain:
    """The chain of a rule for a layer.

    Args:
        rule: one of `NAMED`, or a chain with ``in``, ``out``, ``mid`` (the smaller of both) and
            parts of them, such as ``out/4``, instead of numbers.
        n_in: features of the layer's input.
        n_out: features of its output.

    Raises:
        InvalidInputError: the rule is no chain, or none that fits this size.

    Example:
        >>> str(chain_of("half", 384, 1536))
        '(1,384,96,4)*(4,96,96,1)'
        >>> str(chain_of("(2,out/2,in/2,1)", 8, 4))
        '(2,2,4,1)'
    """
    names = {"in": n_in, "out": n_out, "mid": min(n_in, n_out)}
    text = NAMED[rule][n_in == n_out] if rule in NAMED else rule

    def number(match: re.Match[str]) -> str:
        whole, part = names[match[1]], int(match[2] or 1)
        if part == 0 or whole % part:
            raise InvalidInputError(
                f"--chain {rule}: {match[1]}/{match[2]} is no whole number for a layer of "
                f"{n_in}x{n_out}, where {match[1]} is {whole}"
            )
        return str(whole // part)

    try:
        chain = Chain.parse(_TERM.sub(number, text))
    except InvalidInputError as error:
        if str(error).startswith("--chain"):
            raise
        raise InvalidInputError(
            f"--chain {rule}: {error}; it is one of {', '.join(NAMED)}, or a rule such as {_HALF}"
        ) from None
    if chain.shape != (n_out, n_in):
        raise InvalidInputError(
            f"--chain {rule}: for a layer of {n_in}x{n_out} that is {chain}, which is for "
            f"{chain.in_features}x{chain.out_features}"
        )
    return chain


def choices(
    model: nn.Module, rule: str, plan: Plan | None, call: ModelCall | None = None
) -> list[Choice]:
    """The layers of a model to replace, and their chains.

    Args:
        model: of transformers.
        rule: see `chain_of`; for all layers except the head.
        plan: used instead of the rule.
        call: inputs of the model, for a plan with conditions.

    Raises:
        InvalidInputError: the rule or the plan does not fit the model.
        UnavailableError: the model has no linear layers.
    """
    if plan is None:
        plan = Plan(tuple(_rules(find(model)[0], rule)) or _none(model))
    chosen, _ = resolve(model, plan, (), (), call)
    if not chosen:
        raise InvalidInputError("the plan keeps every layer of the model dense")
    return chosen


def _rules(places: Iterable[Place], rule: str) -> Iterable[Rule]:
    for place in places:
        if place.name.rpartition(".")[2] in _HEADS:
            continue
        n_in, n_out = place.in_features, place.out_features
        parts = 3 if place.name.endswith(_FUSED) and n_out % 3 == 0 else 1
        yield Rule((chain_of(rule, n_in, n_out // parts),) * parts, match=place.name)


def _none(model: nn.Module) -> tuple[Rule, ...]:
    raise UnavailableError(
        f"{type(model).__name__} of the installed transformers has no dense layers that are "
        "modules, so nothing could be replaced: another version is needed"
    )
