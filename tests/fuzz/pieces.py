"""Products that an author takes apart: one block after the other."""

from __future__ import annotations

from .matrices import by_matrix
from .operands import Operand, flat, groups, spelling
from .sketch import RefusedError, Sketch
from .weights import weight


def _pieces(g: Sketch, x: Operand, t: str) -> list[str]:
    """Expressions of the a blocks of the features, or of its d strides."""
    if x.d > 1:
        return [f"{t}[..., {j}::{x.d}]" for j in range(x.d)]
    how = g.pick("chunk", "split", "slices", "select", "unbind")
    if how == "slices":
        return [f"{t}[..., {x.c * at}:{x.c * at + x.c}]" for at in range(x.a)]
    if how == "select":
        return [f"{groups(g, x, x.a, x.c)}.select(-2, {at})" for at in range(x.a)]
    name = g.new("p")
    text = {
        "chunk": f"{t}.chunk({x.a}, -1)",
        "split": f"torch.split({t}, {x.c}, dim=-1)",
        "unbind": f"{groups(g, x, x.a, x.c)}.unbind(-2)",
    }[how]
    g.add(f"{name} = {text}")
    return [f"{name}[{at}]" for at in range(x.a)]


@spelling(8)
def loop(g: Sketch, x: Operand) -> str:
    """One block after the other, put side by side."""
    strided = x.d > 1
    count = x.d if strided else x.a
    if count < 2 or (strided and x.a > 1) or count > 6:
        raise RefusedError("not so")
    t = flat(g, x)
    t = t if t.isidentifier() else g.let(t)
    pieces = _pieces(g, x, t)
    turned = g.chance(0.4)
    size = [x.c, x.b] if turned else [x.b, x.c]
    whole = weight(g, [count, *size]) if g.chance(0.4) else ""
    bias = g.pick("", "", "own", "rows")
    biases = weight(g, [count, x.b]) if bias == "rows" else ""
    names = []
    for at, piece in enumerate(pieces):
        own = f"{whole}[{at}]" if whole else weight(g, size)
        added = ""
        if bias:
            added = f", {biases}[{at}]" if biases else f", {weight(g, [x.b])}"
        if turned and not bias:
            names.append(g.let(f"{piece} @ {own}", "loop"))
        elif not bias and g.chance(0.2):
            names.append(g.let(f"{piece} @ {own}.t()", "loop"))
        else:
            names.append(g.let(f"F.linear({piece}, {own}{'.T' if turned else ''}{added})", "loop"))
    if not strided and g.chance(0.6):
        return g.let(f"torch.cat([{', '.join(names)}], -1)", "loop")
    return g.let(f"torch.stack([{', '.join(names)}], {-1 if strided else -2})", "loop")


@spelling(3)
def slices_written(g: Sketch, x: Operand) -> str:
    """One block after the other, written into a tensor."""
    if x.d != 1 or x.a < 2 or x.a > 6:
        raise RefusedError("not so")
    t = flat(g, x)
    y = g.let(_filled_first(g, x.name, (*x.lead, x.a * x.b)))
    order = list(range(x.a))
    if g.chance(0.3):
        g.rng.shuffle(order)
    if g.chance(0.15):
        order = order[1:] if g.chance(0.5) else [*order, 0]  # one is omitted, or written twice
    for at in order:
        piece = f"{t}[..., {x.c * at}:{x.c * at + x.c}]"
        own = weight(g, [x.c, x.b])
        window = f"{y}[..., {x.b * at}:{x.b * at + x.b}]"
        form = g.rng.choices(["{} = {}", "{}.copy_({})", "{} += {}"], [8, 2, 1])[0]
        g.add(form.format(window, f"{piece} @ {own}"), "slices_written")
        if g.chance(0.08):  # it is read before it is whole
            g.let(g.pick(f"{y} * 2", f"{y}.view_as({y})", f"{y}.clone()", f"{y}.mean()"))
    return y


@spelling(2)
def blocks_written(g: Sketch, x: Operand) -> str:
    """Blocks written onto the diagonal of a matrix."""
    if x.d != 1 or x.a < 2 or x.a > 5:
        raise RefusedError("not so")
    matrix = g.let(_filled_first(g, x.name, (x.a * x.b, x.a * x.c), zero=True))
    for at in range(x.a):
        rows, columns = f"{x.b * at}:{x.b * at + x.b}", f"{x.c * at}:{x.c * at + x.c}"
        g.add(f"{matrix}[{rows}, {columns}] = {weight(g, [x.b, x.c])}", "blocks_written")
    return by_matrix(g, x, matrix, "blocks_written")


def _filled_first(g: Sketch, like: str, shape: tuple[int, ...], zero: bool = False) -> str:
    sizes = g.sizes(shape, 0)
    zeros = [f"{like}.new_zeros({sizes})", f"torch.zeros({sizes})"]
    others = [f"{like}.new_full(({sizes}), 0.5)", f"torch.ones({sizes}) * 1"]
    return g.rng.choice(zeros if zero or g.chance(0.85) else others)
