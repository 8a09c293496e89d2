"""Products by Kronecker-sparse weights as einsum, bmm, matmul, sums, convolutions and vmaps."""

from __future__ import annotations

import string

from .operands import Operand, flat, groups, rows, spelling
from .sketch import RefusedError, Sketch
from .weights import stored, weight


def _letters(g: Sketch) -> list[str]:
    letters = list(string.ascii_letters if g.chance(0.1) else "bgijkoprstuvwxyz")
    g.rng.shuffle(letters)
    return letters


def _shuffled(g: Sketch, letters: str) -> str:
    order = list(letters)
    g.rng.shuffle(order)
    return "".join(order)


@spelling(5)
def einsum(g: Sketch, x: Operand) -> str:
    """Any order of letters, an ellipsis, gains, masks, temperatures, two weights at once."""
    letters = _letters(g)
    lead = "".join(letters.pop() for _ in x.lead)
    i, l, j, k = (letters.pop() for _ in range(4))
    size = {i: x.a, l: x.c, j: x.d, k: x.b}
    if x.d == 1:
        j = ""
    if x.a == 1 and g.chance(0.7):
        i = ""
    sizes = [size[one] for one in (i, l, j) if one]
    dots = g.chance(0.25)
    left = ("..." if dots else lead) + i + l + j
    out = i + k + j if g.chance(0.7) else _shuffled(g, i + k + j)
    out = ("..." if dots else lead) + out
    if not dots and g.chance(0.25):
        out = _shuffled(g, out)
    order = _shuffled(g, i + k + l + j) if g.chance(0.5) else i + k + l + j
    operands = [(left, groups(g, x, *sizes)), (order, weight(g, [size[one] for one in order]))]
    if g.chance(0.2):
        own = "".join(one for one in order if g.chance(0.5))
        if own:
            operands.append((own, weight(g, [size[one] for one in own])))
        else:
            operands.append(("", g.pick("torch.tensor(0.5)", f"self.{stored(g, [])}")))
    if g.chance(0.08):
        more = letters.pop()
        size[more] = g.pick(2, 3, 4)
        out = out.replace(k, more)
        operands.append((_shuffled(g, i + k + more), ""))
        operands[-1] = (operands[-1][0], weight(g, [size[one] for one in operands[-1][0]]))
    if g.chance(0.3):
        g.rng.shuffle(operands)
    equation = ",".join(own for own, _ in operands)
    if g.chance(0.2):
        equation = equation.replace(",", ", ")
    values = ", ".join(value for _, value in operands)
    if g.chance(0.2):
        values = f"[{values}]"
    return g.let(f'torch.einsum("{equation}->{out}", {values})', "einsum")


@spelling(4)
def bmm(g: Sketch, x: Operand) -> str:
    a, c = x.a * x.d, x.c
    if x.d == 1:
        turn = g.pick("transpose(0, 1)", "permute(1, 0, 2)", "transpose(1, 0).contiguous()")
        t = f"{rows(g, x, a, c)}.{turn}"
    else:
        middle = g.let(f"{rows(g, x, x.a, x.c, x.d)}.permute(1, 3, 0, 2)")
        t = f"{middle}.reshape({a}, -1, {c})"
    if g.chance(0.6):
        t = g.let(t)
    right = weight(g, [a, c, x.b])
    if g.chance(0.25):
        bias = weight(g, g.pick([a, 1, x.b], [x.b], [1, x.b]))
        more = ", beta=0.5" if g.chance(0.1) else ""
        y = g.let(f"torch.baddbmm({bias}, {t}, {right}{more})", "baddbmm")
    else:
        form = g.pick("torch.bmm({}, {})", "{} @ {}", "torch.matmul({}, {})", "{}.bmm({})")
        y = g.let(form.format(t, right), "bmm")
    if g.chance(0.4):
        return y
    y = g.let(f"{y}.transpose(0, 1)") if g.chance(0.6) else f"{y}.permute(1, 0, 2)"
    return g.let(f"{y}.{g.pick(f'reshape(-1, {a * x.b})', 'flatten(1)')}")


@spelling(2)
def bmm_features_first(g: Sketch, x: Operand) -> str:
    if x.d != 1:
        raise RefusedError("d")
    t = f"{rows(g, x, x.a, x.c)}.permute(1, 2, 0)"
    y = g.let(f"torch.bmm({weight(g, [x.a, x.b, x.c])}, {t})", "bmm_features_first")
    return y if g.chance(0.5) else g.let(f"{y}.permute(2, 0, 1)")


@spelling(3)
def matmul(g: Sketch, x: Operand) -> str:
    """Batches of vectors by a batch of matrices, as rows or as columns."""
    if x.d == 1 and g.chance(0.5):
        y = g.let(f"{groups(g, x, x.a, 1, x.c)} @ {weight(g, [x.a, x.c, x.b])}", "matmul_rows")
        return y if g.chance(0.3) else g.let(f"{y}.squeeze(-2)")
    if x.d == 1 or g.chance(0.5):
        columns = groups(g, x, x.a, x.c, x.d)
        y = f"torch.matmul({weight(g, [x.a, x.b, x.c])}, {columns})"
        return g.let(y, "matmul_columns")
    t = f"{groups(g, x, x.a, x.c, x.d)}.transpose(-1, -2).unsqueeze(-2)"
    return g.let(f"({t} @ {weight(g, [x.a, x.d, x.c, x.b])}).squeeze(-2)", "matmul_rows")


@spelling(2)
def mul_sum(g: Sketch, x: Operand) -> str:
    tail = [x.d] if x.d > 1 else []
    t = groups(g, x, x.a, 1, x.c, *tail)
    dim = -1 - len(tail)
    both = [t, weight(g, [x.a, x.b, x.c, *tail])]
    g.rng.shuffle(both)
    y = f"({both[0]} * {both[1]})" if g.chance(0.7) else f"torch.mul({both[0]}, {both[1]})"
    if g.chance(0.3):
        y = g.let(y)
    keep = ", keepdim=True" if g.chance(0.15) else ""
    form = g.pick("{}.sum({}{})", "{}.sum(dim={}{})", "torch.sum({}, dim={}{})")
    return g.let(form.format(y, dim, keep), "mul_sum")


@spelling(2)
def convolution(g: Sketch, x: Operand) -> str:
    if x.d != 1:
        raise RefusedError("d")
    outs = x.a * x.b
    two = g.chance(0.3)
    bias = f", {weight(g, [outs])}" if g.chance(0.4) else ", None"
    own = weight(g, [outs, x.c, 1, 1] if two else [outs, x.c, 1])
    more = f"{bias}, 1, 0, 1, {x.a}" if g.chance(0.4) else f"{bias}, groups={x.a}"
    if len(x.lead) == 2 and not two:
        t = g.let(f"{flat(g, x)}.transpose(1, 2)")
        y = g.let(f"F.conv1d({t}, {own}{more})", "conv1d")
        return g.let(f"{y}.transpose(1, 2)") if g.chance(0.7) else y
    spread = "[:, :, None, None]" if two else "[:, :, None]"
    t = f"{rows(g, x, x.inputs)}{spread}"
    y = g.let(f"F.conv{2 if two else 1}d({t}, {own}{more})", "conv2d" if two else "conv1d")
    return g.let(f"{y}.flatten(1)") if g.chance(0.7) else y


@spelling(2)
def vmap_linear(g: Sketch, x: Operand) -> str:
    if x.d != 1:
        raise RefusedError("d")
    operands, dims = [rows(g, x, x.a, x.c), weight(g, [x.a, x.b, x.c])], ["1", "0"]
    if g.chance(0.4):
        each = g.chance(0.6)
        operands.append(weight(g, [x.a, x.b] if each else [x.b]))
        dims.append("0" if each else "None")
    out = g.pick(0, 1, 1, 1, 2)
    call = f"torch.vmap(F.linear, in_dims=({', '.join(dims)}), out_dims={out})"
    return g.let(f"{call}({', '.join(operands)})", "vmap_linear")
