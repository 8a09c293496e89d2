"""Make a failing program smaller while it still fails: the reader should see nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .program import Block, Line, Program, Step

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, seconds: float = 120.0) -> Program:
    """The smallest known program that still fails.

    Args:
        program: one that fails.
        fails: whether a program fails in the same way.
        seconds: how long to try.
    """
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.monotonic() > end:
                return program
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _smaller(p: Program) -> Iterator[Program]:
    """Programs with a little less, the largest cuts first."""
    for at in range(len(p.calls)):
        if len(p.calls) > 1:
            yield replace(p, calls=p.calls[:at] + p.calls[at + 1 :])
    half = max(1, len(p.body) // 2)
    while half > 1:
        for at in range(0, len(p.body), half):
            yield replace(p, body=p.body[:at] + p.body[at + half :])
        half //= 2
    for body in _cut(p.body):
        yield replace(p, body=body)
    for at in range(len(p.returns)):
        if len(p.returns) > 1:
            yield replace(p, returns=p.returns[:at] + p.returns[at + 1 :])
    yield from _earlier_result(p)
    yield from _inlined(p)
    yield from _passed_on(p)
    for at, call in enumerate(p.calls):
        simpler = [
            replace(call, before=()),
            replace(call, between=()),
            replace(call, autocast=False),
            replace(call, batch=5),
            replace(call, mode="grad"),
        ]
        for one in simpler:
            if one != call:
                yield replace(p, calls=(*p.calls[:at], one, *p.calls[at + 1 :]))
    leaves = tuple(False for _ in p.leaves)
    if leaves != p.leaves:
        yield replace(p, leaves=leaves)
    if len(p.inputs) > 1:
        yield replace(p, inputs=p.inputs[:-1], leaves=p.leaves[:-1])
    for name, value in {
        "dynamic": None,
        "handover": "eager",
        "training": True,
        "finish": (),
    }.items():
        if getattr(p, name) != value:
            yield replace(p, **{name: value})


def _cut(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Steps without one of them, or with a block's body in its place, inner ones last."""
    for at, step in enumerate(steps):
        yield steps[:at] + steps[at + 1 :]
        if isinstance(step, Block) and not step.footer:
            yield (*steps[:at], *step.body, *steps[at + 1 :])
    for at, step in enumerate(steps):
        if isinstance(step, Block):
            for body in _cut(step.body):
                yield (*steps[:at], replace(step, body=body), *steps[at + 1 :])


def _earlier_result(p: Program) -> Iterator[Program]:
    """Return an earlier variable instead of the last one, and drop the statements behind it."""
    for at in range(len(p.body) - 1, 0, -1):
        step = p.body[at - 1]
        if isinstance(step, Line):
            name = re.match(r"(v\d+) = ", step.text)
            if name:
                yield replace(p, body=p.body[:at], returns=(name[1],))


def _passed_on(p: Program) -> Iterator[Program]:
    """A statement about one variable as that variable itself: ``v3 = v2``."""
    for at, step in enumerate(p.body):
        if not isinstance(step, Line):
            continue
        match = re.match(r"(v\d+) = ", step.text)
        if not match or re.fullmatch(r"v\d+ = \w+", step.text):
            continue
        for name in dict.fromkeys(re.findall(r"\b[vx]\d+\b", step.text[match.end() :])):
            line = Line(f"{match[1]} = {name}")
            yield replace(p, body=(*p.body[:at], line, *p.body[at + 1 :]))


def _inlined(p: Program) -> Iterator[Program]:
    """The program without a statement ``v3 = v2``: readers of v3 read v2."""
    for at, step in enumerate(p.body):
        match = re.fullmatch(r"(v\d+) = ([vx]\d+)", step.text) if isinstance(step, Line) else None
        if match:
            old, new = rf"\b{match[1]}\b", match[2]
            rest = tuple(_renamed(one, old, new) for one in p.body[at + 1 :])
            returns = tuple(re.sub(old, new, text) for text in p.returns)
            yield replace(p, body=(*p.body[:at], *rest), returns=returns)


def _renamed(step: Step, old: str, new: str) -> Step:
    if isinstance(step, Line):
        return replace(step, text=re.sub(old, new, step.text))
    return Block(
        re.sub(old, new, step.header),
        tuple(_renamed(one, old, new) for one in step.body),
        re.sub(old, new, step.footer),
    )
