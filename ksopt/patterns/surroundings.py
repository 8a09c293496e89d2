"""Surroundings of a layer in a model, which are computed and timed with it. Pure Python: no torch.

The search, `ksopt tune` and `ksopt bench kernels` have them as options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.patterns.validate import checked_int
from ksopt.system.option_fields import option, whole_number
from ksopt.system.suggest import nearest

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
"""Activations of an epilogue: `ksopt.epilogue.ACTIVATIONS`, which this must not import."""
GATES = tuple(f"{activation}_gate" for activation in ACTIVATIONS)
"""Gates of two layers: `ksopt.epilogue.GATES`."""
MOST_SIBLINGS = 4
_STEPS = {
    "bias": "a bias", "relu": "a ReLU", "gelu": "a GELU", "gelu_tanh": "a GELU (tanh)",
    "silu": "a SiLU", "relu_gate": "a ReLU gate", "gelu_gate": "a GELU gate",
    "gelu_tanh_gate": "a GELU (tanh) gate", "silu_gate": "a SiLU gate", "residual": "a residual",
}  # fmt: skip


def epilogue_option(group: str, default: str = "the default") -> Any:
    """The field of a command's options that is the epilogue.

    Args:
        group: Its group in the help.
        default: What the help calls no epilogue.
    """
    return option(
        (),
        f"what follows it, timed with it: bias, one of {', '.join(ACTIVATIONS)}, residual; of two "
        f"siblings, {', '.join(GATES)} too; or none ({default})",
        group,
        nargs="+",
        metavar="STEP",
    )


def siblings_option(group: str) -> Any:
    """The field of a command's options that is the number of layers on one input."""
    return option(
        1,
        "layers of this size that read one input, as an attention's q, k and v do; their results "
        "stand side by side (%(default)s)",
        group,
        parse=whole_number,
        metavar="COUNT",
    )


@dataclass(frozen=True)
class Surroundings:
    """The epilogue of a layer, and the number of layers on its input.

    Args:
        epilogue: Steps in their order: a bias, an activation or a gate, a residual.
        siblings: Number of layers of its size on its input, including itself.

    Example:
        >>> print(Surroundings(("bias", "gelu")))
        followed by a bias and a GELU
        >>> print(Surroundings(("bias",), siblings=3))
        3 on one input, followed by a bias
        >>> print(Surroundings())
        alone
    """

    epilogue: tuple[str, ...] = epilogue_option("the layer")
    siblings: int = siblings_option("the layer")

    @classmethod
    def checked(cls, epilogue: str | Sequence[str], siblings: int, call: str) -> Surroundings:
        """The surroundings that options name, their steps in order.

        Args:
            epilogue: Steps in any order; "none" alone is no step.
            siblings: 1 to `MOST_SIBLINGS`.
            call: What the options are of, for errors.

        Raises:
            InvalidInputError: A value is not allowed; the sentence states what is.

        Example:
            >>> Surroundings.checked(["gelu", "bias"], 1, "search").epilogue
            ('bias', 'gelu')
        """
        if checked_int(siblings, "siblings", call, minimum=1) > MOST_SIBLINGS:
            raise InvalidInputError(
                f"siblings {siblings}: at most {MOST_SIBLINGS} layers share an input"
            )
        steps = _in_order(epilogue)
        gates = [step for step in steps if step in GATES]
        if gates and siblings != 2:
            raise InvalidInputError(
                f"epilogue {gates[0]} multiplies the results of 2 layers on one input, and "
                f"siblings is {siblings}: it must be 2"
            )
        return cls(steps, siblings)

    def __str__(self) -> str:
        after = in_words(self.epilogue)
        parts = [f"{self.siblings} on one input"] if self.siblings > 1 else []
        return ", ".join([*parts, *([f"followed by {after}"] if after else [])]) or "alone"

    def is_alike(self, other: Surroundings) -> bool:
        """Whether layers are as fast in both: they differ in a bias at most.

        A launch adds a bias in passing, of a chain and of a dense layer.

        Example:
            >>> three = Surroundings(("bias",), siblings=3)
            >>> three.is_alike(Surroundings(siblings=3)), three.is_alike(Surroundings(("bias",)))
            (True, False)
        """
        return self.siblings == other.siblings and self._after_bias == other._after_bias

    @property
    def _after_bias(self) -> tuple[str, ...]:
        return tuple(step for step in self.epilogue if step != "bias")

    def to_json(self) -> dict[str, Any]:
        """The surroundings as JSON values, see `from_json`."""
        return {"epilogue": list(self.epilogue), "siblings": self.siblings}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Surroundings:
        """The inverse of `to_json`."""
        return cls(tuple(value["epilogue"]), value["siblings"])


ALONE = Surroundings()


def _in_order(epilogue: str | Sequence[str]) -> tuple[str, ...]:
    """The validated steps of an epilogue, in order."""
    words = (epilogue,) if isinstance(epilogue, str) else tuple(epilogue)
    if words == ("none",):
        return ()
    order = ("bias", *ACTIVATIONS, *GATES, "residual")
    unknown = [word for word in words if word not in order]
    if unknown:
        raise InvalidInputError(
            f"epilogue {unknown[0]!r} is unknown: it can be {', '.join(order[:-1])} or residual"
            f"{nearest(unknown[0], order)}"
        )
    activations = [word for word in words if word not in ("bias", "residual")]
    if len(activations) > 1 or len(set(words)) < len(words):
        raise InvalidInputError(
            f"epilogue {' '.join(words)}: name each step once, and at most one activation"
        )
    return tuple(sorted(words, key=order.index))


def in_words(epilogue: Sequence[str]) -> str:
    """An epilogue as a phrase; empty if it has no steps.

    Example:
        >>> in_words(("bias", "gelu", "residual"))
        'a bias, a GELU and a residual'
    """
    *first, last = [_STEPS[step] for step in epilogue] or [""]
    return f"{', '.join(first)} and {last}" if first else last
