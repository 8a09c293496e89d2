"""Random modules made of everything that capture knows."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import torch

from .comparison import observe
from .products import product
from .program import Block, Call, Line, Program, Step, build, texts
from .sketch import ROWS, Sketch
from .statements import elementwise, moved, movement, write

REGIONS = {
    "with torch.no_grad():": 5,
    "with torch.enable_grad():": 1,
    "with torch.set_grad_enabled(False):": 1,
    "with torch.inference_mode():": 2,
    'with torch.autocast("cpu", torch.bfloat16):': 4,
    'with torch.autocast("cpu", enabled=False):': 1,
}
_DTYPES = {torch.float32: 90, torch.bfloat16: 5, torch.float16: 2, torch.float64: 3}


def program(seed: int, handover: str = "") -> Program:
    """A random program; the same for the same seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        made = _attempt(rng, seed)
        if made is not None:
            return replace(made, handover=handover) if handover else made


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
    made = Program(
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
    if not _runs(made):
        return None
    made = _disturbed(g, made)
    made = replace(made, calls=_calls(g, made))
    return _kept(g, made)


def _inputs(g: Sketch) -> tuple[str, ...]:
    """Inputs; the features come last, but at times first."""
    found = []
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
            )
        found.append(text + dtype)
        value = eval(found[-1], {"torch": torch, "B": ROWS})
        g.values[f"x{at}"] = value
    g.values["n"] = ROWS
    return tuple(found)


def _stage(g: Sketch) -> None:
    """A product of something that is there, and what often stands around it."""
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
    found = [last]
    tensors = [name for name in variables if isinstance(g.values[name], torch.Tensor)]
    for _ in range(g.pick(0, 0, 0, 1, 1, 2, 3)):
        name = g.rng.choice(tensors) if tensors and g.chance(0.6) else last
        option = g.pick("it", "view", "attribute", "input")
        if option == "view" and isinstance(g.values[name], torch.Tensor) and g.values[name].dim():
            found.append(movement(g, name))
        elif option == "attribute" and g.weights:
            found.append(f"self.{g.rng.choice(list(g.weights))}")
        elif option == "input":
            found.append("x0")
        else:
            found.append(name)
    good = []
    for expression in found:
        try:
            value = g.evaluate(expression)
        except Exception:  # such a view does not exist
            continue
        if isinstance(value, torch.Tensor):
            good.append(expression)
    g.rng.shuffle(good)
    return tuple(dict.fromkeys(good)) or (last,)


def _runs(made: Program, calls: tuple[Call, ...] | None = None) -> bool:
    """Whether all calls run without an error, with gradients too."""
    tried = made if calls is None else replace(made, calls=calls)
    try:
        built = build(tried.source(), "<tried>")
    except SyntaxError:
        return False
    return all(record.error is None for record in observe(built.namespace, None))


def _disturbed(g: Sketch, made: Program) -> Program:
    """With writes, regions, checkpoints and graph breaks put in where the module still runs."""
    quiet = g.chance(0.15)
    for _ in range(0 if quiet else g.pick(0, 1, 1, 2, 3)):
        made = _if_it_runs(made, _with_write(g, made))
    for _ in range(0 if quiet else g.pick(0, 0, 1, 1, 2)):
        made = _if_it_runs(made, _with_region(g, made))
    if g.chance(0.05):
        made = _if_it_runs(made, _with_checkpoint(g, made))
    if g.chance(0.03):
        at = g.rng.randrange(len(made.body) + 1)
        step = Line("torch._dynamo.graph_break()")
        made = replace(made, body=(*made.body[:at], step, *made.body[at:]))
    return made


_TRIED = (Call(3), Call(5, "no_grad"))


def _if_it_runs(made: Program, changed: Program | None) -> Program:
    """The changed program where it runs with gradients or without."""
    if changed is None:
        return made
    if any(_runs(changed, (call,)) for call in _TRIED):
        return changed
    without = replace(changed, leaves=tuple(False for _ in changed.leaves))
    return without if any(_runs(without, (call,)) for call in _TRIED) else made


def _assigned(steps: tuple[Step, ...]) -> list[str]:
    found = []
    for text in texts(steps):
        found += re.findall(r"^(\w+) = ", text, re.MULTILINE)
    return found


def _with_write(g: Sketch, made: Program) -> Program | None:
    """A write behind some statement: to a weight that was read, a variable, an input."""
    at = g.rng.randrange(len(made.body) + 1)
    before = made.body[:at]
    text = " ".join(texts(before))
    weights = [name for name in g.weights if re.search(rf"self\.{name}\b", text)]
    weights += [name for name in g.frozen if re.search(rf"self\.{name}\b", text)]
    weights = weights[-4:]
    variables = [one for one in _assigned(before) if isinstance(g.values.get(one), torch.Tensor)]
    inputs = [f"x{at}" for at in range(len(made.inputs))]
    kind = g.rng.choices(["weight", "variable", "input", "alias"], [5, 4, 1, 3])[0]
    if kind == "alias":
        # Buffers that share memory with a weight.
        names = [name for name, text in made.attributes if re.search(r", self\.w", text)]
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
        if re.search(rf'register_buffer\("{name}"', dict(made.attributes)[name]) is None:
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
    return replace(made, body=(*before, step, *made.body[at:]))


def _with_region(g: Sketch, made: Program) -> Program | None:
    start = g.rng.randrange(len(made.body))
    end = min(len(made.body), start + g.pick(1, 1, 2, 2, 3, 4, 6))
    header = g.rng.choices(list(REGIONS), list(REGIONS.values()))[0]
    inside = made.body[start:end]
    if g.chance(0.15) and "no_grad" in header:
        # The same by a switch, without a block.
        switched = (
            Line("torch.set_grad_enabled(False)"),
            *inside,
            Line("torch.set_grad_enabled(True)"),
        )
        return replace(made, body=(*made.body[:start], *switched, *made.body[end:]))
    block = Block(header, inside)
    return replace(made, body=(*made.body[:start], block, *made.body[end:]))


def _with_checkpoint(g: Sketch, made: Program) -> Program | None:
    """A few statements as a function that is run again for its gradient."""
    start = g.rng.randrange(len(made.body))
    end = min(len(made.body), start + g.pick(1, 2, 3))
    inside = made.body[start:end]
    results = _assigned(inside)
    if not results:
        return None
    known = [one for one in _assigned(made.body[:start]) if g.values.get(one) is not None]
    known += [f"x{at}" for at in range(len(made.inputs))]
    text = " ".join(texts(inside))
    read = [one for one in known if re.search(rf"\b{one}\b", text)]
    read = [one for one in read if isinstance(g.values.get(one), torch.Tensor)]
    later = " ".join([*texts(made.body[end:]), *made.returns])
    names = [one for one in results if re.search(rf"\b{one}\b", later)] or results[-1:]
    if not read:
        return None
    block = Block(
        f"def again({', '.join(read)}):",
        (*inside, Line(f"return {', '.join(names)}")),
        f"{', '.join(names)} = checkpoint(again, {', '.join(read)}, use_reentrant=False)",
    )
    return replace(made, body=(*made.body[:start], block, *made.body[end:]))


def _calls(g: Sketch, made: Program) -> tuple[Call, ...]:
    """Two to four calls, the weights changed in between."""
    mode = g.rng.choices(["grad", "no_grad", "inference"], [65, 25, 10])[0]
    autocast = g.chance(0.1)
    batch = g.pick(1, 3, 5, 7, 8)
    calls = []
    for at in range(g.pick(1, 2, 2, 3)):
        if at and g.chance(0.5):
            batch = g.pick(1, 2, 3, 4, 7, 8, 13, 0) if g.chance(0.9) else batch
        if g.chance(0.1):
            mode = g.pick("grad", "no_grad", "inference")
        before = (_change(g, made),) if at and g.chance(0.6) else ()
        calls.append(Call(batch, mode, autocast, before))
    return tuple(calls)


def _change(g: Sketch, made: Program) -> str:
    """A statement about the module ``m`` between two calls."""
    source = made.source()
    used = [name for name in g.weights if f"self.{name}" in source]
    frozen = [name for name in g.frozen if f"self.{name}" in source]
    general = [
        "m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()})",
        "m.eval()",
        "m.train()",
        "m.requires_grad_(False)",
        "m.requires_grad_(True)",
        "for p in m.parameters(): p.data.add_(0.1)",
        "with torch.no_grad():\n    for p in m.parameters(): p.mul_(0.9)",
    ]
    if frozen and g.chance(0.6):
        name = g.rng.choice(frozen)
        shape = ", ".join(map(str, getattr(g.module, name).shape))
        pattern = ", ".join(map(str, g.frozen[name]))
        parameter = "nn.Parameter({}, requires_grad=False)"
        if "register_buffer" in dict(made.attributes)[name]:
            parameter = "{}"
        again = parameter.format(f"chain_to_dense([torch.randn({pattern})])")
        other = parameter.format(f"torch.randn({shape})")
        return g.pick(
            f"del m.{name}; m.{name} = {again}",
            f"del m.{name}; m.{name} = {other}",
            f"del m.{name}; m.{name} = {other}",
            f"m.{name} = {other}",
            f"with torch.no_grad(): m.{name}.copy_(torch.randn({shape}))",
            f"with torch.no_grad(): m.{name}[0, -1] = 3",
            f"with torch.no_grad(): m.{name}.mul_(2)",
        )
    if used and g.chance(0.7):
        name = g.rng.choice(used)
        is_buffer = "register_buffer" in dict(made.attributes)[name]
        new = f"torch.randn_like(m.{name})"
        if not is_buffer:
            new = f"nn.Parameter({new}, requires_grad=m.{name}.requires_grad)"
        return g.pick(
            f"with torch.no_grad(): m.{name}.mul_(0.5)",
            f"m.{name} = {new}",
            f"m.{name}.data = torch.randn_like(m.{name})",
            f"m.{name}.data.mul_(2)",
            f"with torch.no_grad(): m.{name}.copy_(torch.randn_like(m.{name}))",
        )
    return g.rng.choice(general)


def _kept(g: Sketch, made: Program) -> Program | None:
    """The program; where it ends in an error, mostly in a form that does not."""
    if _runs(made) or g.chance(0.04):
        return made
    for mode in (None, "no_grad"):
        calls = tuple(replace(call, mode=mode or call.mode) for call in made.calls)
        for leaves in (made.leaves, tuple(False for _ in made.leaves)):
            changed = replace(made, calls=calls, leaves=leaves)
            if _runs(changed):
                return changed
    first = replace(made, calls=made.calls[:1])
    return first if _runs(first) else None
