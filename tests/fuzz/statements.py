"""Statements between products: movements, elementwise operations, writes in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .sketch import ROWS, RefusedError, Sketch, divisors, features, rank_of_features
from .weights import weight

Statement = Callable[[Sketch, str], str]
"""Writes a statement about a variable; returns the variable of the result."""


def moved(g: Sketch, name: str) -> str:
    """A view of a variable, or a copy of it in another order."""
    return g.let(movement(g, name))


def movement(g: Sketch, name: str) -> str:
    """An expression that moves a variable's elements, or takes some of them."""
    shape = g.shape(name)
    rank = len(shape)
    dim = g.rng.randrange(rank)
    size = shape[dim]
    end = rank_of_features(shape)
    options = [
        f"{name}.contiguous()",
        f"{name}.clone()",
        f"{name}.flatten({g.pick(0, 1, -2)})",
        f"{name}.unsqueeze({g.rng.randrange(-1, rank + 1)})",
        f"{name}.squeeze({g.rng.randrange(-1, rank)})",
        _reshaped(g, name, shape),
        _reshaped(g, name, shape),
    ]
    if rank >= 2:
        other = g.rng.randrange(rank)
        order = list(range(rank))
        g.rng.shuffle(order)
        options += [
            f"{name}.transpose({dim}, {other})",
            f"{name}.transpose({dim}, {other})",
            f"{name}.permute({', '.join(map(str, order))})",
            f"torch.permute({name}, ({', '.join(map(str, order))}))",
            f"{name}.mT",
            f"{name}.movedim({dim}, {other})",
        ]
    if end:
        total = features(shape)
        a = g.rng.choice(divisors(total))
        options += [
            f"{name}.reshape({g.sizes((*shape[: rank - end], a, total // a))})",
            f"{name}.reshape({g.sizes((*shape[: rank - end], total))})",
            f"{name}.unflatten(-1, ({_split(g, shape[-1])}))",
        ]
    if size % ROWS and size > 1:
        at = g.rng.randrange(size)
        half = size // 2
        options += [
            f"{name}.select({dim}, {at})",
            f"{name}.narrow({dim}, {g.rng.randrange(size - half + 1)}, {max(1, half)})",
            f"{name}.chunk(2, {dim})[{g.pick(0, 1)}]",
            f"{name}.split({max(1, half)}, {dim})[0]",
            f"{name}.unbind({dim})[{at}]",
            f"{name}[{', '.join([':'] * dim + [f'{g.pick(0, 1)}::2'])}]",
            f"{name}.flip({dim})",
            f"{name}.roll(1, {dim})",
            f"{name}.index_select({dim}, torch.tensor([{at}, 0]))",
        ]
    if rank <= 3:
        options.append(f"{name}.unsqueeze(-2).expand({g.sizes((*shape[:-1], 2, shape[-1]))})")
    same = [one for one in g.variables() if g.shape(one) == shape]
    two = f"[{name}, {g.rng.choice(same)}]"
    if rank <= 4:
        options += [
            f"torch.cat({two}, {g.pick(-1, dim)})",
            f"torch.stack({two}, {g.pick(-2, dim)})",
        ]
    return g.rng.choice(options)


def _split(g: Sketch, size: int) -> str:
    if size % ROWS == 0:
        raise RefusedError("a batch")
    one = g.rng.choice(divisors(size))
    return f"{one}, {g.pick(-1, size // one)}"


def _reshaped(g: Sketch, name: str, shape: Sequence[int]) -> str:
    """Two neighbours as one dim, or one as two."""
    sizes = list(shape)
    at = g.rng.randrange(len(sizes))
    if len(sizes) > 1 and g.chance(0.5):
        at = min(at, len(sizes) - 2)
        sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    elif sizes[at] % ROWS:
        one = g.rng.choice(divisors(sizes[at]))
        sizes[at : at + 1] = [one, sizes[at] // one]
    return f"{name}.{g.pick('view', 'reshape')}({g.sizes(sizes)})"


def elementwise(g: Sketch, name: str) -> str:
    """An activation, a bias, a residual, a normalisation, a cast, a sum."""
    shape = g.shape(name)
    last = shape[-1]
    options = [
        f"F.relu({name})",
        f"F.gelu({name})",
        f'F.gelu({name}, approximate="tanh")',
        f"F.silu({name})",
        f"torch.tanh({name})",
        f"{name}.sigmoid()",
        f"torch.softmax({name}, -1)",
        f"{name} * 0.5",
        f"{name} + 1",
        f"-{name}",
        f"1.5 - {name}",
        f"{name}.mean({g.pick(0, -1)}, keepdim=True)",
        f"{name}.sum({g.pick(0, -1)})",
        f"torch.where({name} > 0, {name}, 0.1 * {name})",
        f"F.dropout({name}, 0.5, False)",  # the draws depend on the order in memory
        f"{name}.float()",
        f"{name}.to(torch.bfloat16).to({name}.dtype)",
        f"{name}.detach()",
        f"{name}.detach()",
        f"{name}.masked_fill({name} > 1, 0.0)",
        f"{name} / {name}.shape[-1]",
        f"{name} * {name}.shape[0]",
    ]
    if last % ROWS:
        options += [
            f"{name} + {weight(g, [last])}",
            f"{name} * {weight(g, [last])}",
            f"F.layer_norm({name}, ({last},))",
            f"F.rms_norm({name}, ({last},), {weight(g, [last])})",
        ]
    same = [one for one in g.variables() if g.shape(one) == shape and one != name]
    if same:
        other = g.rng.choice(same)
        options += [f"{name} + {other}", f"{name} * {other}", f"{other} - {name}"] * 2
    return g.let(g.rng.choice(options))


def write(g: Sketch, target: str, shape: Sequence[int], others: Sequence[str]) -> str:
    """A statement that writes something in place, or a part of it.

    Args:
        g: of the module.
        target: an expression.
        shape: of the target.
        others: variables of the same shape.
    """
    part = target
    if shape and g.chance(0.35):
        part = g.pick(
            f"{target}[0]",
            f"{target}.view(-1)",
            f"{target}.flatten()[:2]",
            f"{target}.mT",
            f"{target}.detach()",
            f"{target}[..., :1]",
            f"{target}.select(-1, 0)",  # and not .data: neither autograd nor this test would notice
        )
    options = [
        f"{part}.mul_(2)",
        f"{part}.mul_(-0.5)",
        f"{part}.add_(1)",
        f"{part}.zero_()",
        f"{part}.fill_(0.25)",
        f"{part}.neg_()",
        f"{part}.clamp_(-0.5, 0.5)",
        f"torch.mul({part}, 3, out={part})",
        f"F.relu({part}, inplace=True)",
        f"torch.relu_({part})",
        f"{part}.tanh_()",
    ]
    if shape:
        options += [f"{target}[0] = 0.5", f"{target}[..., 0] *= 3", f"{target}[..., :1] += 1"]
    if part.isidentifier():
        options += [f"{part} *= 2", f"{part} += 1", f"{part} -= 0.5"]
    if others:
        other = g.rng.choice(list(others))
        options += [
            f"{target}.add_({other})",
            f"{target}.copy_({other})",
            f"torch.tanh({other}, out={target})",
            f"{target}[..., :1] = {other}[..., :1]",
        ]
    return g.rng.choice(options)
