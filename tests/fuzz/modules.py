"""Random modules of all constructs that capture recognises."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from . import matrices, pieces, products
from .calls import calls
from .disturbances import disturbed, runs
from .operands import product
from .program import Program
from .sketch import ROWS, Sketch
from .statements import elementwise, moved, movement

assert all((matrices, pieces, products))  # each adds its ways to write a product

_DTYPES = {torch.float32: 90, torch.bfloat16: 5, torch.float16: 2, torch.float64: 3}


def program(seed: int, handover: str = "") -> Program:
    """A random program; the same for the same seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        generated = _attempt(rng, seed)
        if generated is not None:
            return replace(generated, handover=handover) if handover else generated


def _attempt(rng: random.Random, seed: int) -> Program | None:
    dtype = rng.choices(list(_DTYPES), list(_DTYPES.values()))[0]
    g = Sketch(rng, dtype)
    inputs = _inputs(g)
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4])):
        _stage(g)
    finish = () if dtype is torch.float32 else (f"self.to({dtype})",)
    variables = [name for name in g.values if name.startswith("v")]
    if not variables:
        return None
    generated = Program(
        seed=seed,
        attributes=tuple(g.attributes.items()),
        body=tuple(g.steps),
        returns=_returns(g, variables),
        inputs=inputs,
        leaves=tuple(g.chance(0.7) for _ in inputs),
        finish=finish,
        dynamic=rng.choices([None, True, False, "mark"], [4, 3, 2, 1])[0],
        handover=rng.choices(["eager", "aot_eager"], [85, 15])[0],
        training=g.chance(0.7),
    )
    if not runs(generated):
        return None
    generated = disturbed(g, generated)
    generated = replace(generated, calls=calls(g, generated))
    return _running_form(g, generated)


def _inputs(g: Sketch) -> tuple[str, ...]:
    """Inputs; the features come last, but at times first."""
    texts = []
    dtype = "" if g.dtype is torch.float32 else f".to({g.dtype})"
    for at in range(g.pick(1, 1, 1, 2)):
        total = g.pick(4, 6, 8, 12, 12, 16, 18, 20, 24, 24, 30, 32, 36, 48)
        shape = g.pick(
            f"B, {total}",
            f"B, {total}",
            f"B, {total}",
            f"B, 3, {total}",
            f"B, 2, {max(1, total // 2)}",
            f"B, 4, 1, {max(1, total // 4)}",
        )
        text = f"torch.randn({shape})"
        if g.chance(0.12):
            text = g.pick(
                f"torch.randn({total}, B).t()",
                f"torch.randn(B, {2 * total})[:, :{total}]",
                f"torch.randn(B, {2 * total})[:, ::2]",
                f"torch.randn(2 * B, {total})[::2]",
                f"torch.randn(1, {total}).expand(B, {total})",
            )
        text += dtype
        if at and g.chance(0.25):
            text = g.pick(
                "x0", "x0[..., : x0.shape[-1] // 2]", "x0.view(-1, x0.shape[-1])", "x0.mT"
            )
        scope = {"torch": torch, "B": ROWS, **g.values}
        try:
            g.values[f"x{at}"] = eval(text, scope)
        except RuntimeError:  # no such view
            continue
        texts.append(f"(x{at} := {text})")
    g.values["n"] = ROWS
    return tuple(texts)


def _stage(g: Sketch) -> None:
    """A product of an existing variable, with its usual surroundings."""
    for _ in range(40):
        before = len(g.steps)
        with g.attempt():
            names = g.variables()
            name = names[-1] if g.chance(0.75) else g.rng.choice(names)
            if g.chance(0.3):
                name = g.rng.choice([moved, elementwise])(g, name)
            name = product(g, name)
        if len(g.steps) > before:
            break
    for _ in range(g.pick(0, 0, 1, 1, 2)):
        with g.attempt():
            names = g.variables()
            g.rng.choice([moved, moved, elementwise])(g, names[-1])


def _returns(g: Sketch, variables: list[str]) -> tuple[str, ...]:
    last = variables[-1]
    choices = [last]
    tensors = [name for name in variables if isinstance(g.values[name], torch.Tensor)]
    for _ in range(g.pick(0, 0, 0, 1, 1, 2, 3)):
        name = g.rng.choice(tensors) if tensors and g.chance(0.6) else last
        option = g.pick("it", "view", "attribute", "input")
        if option == "view" and isinstance(g.values[name], torch.Tensor) and g.values[name].dim():
            choices.append(movement(g, name))
        elif option == "attribute" and g.weights:
            choices.append(f"self.{g.rng.choice(list(g.weights))}")
        elif option == "input":
            choices.append("x0")
        else:
            choices.append(name)
    good = []
    for expression in choices:
        try:
            value = g.evaluate(expression)
        except Exception:  # such a view does not exist
            continue
        if isinstance(value, torch.Tensor):
            good.append(expression)
    g.rng.shuffle(good)
    return tuple(dict.fromkeys(good)) or (last,)


def _running_form(g: Sketch, generated: Program) -> Program | None:
    """The program; where it ends in an error, mostly in a form that does not."""
    # Where a weight is written before the backward pass, torch's refusals are of interest, too.
    if runs(generated) or g.chance(0.5 if generated.calls[-1].between else 0.04):
        return generated
    for mode in (None, "no_grad"):
        again = tuple(replace(call, mode=mode or call.mode) for call in generated.calls)
        for leaves in (generated.leaves, tuple(False for _ in generated.leaves)):
            changed = replace(generated, calls=again, leaves=leaves)
            if runs(changed):
                return changed
    first = replace(generated, calls=generated.calls[:1])
    return first if runs(first) else None
