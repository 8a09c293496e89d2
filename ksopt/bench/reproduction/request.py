"""The request of `ksopt bench paper`, parsed from its options, checked and split into parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ksopt.bench import paper_patterns
from ksopt.bench.options import BenchOptions
from ksopt.bench.paper_patterns import (
    BATCH,
    Stratum,
    energy_patterns,
    proportional_sample,
)
from ksopt.bench.reproduction import tables_and_figures
from ksopt.bench.reproduction.options import PaperOptions
from ksopt.bench.reproduction.products import AGAINST
from ksopt.bench.reproduction.tables_and_figures import ENERGY, MODELS, PRODUCTS, SIZES, Item
from ksopt.errors import InvalidInputError
from ksopt.measure import device as devices
from ksopt.patterns.chain import Pattern
from ksopt.patterns.validate import checked_int
from ksopt.system import option_fields
from ksopt.system.suggest import known_words

DTYPES = ("float32", "tf32", "float16", "bfloat16")
QUICK = 48
QUICK_ENERGY = 24
CPU_BATCH = 64
_SMALL_SIDE = 1024  # side of the largest matrix on a CPU, zeros included


@dataclass(frozen=True)
class Part:
    """Measurements that run together and have a folder of their own.

    Attributes:
        kind: "products", "energy", "modules" or "sizes".
        dtype: of `DTYPES`.
        patterns: of products and energy, in the order measured.
    """

    kind: str
    dtype: str
    patterns: tuple[Pattern, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.kind}-{self.dtype}"


@dataclass(frozen=True)
class PaperRequest:
    """The checked request: everything that decides the measurements. `of` creates it.

    Attributes:
        options: the source of the request.
        items: the tables and figures.
        parts: the measurements that they need, in the order measured.
        device: torch's name of the device.
        batch: rows of x.
        is_small: whether small models and patterns replace the paper's.
        remarks: sentences that name each omission or smaller size, and its reason.
    """

    options: PaperOptions
    items: tuple[Item, ...]
    parts: tuple[Part, ...]
    device: str
    batch: int
    is_small: bool
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, options: PaperOptions) -> PaperRequest:
        """Check a request as it comes from a command line.

        Raises:
            InvalidInputError: an option is invalid; the sentence names the allowed values.

        Example:
            >>> request = PaperRequest.of(PaperOptions(table=(5,), device="cpu", sample=4))
            >>> [(part.name, len(part.patterns)) for part in request.parts]
            [('products-float32', 4)]
        """
        items = tables_and_figures.items(options.table, options.figure, options.all)
        device = devices.resolve(options.device)
        is_gpu = device.type == "cuda"
        is_small = options.small or not is_gpu
        for name in ("sample", "batch"):
            if getattr(options, name) is not None:
                checked_int(getattr(options, name), name, "bench paper")
        checked_int(options.seed, "seed", "bench paper", minimum=0)
        dtypes = known_words("--dtypes", options.dtypes, DTYPES) if options.dtypes else ()
        if dtypes and "tf32" in dtypes and not is_gpu:
            raise InvalidInputError(f"--dtypes tf32 is for NVIDIA GPUs, and the device is {device}")
        remarks = []
        if is_small:
            remarks.append(
                f"Small patterns (matrices of at most {_SMALL_SIDE:,} rows and columns) and small "
                "models take the place of the paper's: the times are not comparable with its times."
            )
        if not is_gpu and any(item.needs == ENERGY for item in items):
            remarks.append(
                "Energy is read from the counter of an NVIDIA GPU (NVML), which a CPU has not: "
                "Figure 7 is left out."
            )
        parts = []
        for kind in (PRODUCTS, MODELS, SIZES, ENERGY):
            own = [dtype for item in items if item.needs == kind for dtype in item.dtypes]
            if not own or (kind == ENERGY and not is_gpu):
                continue
            more = DTYPES if options.all and kind in (PRODUCTS, MODELS) and is_gpu else ()
            for dtype in dtypes or dict.fromkeys((*own, *more)):
                parts.append(Part(kind, dtype, _patterns(kind, options, is_small)))
        return cls(
            options=options,
            items=items,
            parts=tuple(parts),
            device=str(device),
            batch=options.batch or (BATCH if is_gpu and not options.small else CPU_BATCH),
            is_small=is_small,
            remarks=tuple(remarks),
        )

    @property
    def command(self) -> str:
        """The command line of this request, without the output folder."""
        return " ".join(["ksopt bench paper", *option_fields.words(self.options)])

    def bench_options(self, part: Part) -> BenchOptions:
        """The options of `ksopt bench kernels` for the patterns of a part."""
        return BenchOptions(
            patterns=tuple(map(str, part.patterns)),
            dtype=part.dtype,
            layout="both",
            batch=str(self.batch),
            device=self.device,
            against="bmm_paper,einsum,bsr" if part.kind == ENERGY else AGAINST,
            every_way=True,
            seed=self.options.seed,
        )

    def is_extra(self, part: Part) -> bool:
        """Whether the paper lacks a part's dtype, for every table and figure that needs it."""
        return not any(item.needs == part.kind and part.dtype in item.dtypes for item in self.items)

    def population(self, kind: str) -> int:
        """The number of patterns that a sample of a part is drawn from."""
        whole = replace(self.options, quick=False, sample=None)
        return len(_patterns(kind, whole, self.is_small))

    def identity(self) -> dict[str, object]:
        """The values that all model runs of a folder share, as JSON values."""
        return {
            "device": torch.device(self.device).type,
            "small": self.is_small,
            "seed": self.options.seed,
        }


def _patterns(kind: str, options: PaperOptions, is_small: bool) -> tuple[Pattern, ...]:
    if kind not in (PRODUCTS, ENERGY):
        return ()
    population = paper_patterns.patterns() if kind == PRODUCTS else energy_patterns()
    if is_small:
        population = tuple(one for one in population if max(one.shape) <= _SMALL_SIDE)
    quick = (QUICK if kind == PRODUCTS else QUICK_ENERGY) if options.quick else len(population)
    strata = Stratum.of if kind == PRODUCTS else _energy_stratum
    return proportional_sample(population, options.sample or quick, options.seed, strata)


def _energy_stratum(pattern: Pattern) -> float:
    """The stratum of a pattern: the energy proxy of Figure 7's horizontal axis."""
    return pattern.d * pattern.rho
