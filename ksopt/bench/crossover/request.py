"""The request of `ksopt bench crossover`, parsed from its options and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from ksopt.bench.crossover.options import CrossoverOptions
from ksopt.bench.models.chains import chain_of
from ksopt.errors import InvalidInputError
from ksopt.measure import device as devices
from ksopt.patterns.chain import Chain
from ksopt.patterns.validate import checked_int
from ksopt.system import limits, option_fields
from ksopt.system.plurals import counted
from ksopt.system.suggest import known_words

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
PASSES = ("inference", "training")
_WIDTHS, _CPU_WIDTHS = (384, 768, 1024, 1536, 2048, 4096, 8192), (64, 128, 256, 512)
_ROWS, _CPU_ROWS = (1, 16, 64, 256, 1024, 4096, 25088), (1, 16, 128, 1024)


@dataclass(frozen=True)
class Plane:
    """The precision and the pass of one map.

    Attributes:
        precision: of `PRECISIONS`.
        pass_: "inference", without gradients, or "training": forward and backward.
    """

    precision: str
    pass_: str

    def __str__(self) -> str:
        return f"{self.pass_}, {self.precision}"

    @property
    def torch_name(self) -> str:
        """torch's name of the dtype."""
        return "float32" if self.precision == "tf32" else self.precision


@dataclass(frozen=True)
class Site:
    """A square layer, its bias and activation, and the rows of its input.

    Attributes:
        plane: the map that it belongs to.
        width: features of its input and output.
        rows: of x.
    """

    plane: Plane
    width: int
    rows: int

    def __str__(self) -> str:
        return f"{self.plane}, width {self.width:,}, {counted(self.rows, 'row')}"


@dataclass(frozen=True)
class Budget:
    """A share of the dense layer's weights.

    Attributes:
        text: as written in the options: "25%".
        parts: q, where the chains of `chains` have 2/q of the weights.
    """

    text: str
    parts: int

    @property
    def share(self) -> float:
        """The share of the weights, from 0 to 1."""
        return 2 / self.parts

    def chains(self, width: int) -> tuple[Chain, ...]:
        """The chains of a square layer; none where its width is no multiple of q.

        Monarch's, (1,n/q,n/q,q)*(q,n/q,n/q,1), which has q blocks in both factors, and where the
        width is even (1,n/2,n/q,2)*(2,n/q,n/2,1), whose 2 large blocks suit tensor cores.
        """
        q = self.parts
        if width % q:
            return ()
        blocks = (q, 2) if width % 2 == 0 else (q,)
        texts = [f"(1,out/{n},mid/{q},{n})*({n},mid/{q},in/{n},1)" for n in blocks]
        return tuple(dict.fromkeys(chain_of(text, width, width) for text in texts))


@dataclass(frozen=True)
class CrossoverRequest:
    """The checked request: everything that decides the measurements. `of` creates it.

    Attributes:
        options: the source of the request.
        planes: the maps.
        widths, rows: ascending.
        budgets: in descending order.
        device: torch's name of the device.
        remarks: sentences that name each omission and its reason.
    """

    options: CrossoverOptions
    planes: tuple[Plane, ...]
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    budgets: tuple[Budget, ...]
    device: str
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, options: CrossoverOptions) -> CrossoverRequest:
        """Check a request as it comes from a command line.

        Raises:
            InvalidInputError: an option is invalid; the sentence names the allowed values.

        Example:
            >>> request = CrossoverRequest.of(CrossoverOptions(device="cpu", budgets="25%"))
            >>> [str(chain) for chain in request.budgets[0].chains(64)]
            ['(1,8,8,8)*(8,8,8,1)', '(1,32,8,2)*(2,8,32,1)']
        """
        device = devices.resolve(options.device)
        is_gpu = device.type == "cuda"
        if not 0 < options.minutes < 1e5:
            raise InvalidInputError(f"--minutes {options.minutes:g}: it must be above 0")
        checked_int(options.seed, "seed", "bench crossover", minimum=0)
        default = ",".join(PRECISIONS[:3] if is_gpu else PRECISIONS[:1])
        precisions = known_words("--precisions", options.precisions or default, PRECISIONS)
        if "tf32" in precisions and not is_gpu:
            raise InvalidInputError(
                f"--precisions tf32 is for NVIDIA GPUs, and the device is {device}"
            )
        passes = known_words("--passes", options.passes, PASSES)
        widths = _numbers("--widths", options.widths, _WIDTHS if is_gpu else _CPU_WIDTHS)
        rows = _numbers("--rows", options.rows, _ROWS if is_gpu else _CPU_ROWS)
        least = 4 * widths[-1] * (widths[-1] + 4 * rows[-1])
        remedy = "give smaller --widths or --rows"
        limits.check_bytes(least, device, f"a layer of {widths[-1]:,} features", remedy)
        remarks: tuple[str, ...] = ()
        if not is_gpu:
            remarks = (
                "On a CPU the map is a small one, of float32 unless --precisions says otherwise; "
                "TF32 is a GPU's.",
            )
        return cls(
            options=options,
            planes=tuple(Plane(one, pass_) for pass_, one in product(passes, precisions)),
            widths=widths,
            rows=rows,
            budgets=_budgets(options.budgets),
            device=str(device),
            remarks=remarks,
        )

    @property
    def command(self) -> str:
        """The command line of this request, without the output folder."""
        return " ".join(["ksopt bench crossover", *option_fields.words(self.options)])

    @property
    def sites(self) -> tuple[Site, ...]:
        """The layers of all maps."""
        return tuple(Site(*one) for one in product(self.planes, self.widths, self.rows))

    def grid(self) -> dict[str, Any]:
        """The maps, widths and rows as JSON values; `with_grids` reads them."""
        planes = [[plane.precision, plane.pass_] for plane in self.planes]
        return {"planes": planes, "widths": list(self.widths), "rows": list(self.rows)}

    def with_grids(self, grids: Sequence[Mapping[str, Any]]) -> CrossoverRequest:
        """This request with the maps, widths and rows of all runs of a folder."""
        planes = dict.fromkeys(Plane(*one) for grid in grids for one in grid["planes"])
        widths, rows = (
            tuple(sorted({int(one) for grid in grids for one in grid[key]}))
            for key in ("widths", "rows")
        )
        return replace(self, planes=tuple(planes), widths=widths, rows=rows)

    def identity(self) -> dict[str, object]:
        """The values that all runs of a folder share; more sites may follow."""
        return {
            "device": torch.device(self.device).type,
            "budgets": [one.text for one in self.budgets],
            "seed": self.options.seed,
        }


def _numbers(option: str, text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if text is None:
        return default
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 10**9 for word in words):
        raise InvalidInputError(
            f"{option} {text}: give whole numbers of at least 1 with commas, such as 1,16,256"
        )
    return tuple(sorted({int(word) for word in words}))


def _budgets(text: str) -> tuple[Budget, ...]:
    budgets = []
    for word in text.split(","):
        try:
            share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
            parts = 2 / share
        except (ValueError, ZeroDivisionError):
            parts = 0.0
        if not 2 <= parts < 1e4 or abs(parts - round(parts)) > 1e-6:
            raise InvalidInputError(
                f"--budgets {text}: {word!r} is no share 2/q with a whole q of 2 or more, such as "
                "50%, 25% or 12.5%: a chain (1,n/q,n/q,q)*(q,n/q,n/q,1) has that of the weights"
            )
        budgets.append(Budget(f"{200 / round(parts):g}%", round(parts)))
    return tuple(sorted(dict.fromkeys(budgets), key=lambda one: one.parts))
