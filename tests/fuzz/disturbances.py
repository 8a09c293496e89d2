"""Disturbances between the statements of a random module: writes, regions, checkpoints."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from .comparison import observe
from .program import Block, Call, Line, Program, Step, build, texts
from .sketch import Sketch
from .statements import write

REGIONS = {
    "with torch.no_grad():": 5,
    "with torch.enable_grad():": 1,
    "with torch.set_grad_enabled(False):": 1,
    "with torch.inference_mode():": 2,
    'with torch.autocast("cpu", torch.bfloat16):': 4,
    'with torch.autocast("cpu", enabled=False):': 1,
}


def runs(generated: Program, calls: tuple[Call, ...] | None = None) -> bool:
    """Whether all calls run without an error, with gradients too."""
    tried = generated if calls is None else replace(generated, calls=calls)
    try:
        built = build(tried.source(), "<tried>")
    except SyntaxError:
        return False
    return all(record.error is None for record in observe(built.namespace, None))


def disturbed(g: Sketch, generated: Program) -> Program:
    """With writes, regions, checkpoints and graph breaks put in where the module still runs."""
    quiet = g.chance(0.15)
    for _ in range(0 if quiet else g.pick(0, 1, 1, 2, 3)):
        generated = _if_itruns(generated, _with_write(g, generated))
    if not quiet and g.chance(0.1):
        generated = _if_itruns(generated, _with_copy(g, generated))
    for _ in range(0 if quiet else g.pick(0, 0, 1, 1, 2)):
        generated = _if_itruns(generated, _with_region(g, generated))
    if g.chance(0.05):
        generated = _if_itruns(generated, _with_checkpoint(g, generated))
    if g.chance(0.03):
        at = g.rng.randrange(len(generated.body) + 1)
        step = Line("torch._dynamo.graph_break()")
        generated = replace(generated, body=(*generated.body[:at], step, *generated.body[at:]))
    return generated


_TRIED = (Call(3), Call(5, "no_grad"))


def _if_itruns(generated: Program, changed: Program | None) -> Program:
    """The changed program where it runs with gradients or without."""
    if changed is None:
        return generated
    if any(runs(changed, (call,)) for call in _TRIED):
        return changed
    without = replace(changed, leaves=tuple(False for _ in changed.leaves))
    return without if any(runs(without, (call,)) for call in _TRIED) else generated


def _assigned(steps: tuple[Step, ...]) -> list[str]:
    names = []
    for text in texts(steps):
        names += re.findall(r"^(\w+) = ", text, re.MULTILINE)
    return names


def _with_write(g: Sketch, generated: Program) -> Program | None:
    """A write behind some statement: to a weight that was read, a variable, an input."""
    at = g.rng.randrange(len(generated.body) + 1)
    before = generated.body[:at]
    text = " ".join(texts(before))
    weights = [name for name in g.weights if re.search(rf"self\.{name}\b", text)]
    weights += [name for name in g.frozen if re.search(rf"self\.{name}\b", text)]
    weights = weights[-4:]
    variables = [one for one in _assigned(before) if isinstance(g.values.get(one), torch.Tensor)]
    inputs = [f"x{at}" for at in range(len(generated.inputs))]
    kind = g.rng.choices(["weight", "variable", "input", "alias"], [5, 4, 1, 3])[0]
    if kind == "alias":
        # Buffers that share memory with a weight.
        names = [name for name, text in generated.attributes if re.search(r", self\.w", text)]
        kind, weights = "weight", names or weights
    if kind == "weight" and weights:
        name = g.rng.choice(weights)
        value = getattr(g.module, name)
        others = [
            f"self.{one}"
            for one in g.weights
            if one != name and tuple(g.weights[one]) == tuple(value.shape)
        ]
        text = write(g, f"self.{name}", value.shape, others)
        text = text.replace(".data.", ".")  # such a write is not counted, by torch neither
        if re.search(rf'register_buffer\("{name}"', dict(generated.attributes)[name]) is None:
            step: Step = Block("with torch.no_grad():", (Line(text),))
        else:
            step = Line(text)
    else:
        names = inputs if kind == "input" or not variables else variables
        name = g.rng.choice(names)
        shape = g.shape(name)
        others = [
            one
            for one in [*variables, *inputs]
            if one != name and one in g.values and g.shape(one) == shape
        ]
        text = write(g, name, shape, others)
        step = Block("with torch.no_grad():", (Line(text),)) if g.chance(0.25) else Line(text)
    return replace(generated, body=(*before, step, *generated.body[at:]))


def _with_copy(g: Sketch, generated: Program) -> Program | None:
    """A copy, or by chance a view, of a result from a variable; one of both is written."""
    at = g.rng.randrange(len(generated.body) + 1)
    before = generated.body[:at]
    variables = [one for one in _assigned(before) if isinstance(g.values.get(one), torch.Tensor)]
    if not variables:
        return None
    name = g.rng.choice(variables)
    of = g.pick("{}", "{} * 0.5", "F.relu({})", "torch.where({} > 0, {}, 0.1)", "{}.mT + 1")
    moved = g.pick(
        "c0.flatten(1)",
        "c0.flatten(-2)",
        "c0.reshape(-1)",
        "c0.contiguous()",
        "c0.mT.flatten(-2)",
        "c0.transpose(0, 1).contiguous()",
    )
    written, other = g.pick(("c0", "c1"), ("c1", "c0"))
    change: Step = Line(g.pick(f"{written}.add_(1)", f"{written}.mul_(2)"))
    if g.chance(0.25):
        change = Block("with torch.no_grad():", (change,))
    steps = (Line(f"c0 = {of.replace('{}', name)}"), Line(f"c1 = {moved}"), change)
    returned = (other, written) if g.chance(0.3) else (other,)
    returns = (*generated.returns, *returned)
    return replace(generated, body=(*before, *steps, *generated.body[at:]), returns=returns)


def _with_region(g: Sketch, generated: Program) -> Program | None:
    start = g.rng.randrange(len(generated.body))
    end = min(len(generated.body), start + g.pick(1, 1, 2, 2, 3, 4, 6))
    header = g.rng.choices(list(REGIONS), list(REGIONS.values()))[0]
    inside = generated.body[start:end]
    if g.chance(0.15) and "no_grad" in header:
        # The same by a switch, without a block.
        switched = (
            Line("torch.set_grad_enabled(False)"),
            *inside,
            Line("torch.set_grad_enabled(True)"),
        )
        return replace(generated, body=(*generated.body[:start], *switched, *generated.body[end:]))
    block = Block(header, inside)
    return replace(generated, body=(*generated.body[:start], block, *generated.body[end:]))


def _with_checkpoint(g: Sketch, generated: Program) -> Program | None:
    """A few statements as a function that is run again for its gradient."""
    start = g.rng.randrange(len(generated.body))
    end = min(len(generated.body), start + g.pick(1, 2, 3))
    inside = generated.body[start:end]
    results = _assigned(inside)
    if not results:
        return None
    known = [one for one in _assigned(generated.body[:start]) if g.values.get(one) is not None]
    known += [f"x{at}" for at in range(len(generated.inputs))]
    text = " ".join(texts(inside))
    read = [one for one in known if re.search(rf"\b{one}\b", text)]
    read = [one for one in read if isinstance(g.values.get(one), torch.Tensor)]
    later = " ".join([*texts(generated.body[end:]), *generated.returns])
    names = [one for one in results if re.search(rf"\b{one}\b", later)] or results[-1:]
    if not read:
        return None
    block = Block(
        f"def again({', '.join(read)}):",
        (*inside, Line(f"return {', '.join(names)}")),
        f"{', '.join(names)} = checkpoint(again, {', '.join(read)}, use_reentrant=False)",
    )
    return replace(generated, body=(*generated.body[:start], block, *generated.body[end:]))
