"""Products by dense matrices that are Kronecker-sparse, by low-rank pairs, and by modules."""

from __future__ import annotations

from .operands import Operand, flat, spelling
from .sketch import ROWS, RefusedError, Sketch
from .weights import dense, weight


def by_matrix(g: Sketch, x: Operand, matrix: str, name: str) -> str:
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
    return by_matrix(g, x, matrix, "block_diag")


@spelling(3)
def frozen(g: Sketch, x: Operand) -> str:
    """A dense matrix whose values are Kronecker-sparse."""
    if x.a * x.d == 1:
        raise RefusedError("dense")
    if g.chance(0.25) and x.inputs % ROWS:
        name = dense(g, (x.a, x.c, x.b, x.d))
        return g.let(f"{flat(g, x)} @ self.{name}", "frozen")
    if g.chance(0.15):
        matrix = f"self.{dense(g, (x.a, x.c, x.b, x.d))}.T"
    else:
        matrix = f"self.{dense(g, (x.a, x.b, x.c, x.d))}"
    if g.chance(0.15):
        matrix = g.let(matrix + g.pick(".detach()", f".view_as({matrix})", ""))
    return by_matrix(g, x, matrix, "frozen")


@spelling(3)
def masked(g: Sketch, x: Operand) -> str:
    """A dense weight times a mask that is Kronecker-sparse."""
    if x.a * x.d == 1:
        raise RefusedError("dense")
    mask = g.new("m")
    ones = f"chain_to_dense([torch.ones({x.a}, {x.b}, {x.c}, {x.d})])"
    is_bool = g.chance(0.4)
    g.attribute(mask, f'self.register_buffer("{mask}", {ones}{" > 0" if is_bool else ""})')
    own, mask = weight(g, [x.outputs, x.inputs]), f"self.{mask}"
    if is_bool:
        form = g.pick(
            "torch.where({m}, {w}, 0.0)",
            "torch.where({m}, {w}, torch.zeros_like({w}))",
            "{w}.masked_fill(~{m}, 0.0)",
            "{w}.masked_fill({m} == False, 0)",
            "{w} * {m}",
        )
    else:
        form = g.pick("({w} * {m})", "({m} * {w})", "torch.mul({w}, {m})", "({w} * {m} * 0.5)")
    both = form.format(m=mask, w=own)
    if g.chance(0.3):
        both = g.let(both)
    elif "@" not in both:
        both = f"({both})"
    return by_matrix(g, x, both, "masked")


@spelling(2)
def created_in_forward(g: Sketch, x: Operand) -> str:
    """A block-diagonal matrix by kron or diag_embed."""
    if x.a > 1 and x.d == 1 and g.chance(0.5):
        matrix = f"torch.kron(torch.eye({x.a}), {weight(g, [x.b, x.c])})"
        return by_matrix(g, x, matrix, "kron")
    if x.a == 1 and x.d > 1:
        matrix = f"torch.kron({weight(g, [x.b, x.c])}, torch.eye({x.d}))"
        return by_matrix(g, x, matrix, "kron")
    if x.d != 1 or x.a == 1:
        raise RefusedError("not so")
    own = weight(g, [x.a, x.b, x.c])
    blocks = f"torch.diag_embed({own}.permute(1, 2, 0))"  # [b, c, a, a]
    matrix = g.let(f"{blocks}.permute(2, 0, 3, 1).reshape({x.outputs}, {x.inputs})")
    return by_matrix(g, x, matrix, "diag_embed")


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
    again = [one for one, size in g.layers.items() if size == x.inputs]
    if again and g.chance(0.4):
        return g.let(f"self.{g.rng.choice(again)}({flat(g, x)})", "module")
    kinds = (
        "KSLinear",
        "KSLinear",
        "KSStacked",
        "Linear",
        "Sequential",
        "Conv1d",
        "pruned",
        "normed",
    )
    kind = g.pick(*kinds)
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
    elif kind == "pruned":
        ones = f"chain_to_dense([torch.ones({x.a}, {x.b}, {x.c}, {x.d})])"
        layer = f'prune.custom_from_mask(nn.Linear({x.inputs}, {x.outputs}), "weight", {ones})'
    elif kind == "normed":
        layer = f"weight_norm(nn.Linear({x.inputs}, {x.outputs}))"
    elif kind == "Conv1d":
        if len(x.lead) != 1 or x.d != 1:
            raise RefusedError("not so")
        layer = f"nn.Conv1d({x.inputs}, {x.outputs}, 1, groups={x.a}, bias={bias})"
        g.attribute(name, f"self.{name} = {layer}")
        return g.let(f"self.{name}({flat(g, x)}.unsqueeze(-1))", "module")
    g.attribute(name, f"self.{name} = {layer}")
    g.layers[name] = x.inputs
    return g.let(f"self.{name}({flat(g, x)})", "module")
