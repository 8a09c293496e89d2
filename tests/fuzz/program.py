"""A random program: a module with its inputs and calls, as data that can be cut and as source."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HEADER = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import ksopt
from ksopt import KSLinear, KSStacked, ops
from ksopt.reference import chain_to_dense
"""


@dataclass(frozen=True)
class Line:
    """A statement of one line or more.

    Args:
        text: its source.
        spelling: how it writes a product; empty if it is none.
    """

    text: str
    spelling: str = ""


@dataclass(frozen=True)
class Block:
    """Statements under a header, such as ``with torch.no_grad():``.

    Args:
        header: a line that opens the block.
        body: what stands in it.
        footer: lines behind it, not indented.
    """

    header: str
    body: tuple[Line | Block, ...]
    footer: str = ""


Step = Line | Block


@dataclass(frozen=True)
class Call:
    """One call of the module.

    Args:
        batch: rows of the inputs.
        mode: "grad", "no_grad" or "inference".
        autocast: whether it is under autocast to bfloat16.
        before: statements about the module ``m``, run first.
        between: statements about it that run between the forward and the backward pass.
    """

    batch: int = 5
    mode: str = "grad"
    autocast: bool = False
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A module, its inputs, and how it is called.

    Args:
        seed: what it was made from.
        attributes: name and statements that set it in ``__init__``, in order.
        body: of ``forward``.
        returns: expressions; more than one are a tuple.
        inputs: expressions of the inputs, ``B`` for the batch.
        leaves: for each input, whether a gradient is asked for.
        calls: one after the other.
        dynamic: None, True, False or "mark".
        handover: what runs the rewritten graph: "eager", "aot_eager" or "inductor".
        training: whether the module is in training mode.
        finish: the last statements of ``__init__``.
    """

    seed: int
    attributes: tuple[tuple[str, str], ...] = ()
    body: tuple[Step, ...] = ()
    returns: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    leaves: tuple[bool, ...] = ()
    calls: tuple[Call, ...] = (Call(),)
    dynamic: bool | str | None = None
    handover: str = "eager"
    training: bool = True
    finish: tuple[str, ...] = ()

    def source(self) -> str:
        """Python source of a module of everything that `tests.fuzz.comparison` needs."""
        return _Writer(self).text

    def spellings(self) -> dict[int, str]:
        """The line numbers of products, and how they are written."""
        return _Writer(self).spelling_of


class _Writer:
    def __init__(self, program: Program) -> None:
        self.lines: list[str] = []
        self.spelling_of: dict[int, str] = {}
        self._write(program)
        self.text = "\n".join(self.lines) + "\n"

    def _write(self, p: Program) -> None:
        self.add(HEADER, 0)
        self.add("\n\nclass M(nn.Module):", 0)
        self.add("def __init__(self):", 1)
        self.add("super().__init__()", 2)
        used = _mentioned(p)
        for name, text in p.attributes:
            if name in used:
                self.add(text, 2)
        for text in p.finish:
            self.add(text, 2)
        names = [f"x{at}" for at in range(len(p.inputs))]
        self.add(f"\ndef forward(self, {', '.join(names)}):", 1)
        self.add("n = x0.shape[0]", 2)
        for step in p.body:
            self.step(step, 2)
        values = ", ".join(p.returns)
        self.add(f"return ({values},)" if len(p.returns) == 1 else f"return {values}", 2)
        self.add("\n\ndef inputs(B):", 0)
        self.add(f"return [{', '.join(p.inputs)}]", 1)
        self.add(f"\n\nLEAVES = {list(p.leaves)}", 0)
        self.add("CALLS = [", 0)
        for call in p.calls:
            self.add(f"dict(batch={call.batch}, mode={call.mode!r}, autocast={call.autocast},", 1)
            self.add(f"     before={list(call.before)!r}, between={list(call.between)!r}),", 1)
        self.add("]", 0)
        self.add(f"DYNAMIC = {p.dynamic!r}", 0)
        self.add(f"HANDOVER = {p.handover!r}", 0)
        self.add(f"TRAINING = {p.training}", 0)

    def add(self, text: str, depth: int) -> None:
        self.lines += ["    " * depth + line if line else "" for line in text.split("\n")]

    def step(self, step: Step, depth: int) -> None:
        if isinstance(step, Line):
            for at in range(step.text.count("\n") + 1):
                if step.spelling:
                    self.spelling_of[len(self.lines) + at + 1] = step.spelling
            self.add(step.text, depth)
            return
        self.add(step.header, depth)
        for inner in step.body:
            self.step(inner, depth + 1)
        if not step.body:
            self.add("pass", depth + 1)
        if step.footer:
            self.add(step.footer, depth)


def texts(steps: tuple[Step, ...]) -> Iterator[str]:
    """All source text of steps."""
    for step in steps:
        if isinstance(step, Line):
            yield step.text
        else:
            yield from (step.header, step.footer)
            yield from texts(step.body)


def _mentioned(p: Program) -> set[str]:
    """The attributes that the body needs, and those that these need."""
    around = [text for call in p.calls for text in (*call.before, *call.between)]
    everything = " ".join([*texts(p.body), *p.returns, *p.finish, *around])
    needed: set[str] = set()
    statements = dict(p.attributes)
    todo = [name for name in statements if re.search(rf"\b(self|m)\.{name}\b", everything)]
    while todo:
        name = todo.pop()
        if name in needed:
            continue
        needed.add(name)
        todo += [o for o in statements if re.search(rf"\bself\.{o}\b", statements[name])]
    return needed


@dataclass
class Built:
    """A program's source, run.

    Attributes:
        name: of the "file" that it is in; the stack traces of graphs have it.
        namespace: what it defines.
    """

    name: str
    namespace: dict[str, Any] = field(default_factory=dict)


def build(source: str, name: str) -> Built:
    """Run source so that tracebacks and Dynamo can read it.

    Raises:
        Exception: whatever it raises.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    built = Built(name, {"__name__": "fuzzed"})
    exec(compile(source, name, "exec"), built.namespace)
    return built
