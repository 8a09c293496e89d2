"""The calls of a random module, and the changes of its weights between two calls."""

from __future__ import annotations

from dataclasses import replace

import torch

from .program import Call, Program
from .sketch import Sketch

# Dynamo of torch 2.11 does not notice that a parameter requires gradients now, or no longer:
# torch.compile itself returns none then.
_RESET = "; torch._dynamo.reset()" if torch.__version__.startswith("2.11") else ""


def calls(g: Sketch, generated: Program) -> tuple[Call, ...]:
    """Two to four calls, the weights changed in between."""
    mode = g.rng.choices(["grad", "no_grad", "inference"], [65, 25, 10])[0]
    autocast = g.chance(0.1)
    batch = g.pick(1, 3, 5, 7, 8) if g.chance(0.97) else 0
    drawn = []
    for at in range(g.pick(1, 2, 2, 3)):
        if at and g.chance(0.5):
            batch = g.pick(1, 2, 3, 4, 7, 8, 13, 0) if g.chance(0.9) else batch
        if g.chance(0.1):
            mode = g.pick("grad", "no_grad", "inference")
        before = (_change(g, generated),) if at and g.chance(0.6) else ()
        drawn.append(Call(batch, mode, autocast, before))
    if g.chance(0.15):
        # The last one: where torch refuses the backward pass, nothing is called any more.
        drawn[-1] = replace(drawn[-1], between=(_write(g, generated),))
        return tuple(drawn)
    return tuple(drawn) + _exchanges(g, generated, drawn[-1])


def _write(g: Sketch, generated: Program) -> str:
    """A statement that writes weights of the module ``m`` in place."""
    used = [name for name in (*g.weights, *g.frozen) if f"self.{name}" in generated.source()]
    if used and g.chance(0.7):
        return f"with torch.no_grad(): m.{g.rng.choice(used)}.mul_(0.5)"
    return "with torch.no_grad():\n    for p in m.parameters(): p.mul_(0.5)"


def _exchanges(g: Sketch, generated: Program, last: Call) -> tuple[Call, ...]:
    """Calls before which a frozen matrix is exchanged: one may lie where the last one lay."""
    frozen = [name for name in g.frozen if f"self.{name}" in generated.source()]
    if not frozen or not g.chance(0.25):
        return ()
    name = g.rng.choice(frozen)
    again, other = _frozen_values(g, generated, name)
    return tuple(
        replace(last, before=(f"del m.{name}; m.{name} = {value}",)) for value in (again, other) * 5
    )


def _frozen_values(g: Sketch, generated: Program, name: str) -> tuple[str, str]:
    """Expressions of a matrix in place of a frozen one: of its pattern, and dense."""
    shape = ", ".join(map(str, getattr(g.module, name).shape))
    pattern = ", ".join(map(str, g.frozen[name]))
    is_buffer = "register_buffer" in dict(generated.attributes)[name]
    form = "{}" if is_buffer else "nn.Parameter({}, requires_grad=False)"
    again = form.format(f"chain_to_dense([torch.randn({pattern})]) * 1")
    return again, form.format(f"torch.randn({shape})")


def _change(g: Sketch, generated: Program) -> str:
    """A statement about the module ``m`` between two calls."""
    source = generated.source()
    used = [name for name in g.weights if f"self.{name}" in source]
    frozen = [name for name in g.frozen if f"self.{name}" in source]
    general = [
        "m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()})",
        "m.eval()",
        "m.train()",
        f"m.requires_grad_(False){_RESET}",
        f"m.requires_grad_(True){_RESET}",
        "for p in m.parameters(): p.data.add_(0.1)\nksopt.refresh()",  # torch does not count it
        "with torch.no_grad():\n    for p in m.parameters(): p.mul_(0.9)",
    ]
    if frozen and g.chance(0.6):
        name = g.rng.choice(frozen)
        shape = ", ".join(map(str, getattr(g.module, name).shape))
        again, other = _frozen_values(g, generated, name)
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
        is_buffer = "register_buffer" in dict(generated.attributes)[name]
        new = f"torch.randn_like(m.{name})"
        if not is_buffer:
            new = f"nn.Parameter({new}, requires_grad=m.{name}.requires_grad)"
        return g.pick(
            f"with torch.no_grad(): m.{name}.mul_(0.5)",
            f"m.{name} = {new}",
            f"m.{name}.data = torch.randn_like(m.{name})",
            f"m.{name}.data.mul_(2); ksopt.refresh()",
            f"with torch.no_grad(): m.{name}.copy_(torch.randn_like(m.{name}))",
        )
    return g.rng.choice(general)
