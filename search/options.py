"""Options of a search and of each of its layers: budgets, device, limits, effort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.patterns.surroundings import Surroundings, epilogue_option, siblings_option
from ksopt.patterns.validate import checked_int
from ksopt.search.space.block_sizes import BlockSizes
from ksopt.search.space.families import NAMES, names_of
from ksopt.system.option_fields import number, option, whole_number
from ksopt.system.suggest import nearest

LADDER = ("10%", "25%", "50%")
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
OBJECTIVES = ("pareto", "pareto-error", "latency")
LAYOUTS = ("batch_first", "batch_last")
MOST_FACTORS = 3
SEEDS = 2**32
"""Number of seeds, from 0: those of NumPy, which Optuna draws with."""
STUDY = "ksopt-search"
TRIALS = 72
"""Default number of chains to measure for a layer size."""
_LAYER, _CHAINS, _TRAINED = "the layer", "the chains", "a trained layer"
_GOAL, _EFFORT = "what is wanted", "the search"


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options besides the size, with texts as on the command line; each field is an option there.

    Raises:
        InvalidInputError: A value is not allowed; the sentence states what is.
    """

    batch: int | None = option(
        None,
        "rows of its input (256, on a GPU 8192)",
        _LAYER,
        parse=whole_number,
        metavar="ROWS",
        is_common=True,
    )
    dtype: str = option(
        "float32",
        "float32 (default), float16 or bfloat16",
        _LAYER,
        is_always_shown=True,
        is_common=True,
    )
    """Also as fp32, fp16 or bf16."""
    layout: str = option(
        "batch_first",
        "batch_first (default): input (rows, features); batch_last: (features, rows)",
        _LAYER,
        is_always_shown=True,
    )
    device: str = option(
        "auto",
        "cpu, cuda, cuda:1, ...; auto (default) is the first GPU, or the CPU without one",
        _LAYER,
        is_always_shown=True,
        is_common=True,
    )
    epilogue: tuple[str, ...] | str = epilogue_option(
        _LAYER, "the default, but of a --model with inputs what its graph has"
    )
    """In order of computation. The dense layer has the same epilogue."""
    siblings: int = siblings_option(_LAYER)
    """Weights, budgets and errors are those of one of them; times are of all."""

    budgets: tuple[str, ...] = option(
        LADDER,
        "the most weights, such as 25%% or 600k; several are steps of a ladder (10%% 25%% 50%%)",
        _CHAINS,
        flag="budget",
        nargs="*",
        is_replaced=True,
        metavar="SIZE",
        is_always_shown=True,
        is_common=True,
    )
    min_use: float = option(
        0.5,
        "least share of a step's budget that its chain must use, 0 to 1 (%(default)s)",
        _CHAINS,
        parse=number,
        metavar="SHARE",
        is_always_shown=True,
    )
    """Without it the smallest chain, nearly always the fastest, would answer every step."""
    min_rank: int | None = option(
        None,
        "least rank that the product can have (of chains full: the smaller of IN and OUT)",
        _CHAINS,
        parse=whole_number,
        metavar="RANK",
    )
    """At full rank no chain is a bottleneck that the dense layer was not."""
    max_factors: int = option(
        MOST_FACTORS,
        "most factors, 1 to 3 (%(default)s)",
        _CHAINS,
        flag="factors",
        parse=whole_number,
        metavar="MOST",
        is_always_shown=True,
    )
    families: tuple[str, ...] | str = option(
        (),
        f"only chains of these families: {', '.join(NAMES)}",
        _CHAINS,
        metavar="NAME[,NAME...]",
        joined=",",
        is_named=True,
    )
    """The families are those of the paper's Table 1. Named families include chains with mergeable
    factors, such as all butterflies."""
    block_sizes: str | None = option(
        None,
        "the b and c that factors may have: 16,32,64 or 16-256 or multiple:16",
        _CHAINS,
        metavar="SIZES",
    )
    chainable: bool = option(
        False, "only chainable chains, whose factorization has guarantees", _CHAINS
    )
    """See `Chain.is_chainable`."""
    aligned: bool = option(
        False,
        "only chains whose every factor the fast kernels of --dtype and --layout take",
        _CHAINS,
    )
    """See `ksopt.search.space.alignment`; with ``train`` their transposes too."""
    structures: tuple[str, ...] | str = option(
        (registry.KRONECKER,),
        "what to choose from: ks (default), which is chains, and others beside it or alone: "
        f"{', '.join(registry.names()[1:])}, or what --plugins register",
        _CHAINS,
        metavar="NAME[,NAME...]",
        joined=",",
    )
    """The limits on families, sizes and factors hold only for chains."""

    weights: str | None = option(
        None,
        "its weight (.safetensors): how near each chain comes to it is reported; NAME may be "
        "several, joined by commas, or a pattern with *; for a model give the file of its weights "
        "alone: layers are looked up by their names",
        _TRAINED,
        metavar="FILE[:NAME]",
    )
    """Also the index of several files, or a file of torch.save: `ksopt.search.trained_weights`."""
    max_error: float | None = option(
        None,
        "most relative error to it that a recommended chain may have (no limit)",
        _TRAINED,
        parse=number,
        metavar="SHARE",
    )

    objective: str = option(
        "pareto",
        "pareto (default): low latency and few weights; pareto-error: low latency and a low error "
        "to --weights; latency: low latency alone; --energy and --score add theirs to any",
        _GOAL,
    )
    train: bool = option(
        False,
        "time a step of training (forward, gradients of input and weights), not the product",
        _GOAL,
    )
    score: str | None = option(
        None,
        "your own objective: gets what is known of a chain (ksopt.search.user_score.Scored), "
        "returns a number, low where it is good; this runs its code",
        _GOAL,
        metavar="MODULE:FUNCTION",
    )
    energy: bool = option(
        False,
        "measure each chain's energy of a call too, as one more objective (NVIDIA GPUs; needs "
        "nvidia-ml-py)",
        _GOAL,
    )
    """The finalists' is measured again, for longer, beside the dense layer's."""
    max_params: str | None = option(
        None, "the most weights of any step, such as 600k", _GOAL, metavar="SIZE"
    )
    min_speedup: float | None = option(
        None,
        "how many times as fast as dense a recommended chain must be; an explicit value "
        "guides the sampler, too (1.1)",
        _GOAL,
        parse=number,
        metavar="TIMES",
    )

    trials: int | None = option(
        None,
        "chains to measure in all, those of an earlier run counted; sizes share them "
        f"({TRIALS} for each size)",
        _EFFORT,
        parse=whole_number,
        metavar="COUNT",
        is_always_shown=True,
        is_common=True,
    )
    timeout_s: float | None = option(
        None,
        "start no new measurement after so many seconds (no limit)",
        _EFFORT,
        flag="timeout",
        parse=number,
        metavar="SECONDS",
        is_common=True,
    )
    seed: int = option(
        0,
        "of the sampler, the inputs and the weights, 0 to 4294967295 (%(default)s)",
        _EFFORT,
        parse=whole_number,
        is_always_shown=True,
    )
    storage: str | None = option(
        None,
        "Optuna storage, such as sqlite:///study.db, postgresql://user@host/name or journal:FILE; "
        "searches with the same storage share its study, also from several machines (a SQLite "
        "file in the output folder)",
        _EFFORT,
        metavar="URL",
        repr=False,  # it may hold a password
    )
    study: str = option(
        STUDY, "name of the study in the storage (%(default)s)", _EFFORT, metavar="NAME"
    )
    workers: int = option(
        1,
        "processes that measure, one for each GPU (%(default)s)",
        _EFFORT,
        parse=whole_number,
        metavar="COUNT",
    )
    plugins: tuple[str, ...] = option(
        (),
        "modules to import first, which register structures, metrics or sections of the report; "
        "this runs their code",
        _EFFORT,
        nargs="+",
        metavar="MODULE",
    )
    """Worker processes import them. This process has done so already."""
    out: Path | str | None = option(
        None,
        "where the report goes; the same command with the same folder resumes the "
        "search (ksopt-report-...)",
        _EFFORT,
        metavar="FOLDER",
        is_common=True,
    )

    def __post_init__(self) -> None:
        self._check()
        budgets = (self.budgets,) if isinstance(self.budgets, str) else tuple(self.budgets)
        object.__setattr__(self, "budgets", budgets or LADDER)
        if self.block_sizes is not None:
            # A normal form, so that a study is recognised.
            object.__setattr__(self, "block_sizes", str(BlockSizes.parse(self.block_sizes)))
        object.__setattr__(self, "families", names_of(self.families))
        object.__setattr__(self, "structures", _structures(self.structures))
        around = Surroundings.checked(self.epilogue, self.siblings, "search")
        object.__setattr__(self, "epilogue", around.epilogue)
        if self.train and (self.epilogue or self.siblings > 1):
            raise InvalidInputError(
                "train times a step of the layer alone: leave out epilogue and siblings, or train"
            )
        object.__setattr__(self, "plugins", tuple(self.plugins))
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
        object.__setattr__(self, "out", None if self.out is None else Path(self.out))

    def _check(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidInputError(
                f"objective {self.objective!r} is unknown: it must be 'pareto', 'pareto-error' or "
                f"'latency'{nearest(self.objective, OBJECTIVES)}"
            )
        if self.objective == "pareto-error" and self.weights is None:
            raise InvalidInputError(
                "objective 'pareto-error' needs weights: without them there is no error"
            )
        if self.min_speedup is not None and not 0 < self.min_speedup < math.inf:
            raise InvalidInputError(
                f"min_speedup {self.min_speedup!r}: give a number more than 0, such as 1.2"
            )
        if self.dtype not in DTYPES:
            raise InvalidInputError(
                f"dtype {self.dtype!r} is unknown: it can be float32, float16 or bfloat16"
                f"{nearest(self.dtype, DTYPES)}"
            )
        if self.layout not in LAYOUTS:
            raise InvalidInputError(
                f"layout {self.layout!r} is unknown: it must be 'batch_first' or 'batch_last'"
                f"{nearest(self.layout, LAYOUTS)}"
            )
        for name in ("batch", "max_factors", "min_rank", "workers"):
            if getattr(self, name) is not None:
                checked_int(getattr(self, name), name, "search", minimum=1)
        if checked_int(self.seed, "seed", "search", minimum=0) >= SEEDS:
            raise InvalidInputError(
                f"seed {self.seed}: give a whole number from 0 to {SEEDS - 1} (2**32 - 1)"
            )
        if self.max_factors > MOST_FACTORS:
            raise InvalidInputError(
                f"factors {self.max_factors}: a search takes chains of at most {MOST_FACTORS}"
            )
        if not 0 <= self.min_use <= 1:
            raise InvalidInputError(
                f"min_use {self.min_use!r}: give a share of the budget, from 0 to 1"
            )
        if not self.study.strip():
            raise InvalidInputError(f"study {self.study!r}: give the study a name, or leave it out")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidInputError(
                f"timeout {self.timeout_s!r}: give seconds, more than 0, or leave it out"
            )
        if self.max_error is not None:
            if self.weights is None:
                raise InvalidInputError(
                    f"max_error {self.max_error!r} needs weights: without them there is no error"
                )
            if not 0 <= self.max_error < math.inf:
                raise InvalidInputError(f"max_error {self.max_error!r}: give a number from 0")

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, from which another request can be built."""
        return {one.name: getattr(self, one.name) for one in fields(SearchOptions)}

    def to_json(self) -> dict[str, Any]:
        """The options as JSON values."""
        options = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.options.items()
        }
        return options | {"out": None if self.out is None else str(self.out)}


def _structures(structures: str | Sequence[str]) -> tuple[str, ...]:
    """The validated names of structures, each once."""
    words = structures.split(",") if isinstance(structures, str) else structures
    names = tuple(dict.fromkeys(word.strip() for word in words))
    if not names:
        raise InvalidInputError(f"structures: name at least one of {', '.join(registry.names())}")
    for name in names:
        if name != registry.KRONECKER:
            registry.structure_of(name)
    return names
