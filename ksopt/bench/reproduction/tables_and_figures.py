"""The tables and figures of the paper that can be rerun, and the measurements each needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ksopt.errors import InvalidInputError

PRODUCTS, ENERGY, MODELS, SIZES = "products", "energy", "modules", "sizes"


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        kind: "table" or "figure".
        number: in the paper.
        title: of the table or figure.
        needs: the measurements that it shows: products, energy, modules or sizes.
        dtypes: of the paper.
        section: of the paper that prints it.
        twins: numbers of the same table or figure in the paper's other dtype.
    """

    kind: str
    number: int
    title: str
    needs: str
    dtypes: tuple[str, ...]
    section: str
    twins: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name, such as "Table 3"."""
        return f"{self.kind.title()} {self.number}"


_FP32, _FP16 = ("float32",), ("float16",)
_REWRITING = "Share of the time of bmm that is memory rewriting"
_SPEEDUP = "Speed-up of kernel over min(bmm, einsum, bsr)"
_SPECIAL = "Speed-up of min(kernel, bmm, bsr, einsum) over min(dense, sparse), by matrix size"
_BMM = "Speed-up of bmm over min(einsum, bsr), by matrix size"
_LAYOUT = "Time of batch-size-first over time of batch-size-last"
ITEMS = (
    Item("table", 3, "Who is faster, the best of both layouts", PRODUCTS, _FP32, "section 5", (8,)),
    Item("table", 4, "Submodules of a ViT-S/16, the whole, GPT-2 medium", MODELS, _FP32,
         "section 6"),
    Item("table", 5, "How often kernel wins, by layout", PRODUCTS, _FP32, "appendix B.5"),
    Item("table", 6, "Time in linear layers by size of the ViT", SIZES, ("float16", "float32"),
         "appendix B.6"),
    Item("table", 7, "Single layers of a ViT-S/16", MODELS, _FP32, "appendix B.7"),
    Item("table", 8, "Table 3 in half precision", PRODUCTS, _FP16, "appendix B.8", (3,)),
    Item("figure", 4, f"{_REWRITING}, batch-size-first", PRODUCTS, _FP32, "section 3", (14,)),
    Item("figure", 6, _SPEEDUP, PRODUCTS, _FP32, "section 5", (13,)),
    Item("figure", 7, "Energy of kernel over min(bmm, einsum, bsr)", ENERGY, _FP32, "section 5"),
    Item("figure", 9, f"{_REWRITING}, both layouts", PRODUCTS, _FP32, "appendix B.2", (14,)),
    Item("figure", 10, _SPECIAL, PRODUCTS, _FP32, "appendix B.3", (15,)),
    Item("figure", 11, _BMM, PRODUCTS, _FP32, "appendix B.4", (16,)),
    Item("figure", 12, _LAYOUT, PRODUCTS, _FP32, "appendix B.5", (17,)),
    Item("figure", 13, f"{_SPEEDUP}, half precision", PRODUCTS, _FP16, "appendix B.8", (6,)),
    Item("figure", 14, f"{_REWRITING}, half precision", PRODUCTS, _FP16, "appendix B.8", (4, 9)),
    Item("figure", 15, f"{_SPECIAL}, half precision", PRODUCTS, _FP16, "appendix B.8", (10,)),
    Item("figure", 16, f"{_BMM}, half precision", PRODUCTS, _FP16, "appendix B.8", (11,)),
    Item("figure", 17, f"{_LAYOUT}, half precision", PRODUCTS, _FP16, "appendix B.8", (12,)),
)  # fmt: skip
_WITHOUT = {
    "table": "1 and 2 hold no measurement",
    "figure": "1, 2, 3, 5 and 8 show no measurement",
}


def items(tables: Sequence[int], figures: Sequence[int], is_all: bool) -> tuple[Item, ...]:
    """The requested tables and figures, in the paper's order.

    Raises:
        InvalidInputError: one cannot be rerun, or none is requested; the sentence lists those that
            exist.

    Example:
        >>> [item.name for item in items([5], [6], False)]
        ['Table 5', 'Figure 6']
    """
    requested = {("table", number) for number in tables} | {
        ("figure", number) for number in figures
    }
    known = {(item.kind, item.number) for item in ITEMS}
    for kind, number in sorted(requested - known):
        raise InvalidInputError(
            f"--{kind} {number}: the {kind}s of the paper that can be rerun are "
            f"{numbers(kind)} ({_WITHOUT[kind]})"
        )
    if not requested and not is_all:
        raise InvalidInputError(
            f"nothing is asked for: give --table ({numbers('table')}), --figure "
            f"({numbers('figure')}) or --all"
        )
    return tuple(item for item in ITEMS if is_all or (item.kind, item.number) in requested)


def numbers(kind: str) -> str:
    """The numbers of all tables, or of all figures, separated by commas."""
    return ", ".join(str(item.number) for item in ITEMS if item.kind == kind)
