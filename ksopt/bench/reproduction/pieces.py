"""The pieces of a run, each measured by itself on one device, and the order to begin them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ksopt.bench.reproduction import cases
from ksopt.bench.reproduction.catalogue import ENERGY, MODELS, PRODUCTS, SIZES
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.request import Subject as Product
from ksopt.patterns.chain import Chain


@dataclass(frozen=True)
class Piece:
    """The product of a pattern, its energy, or a module, in one dtype.

    Attributes:
        part: the part that it belongs to.
        name: the pattern's text, or the case's name.
    """

    part: Part
    name: str

    def __str__(self) -> str:
        return f"{self.part.name}: {self.name}"

    @property
    def is_product(self) -> bool:
        """Whether it multiplies by a pattern, for its time or its energy."""
        return self.part.kind in (PRODUCTS, ENERGY)

    def product(self, request: PaperRequest) -> Product:
        """The product of a pattern, as `ksopt bench kernels` names it."""
        return Product(Chain.parse(self.name), request.batch)


def pieces_of(part: Part) -> tuple[Piece, ...]:
    """All pieces of a part, in the order to measure them."""
    names = map(str, part.patterns) if part.patterns else cases.names(part.kind)
    return tuple(Piece(part, name) for name in names)


def in_turns(request: PaperRequest, left: Iterable[Piece]) -> list[Piece]:
    """The pieces in the order to begin them.

    Parts in the paper's dtypes come first, those in other dtypes after them. Of both the modules
    and models come first: a table lacks the cells of those that are left out. Then products and
    energies take turns, so that at any time each part has had the same share of its sample, which
    is in random order. Their results do not decide when the time is up.

    Args:
        request: of the run.
        left: the pieces that are not measured yet, those of a part in its order.
    """
    of_parts: dict[Part, list[Piece]] = {}
    for piece in left:
        of_parts.setdefault(piece.part, []).append(piece)
    keyed = [
        (request.is_extra(part), part.kind not in (MODELS, SIZES), _turn(place, own), number, piece)
        for number, (part, own) in enumerate(of_parts.items())
        for place, piece in enumerate(own)
    ]
    return [piece for *_, piece in sorted(keyed, key=lambda one: one[:-1])]


def _turn(place: int, own: Sequence[Piece]) -> float:
    """The share of a part that is measured once half of this piece is."""
    return (place + 0.5) / len(own)
