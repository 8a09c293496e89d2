"""Every way in which an author may write a product by a Kronecker-sparse weight."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass

from .sketch import ROWS, RefusedError, Sketch, divisors, features, rank_of_features
from .weights import dense, stored, weight


@dataclass(frozen=True)
class Operand:
    """An input of a product.

    Args:
        name: the variable.
        lead: its dims that are not features.
        a, b, c, d: the pattern that it is multiplied by; its features are a*c*d.
    """

    name: str
    lead: tuple[int, ...]
    a: int
    b: int
    c: int
    d: int

    @property
    def inputs(self) -> int:
        return self.a * self.c * self.d

    @property
    def outputs(self) -> int:
        return self.a * self.b * self.d


Spelling = Callable[[Sketch, Operand], str]
"""Writes statements; returns the variable of the result."""

SPELLINGS: dict[str, tuple[Spelling, float]] = {}
"""name -> how it is written, and how often compared with the others."""


def spelling(share: float = 1.0) -> Callable[[Spelling], Spelling]:
    def register(function: Spelling) -> Spelling:
        SPELLINGS[function.__name__] = (function, share)
        return function

    return register


def product(g: Sketch, name: str) -> str:
    """Multiply a variable, one way or another.

    Raises:
        RefusedError: that way does not fit it.
    """
    shape = g.shape(name)
    total = features(shape)
    if total < 2 or total > 96:
        raise RefusedError("too few features, or too many")
    lead = shape[: len(shape) - rank_of_features(shape)]
    a = g.rng.choice(divisors(total)[1:] if g.chance(0.85) else divisors(total))
    d = g.rng.choice(divisors(total // a)) if g.chance(0.35) else 1
    b = g.pick(1, 2, 3, 4, 5, 6, 8)
    if a * b * d > 96:
        raise RefusedError("too many features")
    names = list(SPELLINGS)
    which = g.rng.choices(names, [SPELLINGS[one][1] for one in names])[0]
    return SPELLINGS[which][0](g, Operand(name, lead, a, b, total // (a * d), d))


def groups(g: Sketch, x: Operand, *sizes: int) -> str:
    """An expression of x as [*lead, *sizes]."""
    if g.shape(x.name) == (*x.lead, *sizes) and g.chance(0.8):
        return x.name
    flat = len(g.shape(x.name)) == len(x.lead) + 1
    texts = ", ".join(map(str, sizes))
    if flat and g.chance(0.3):
        return f"{x.name}.unflatten(-1, ({texts}))"
    how = g.pick("view", "reshape", "reshape")
    return f"{x.name}.{how}({g.sizes((*x.lead, *sizes))})"


def rows(g: Sketch, x: Operand, *sizes: int) -> str:
    """An expression of x as [-1, *sizes]."""
    if len(x.lead) == 1:
        return groups(g, x, *sizes)
    return f"{x.name}.reshape(-1, {', '.join(map(str, sizes))})"


def flat(g: Sketch, x: Operand) -> str:
    """An expression of x as [*lead, features]."""
    if g.shape(x.name) == (*x.lead, x.inputs):
        return x.name
    if x.lead and g.chance(0.4):
        return f"{x.name}.flatten({len(x.lead)})"
    return groups(g, x, x.inputs)


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


@spelling(4)
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


@spelling(1)
def slices_written(g: Sketch, x: Operand) -> str:
    """One block after the other, written into a tensor."""
    if x.d != 1 or x.a < 2 or x.a > 6:
        raise RefusedError("not so")
    t = flat(g, x)
    y = g.let(f"{x.name}.new_{g.pick('zeros', 'empty')}({g.sizes((*x.lead, x.a * x.b), 0)})")
    for at in range(x.a):
        piece = f"{t}[..., {x.c * at}:{x.c * at + x.c}]"
        g.add(
            f"{y}[..., {x.b * at}:{x.b * at + x.b}] = {piece} @ {weight(g, [x.c, x.b])}",
            "slices_written",
        )
    return y


def _by_matrix(g: Sketch, x: Operand, matrix: str, name: str) -> str:
    """x by the transpose of a matrix [outputs, inputs]."""
    t = flat(g, x)
    if g.chance(0.3):
        bias = weight(g, [x.outputs])
        return g.let(f"F.linear({t}, {matrix}, {bias})", name)
    if len(x.lead) == 1 and g.chance(0.2):
        bias = weight(g, [x.outputs])
        return g.let(f"torch.addmm({bias}, {t}, {matrix}.T)", name)
    form = g.pick("F.linear({}, {})", "{} @ {}.T", "torch.matmul({}, {}.t())")
    return g.let(form.format(t, matrix), name)


@spelling(2)
def block_diag(g: Sketch, x: Operand) -> str:
    if x.d != 1 or not 2 <= x.a <= 6:
        raise RefusedError("not so")
    if g.chance(0.4):
        blocks = f"*{weight(g, [x.a, x.b, x.c])}"
    else:
        blocks = ", ".join(weight(g, [x.b, x.c]) for _ in range(x.a))
    matrix = f"torch.block_diag({blocks})"
    if g.chance(0.3):
        matrix = g.let(matrix)
    return _by_matrix(g, x, matrix, "block_diag")


@spelling(3)
def frozen(g: Sketch, x: Operand) -> str:
    """A dense matrix whose values are Kronecker-sparse."""
    if x.a * x.d == 1:
        raise RefusedError("dense")
    if g.chance(0.25) and x.inputs % ROWS:
        name = dense(g, (x.a, x.c, x.b, x.d))
        return g.let(f"{flat(g, x)} @ self.{name}", "frozen")
    matrix = f"self.{dense(g, (x.a, x.b, x.c, x.d))}"
    if g.chance(0.15):
        matrix = g.let(matrix + g.pick(".detach()", f".view_as({matrix})", ""))
    return _by_matrix(g, x, matrix, "frozen")


@spelling(1)
def masked(g: Sketch, x: Operand) -> str:
    """A dense weight times a mask that is Kronecker-sparse."""
    if x.a * x.d == 1:
        raise RefusedError("dense")
    mask = g.new("m")
    shape = f"{x.a}, {x.b}, {x.c}, {x.d}"
    g.attribute(mask, f'self.register_buffer("{mask}", chain_to_dense([torch.ones({shape})]))')
    own = weight(g, [x.outputs, x.inputs])
    both = g.pick(f"({own} * self.{mask})", f"(self.{mask} * {own})")
    if g.chance(0.3):
        both = g.let(both)
    return _by_matrix(g, x, both, "masked")


@spelling(1)
def made_in_forward(g: Sketch, x: Operand) -> str:
    """A block-diagonal matrix by kron or diag_embed."""
    if x.a > 1 and x.d == 1 and g.chance(0.5):
        matrix = f"torch.kron(torch.eye({x.a}), {weight(g, [x.b, x.c])})"
        return _by_matrix(g, x, matrix, "kron")
    if x.a == 1 and x.d > 1:
        matrix = f"torch.kron({weight(g, [x.b, x.c])}, torch.eye({x.d}))"
        return _by_matrix(g, x, matrix, "kron")
    if x.d != 1 or x.a == 1:
        raise RefusedError("not so")
    own = weight(g, [x.a, x.b, x.c])
    blocks = f"torch.diag_embed({own}.permute(1, 2, 0))"  # [b, c, a, a]
    matrix = g.let(f"{blocks}.permute(2, 0, 3, 1).reshape({x.outputs}, {x.inputs})")
    return _by_matrix(g, x, matrix, "diag_embed")


@spelling(3)
def low_rank(g: Sketch, x: Operand) -> str:
    inputs, outputs = x.inputs, g.pick(4, 6, 8, 12, 16)
    rank = g.pick(1, 1, 2, 3)
    t = flat(g, x)
    down, up = weight(g, [rank, inputs]), weight(g, [outputs, rank])
    bias = f", {weight(g, [outputs])}" if g.chance(0.3) else ""
    form = g.pick("linear", "matmul", "tensordot", "einsum")
    if form == "linear":
        z = g.let(f"F.linear({t}, {down})", "low_rank")
        return g.let(f"F.linear({z}, {up}{bias})", "low_rank")
    if form == "matmul":
        if g.chance(0.5):
            return g.let(f"{t} @ {down}.T @ {up}.T", "low_rank")
        z = g.let(f"{t} @ {down}.t()", "low_rank")
        if bias and len(x.lead) == 1:
            return g.let(f"torch.addmm({bias[2:]}, {z}, {up}.t())", "low_rank")
        return g.let(f"torch.matmul({z}, {up}.mT)", "low_rank")
    if form == "tensordot":
        z = g.let(f"torch.tensordot({t}, {down}, dims=([-1], [1]))", "low_rank")
        return g.let(f"torch.tensordot({z}, {up}.T, dims=1)", "low_rank")
    return g.let(f'torch.einsum("...i,ri,or->...o", {t}, {down}, {up})', "low_rank")


@spelling(1)
def operator(g: Sketch, x: Operand) -> str:
    """ksopt's own operator, or function."""
    t, own = flat(g, x), weight(g, [x.a, x.b, x.c, x.d])
    bias = f", {weight(g, [x.outputs])}" if g.chance(0.3) else ""
    form = g.pick("ops.ks_mm({}, {})", f"ksopt.ks_linear({{}}, [{{}}]{bias})")
    return g.let(form.format(t, own), "ks_mm")


@spelling(2)
def module(g: Sketch, x: Operand) -> str:
    """A module of ksopt's or torch's."""
    name = g.new("layer")
    kind = g.pick("KSLinear", "KSStacked", "Linear", "Sequential", "Conv1d")
    chain = f'"({x.a},{x.b},{x.c},{x.d})"'
    bias = g.pick(True, False)
    layer = f"KSLinear({x.inputs}, {x.outputs}, {chain}, bias={bias})"
    if kind == "KSStacked":
        layer = f"KSStacked([{layer}, {layer}])"
    elif kind == "Linear":
        layer = f"nn.Linear({x.inputs}, {x.outputs}, bias={bias})"
    elif kind == "Sequential":
        layer = (
            f"nn.Sequential(nn.Linear({x.inputs}, 2, bias=False), nn.Linear(2, {x.outputs}), "
            f"{g.pick('nn.ReLU(inplace=True)', 'nn.GELU()', 'nn.Dropout(0.0)')})"
        )
    elif kind == "Conv1d":
        if len(x.lead) != 1 or x.d != 1:
            raise RefusedError("not so")
        layer = f"nn.Conv1d({x.inputs}, {x.outputs}, 1, groups={x.a}, bias={bias})"
        g.attribute(name, f"self.{name} = {layer}")
        return g.let(f"self.{name}({flat(g, x)}.unsqueeze(-1))", "module")
    g.attribute(name, f"self.{name} = {layer}")
    return g.let(f"self.{name}({flat(g, x)})", "module")
