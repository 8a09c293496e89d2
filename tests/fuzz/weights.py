"""Weights of random modules: where they are stored, and how the author reads them."""

from __future__ import annotations

from collections.abc import Sequence

from .sketch import RefusedError, Sketch

_FORMS = {
    "plain": 50,
    "permuted": 12,
    "flat": 7,
    "aliased": 7,
    "member": 6,
    "part": 4,
    "half": 3,
    "scaled": 5,
    "copied": 4,
    "detached": 3,
    "strided": 5,
    "overlapping": 1,
}


def weight(g: Sketch, shape: Sequence[int], scale: float | None = None) -> str:
    """An expression of a weight of a shape; new attributes, or one that is there already."""
    tied = [name for name, own in g.weights.items() if own == tuple(shape)]
    if tied and g.chance(0.3):
        return f"self.{g.rng.choice(tied)}"
    turned = [name for name, own in g.weights.items() if sorted(own) == sorted(shape)]
    if turned and g.chance(0.15):
        name = g.rng.choice(turned)
        order = _order(g.weights[name], shape)
        return f"self.{name}.permute({', '.join(map(str, order))})"
    form = g.rng.choices(list(_FORMS), list(_FORMS.values()))[0]
    expression = _weight_of(g, form, list(shape), scale or 0.5)
    if g.chance(0.2):
        return g.let(expression)
    return expression


def _order(have: Sequence[int], want: Sequence[int]) -> list[int]:
    left = list(range(len(have)))
    order = []
    for size in want:
        at = next(one for one in left if have[one] == size)
        left.remove(at)
        order.append(at)
    return order


def stored(g: Sketch, shape: Sequence[int], value: str = "", kind: str = "") -> str:
    """A new attribute of a shape; its name."""
    name = g.new("w")
    sizes = ", ".join(map(str, shape))
    value = value or (f"torch.randn({sizes}) * 0.5" if sizes else "torch.tensor(0.7)")
    kind = kind or g.rng.choices(["parameter", "buffer", "frozen"], [55, 30, 15])[0]
    g.attribute(name, _statement(name, value, kind))
    g.weights[name] = tuple(shape)
    return name


def _statement(name: str, value: str, kind: str) -> str:
    if kind == "buffer":
        return f'self.register_buffer("{name}", {value})'
    more = ", requires_grad=False" if kind == "frozen" else ""
    return f"self.{name} = nn.Parameter({value}{more})"


def _weight_of(g: Sketch, form: str, shape: list[int], scale: float) -> str:
    rank = len(shape)
    order = list(range(rank))
    g.rng.shuffle(order)
    back = ", ".join(str(order.index(dim)) for dim in range(rank))
    turned = [shape[dim] for dim in order]
    sizes = ", ".join(map(str, shape))
    total = 1
    for size in shape:
        total *= size
    if form == "permuted":
        if rank >= 2 and g.chance(0.5):
            turned = [*shape[:-2], shape[-1], shape[-2]]
            name = stored(g, turned)
            return f"self.{name}.{g.pick('mT', 'transpose(-1, -2)', 'transpose(-2, -1)')}"
        return f"self.{stored(g, turned)}.permute({back})"
    if form == "flat":
        how = g.pick("view", "reshape")
        return f"self.{stored(g, [total])}.{how}({sizes})"
    if form == "aliased":
        name = stored(g, shape, kind=g.pick("buffer", "buffer", "frozen"))
        other = g.new("w")
        view = g.pick("view(-1)", "detach()", "view(-1)[1:]", "transpose(0, -1)")
        g.attribute(other, f'self.register_buffer("{other}", self.{name}.{view})')
        g.weights[other] = tuple(getattr(g.module, other).shape)
        return f"self.{name}"
    if form == "member":
        name = stored(g, [2, *shape])
        return f"self.{name}{g.pick('[0]', '[1]', '.select(0, 1)', '.unbind()[0]')}"
    if form == "part":
        dim = g.rng.randrange(rank)
        wider = list(shape)
        wider[dim] *= 2
        name = stored(g, wider)
        start = g.pick(0, shape[dim])
        return g.pick(
            f"self.{name}.chunk(2, {dim})[{min(1, start)}]",
            f"self.{name}.narrow({dim}, {start}, {shape[dim]})",
        )
    if form == "half":
        name = stored(g, shape, f"(torch.randn({sizes}) * 0.5).bfloat16()")
        return f"self.{name}.float()"
    if form == "scaled":
        name = stored(g, shape)
        gain = stored(g, [shape[0], *[1] * (rank - 1)])
        return g.pick(f"(self.{name} * self.{gain})", f"(self.{name} * 0.5)", f"self.{name}.tanh()")
    if form == "copied":
        return f"self.{stored(g, shape)}.{g.pick('clone()', 'contiguous()', 'to(torch.float32)')}"
    if form == "detached":
        return f"self.{stored(g, shape)}.detach()"
    if form == "strided":
        value = f"(torch.randn({', '.join(map(str, turned))}) * 0.5).permute({back})"
        return f"self.{stored(g, shape, value)}"
    if form == "overlapping":
        if rank < 2:
            raise RefusedError("needs two dims")
        name = stored(g, [total])
        strides = [shape[-1]] * (rank - 1) + [1]
        return f"self.{name}.as_strided(({sizes}), ({', '.join(map(str, strides))}))"
    return f"self.{stored(g, shape)}"


def dense(g: Sketch, pattern: tuple[int, int, int, int]) -> str:
    """The name of a frozen dense matrix whose values have a pattern."""
    known = [name for name, own in g.frozen.items() if own == pattern]
    if known and g.chance(0.3):
        return g.rng.choice(known)
    name = g.new("f")
    shape = ", ".join(map(str, pattern))
    value = f"chain_to_dense([torch.randn({shape}) * 0.5])"
    if g.chance(0.1):
        value += ".T.contiguous().T"  # stored column by column
    g.attribute(name, _statement(name, value, g.pick("buffer", "frozen")))
    g.frozen[name] = pattern
    return name
