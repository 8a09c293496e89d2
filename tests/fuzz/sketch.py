"""A module under construction: every statement is run at once, so that all shapes are known.

The batch is a prime that is no number of features: a dim that it divides is a batch.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .program import HEADER, Line, Step

ROWS = 97
MOST_ELEMENTS = ROWS * 400
_GLOBALS: dict[str, Any] = {}


class RefusedError(Exception):
    """A statement does not run, or its result is too large."""


class Sketch:
    """What has been written so far, and the values of its variables.

    Args:
        rng: draws everything.
        dtype: of inputs and parameters.

    Attributes:
        steps: the statements.
        attributes: name -> statement that makes it.
        values: of the variables in scope.
        weights: names of attributes that are weights: their sizes.
        layers: names of modules: how many features they take.
        frozen: names of attributes that hold dense Kronecker-sparse matrices: their patterns.
    """

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        if not _GLOBALS:
            exec(HEADER, _GLOBALS)
        self.rng = rng
        self.dtype = dtype
        self.module = nn.Module()
        self.steps: list[Step] = []
        self.attributes: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.frozen: dict[str, tuple[int, int, int, int]] = {}
        self.weights: dict[str, tuple[int, ...]] = {}
        self.layers: dict[str, int] = {}
        self._names = 0

    def new(self, letter: str = "v") -> str:
        self._names += 1
        return f"{letter}{self._names}"

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def evaluate(self, expression: str) -> Any:
        return eval(expression, {**_GLOBALS, "self": self.module}, dict(self.values))

    def add(self, text: str, spelling: str = "") -> None:
        """Write a statement.

        Raises:
            RefusedError: it does not run.
        """
        scope = {**_GLOBALS, **self.values, "self": self.module}
        known = set(scope)
        try:
            exec(text, scope)
        except Exception as error:
            raise RefusedError(str(error)) from error
        changed = {
            name: value
            for name, value in scope.items()
            if isinstance(value, Tensor | tuple | list)
            and (name not in known or value is not self.values.get(name))
            and name not in _GLOBALS
        }
        for value in changed.values():
            if isinstance(value, Tensor) and value.numel() > MOST_ELEMENTS:
                raise RefusedError("too large")
        self.values.update(changed)
        self.steps.append(Line(text, spelling))

    def let(self, expression: str, spelling: str = "") -> str:
        """Write an assignment to a new variable, and return its name."""
        name = self.new()
        self.add(f"{name} = {expression}", spelling)
        return name

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """What is refused inside leaves nothing behind."""
        steps, values = len(self.steps), dict(self.values)
        attributes = tuple(map(dict, (self.attributes, self.frozen, self.weights, self.layers)))
        try:
            yield
        except RefusedError:
            del self.steps[steps:]
            self.values = values
            self.attributes, self.frozen, self.weights, self.layers = attributes

    def attribute(self, name: str, text: str) -> None:
        """Write a statement of ``__init__`` that makes an attribute."""
        scope = {**_GLOBALS, "self": self.module}
        exec(text, scope)
        self.attributes[name] = text
        own = getattr(self.module, name)
        if self.dtype is torch.float32:
            return
        if isinstance(own, nn.Module):
            own.to(self.dtype)
        elif isinstance(own, Tensor):
            own.data = own.data.to(self.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def size(self, number: int, of: str = "") -> str:
        """A size as the author would write it."""
        if number % ROWS:
            return str(number)
        times = number // ROWS
        if times == 0:
            return "0"
        n = self.pick("n", "x0.shape[0]", "x0.size(0)") if self.chance(0.3) else "n"
        return n if times == 1 else f"{times} * {n}"

    def sizes(self, numbers: Sequence[int], minus: float = 0.6) -> str:
        """Sizes separated by commas; a batch is -1 at times."""
        texts = [self.size(number) for number in numbers]
        batches = [at for at, number in enumerate(numbers) if number % ROWS == 0]
        if batches and self.chance(minus):
            texts[self.pick(*batches)] = "-1"
        return ", ".join(texts)

    def variables(self) -> list[str]:
        """Floating-point tensors in scope, the latest last."""
        return [
            name
            for name, value in self.values.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        ]


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def features(shape: Sequence[int]) -> int:
    """The last dims that are no batch, multiplied."""
    total = 1
    for size in reversed(shape):
        if size % ROWS == 0:
            break
        total *= size
    return total


def rank_of_features(shape: Sequence[int]) -> int:
    """How many last dims are no batch."""
    count = 0
    for size in reversed(shape):
        if size % ROWS == 0:
            break
        count += 1
    return count


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)
