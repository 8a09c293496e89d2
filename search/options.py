"""What a search and each of its layers are asked alike: budgets, device, limits, effort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.operators import registry
from ksopt.patterns.validate import checked_int
from ksopt.search.space.block_sizes import BlockSizes
from ksopt.search.space.families import names_of

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
"""So many seeds there are, from 0: those that NumPy takes, which Optuna draws with."""
STUDY = "ksopt-search"


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What is asked besides the size and the number of trials; texts as on the command line.

    Args:
        budgets: One text per step, such as ``("25%",)``; empty means the ladder 10, 25 and 50 %.
        batch: Rows of the input; None takes 256 on a CPU and 8192 on a GPU.
        dtype: float32, float16 or bfloat16 (fp32, fp16, bf16).
        layout: "batch_first" or "batch_last", of input and output.
        device: "auto" (the first GPU, else the CPU), "cpu", "cuda", "cuda:1", ...
        max_factors: Most factors of a chain, 1 to 3.
        timeout_s: Seconds after which no new trial starts; None for no limit.
        seed: Of the sampler and of the random inputs and weights, from 0 to 2**32 - 1.
        storage: Optuna storage URL, or ``journal:FILE``; None keeps a SQLite file, study.db, in the
            output folder. Searches with one storage, also of several machines, share its study.
        study: Name of the study in the storage.
        workers: Processes that measure: on a machine with several GPUs one for each, in turns
            where there are more processes than GPUs.
        out: Output folder; None makes its name from dims, device, dtype and batch.
        min_rank: Least rank bound of a chain; None asks for full rank, min(in, out), so that no
            chain is a bottleneck that the dense layer was not.
        min_use: Least share, 0 to 1, of a step's budget that its chain must use. Without it the
            smallest chain, which is nearly always the fastest, would be the answer to every step.
        weights: A .safetensors file (or the index of several, or a file of torch.save) with the
            layer's trained weight, and after a colon the tensor's name if more than one has the
            layer's shape: how near each chain comes to it is then reported. Several names and
            patterns, joined by commas, give one error of all (`ksopt.search.trained_weights`).
        max_error: Most relative error of those weights that a recommended chain may have.
        max_params: A count or share like a budget's that no step may exceed.
        min_speedup: How many times as fast as dense a recommended chain must be.
        objective: "pareto" learns where latency and weights are both low; "pareto-error" where
            latency and the error to the given weights are; "latency" only where latency is.
            ``energy`` and ``score`` each add theirs to any of these.
        train: Time a step of training, forward and the gradients of input and weights, in place of
            the product alone.
        score: ``MODULE:FUNCTION`` of the user's: a number for each chain, low where it is good, as
            one more objective (`ksopt.search.user_score`). Its code is run.
        energy: Measure the energy of a call of every chain too, on an NVIDIA GPU, as one more
            objective; of the finalists again, for longer, beside the dense layer's.
        families: Only chains of these families of the paper's Table 1, named as the class methods
            of `Chain` or joined by commas; empty for any chain. What is asked for by name comes
            also where two factors could be merged, as in all butterflies.
        block_sizes: The b and c that factors may have: a list ``16,32,64``, a range ``16-256`` or
            ``multiple:16``; None for any.
        chainable: Only chains for which factorization has guarantees (`Chain.is_chainable`).
        aligned: Only chains whose factors the fast kernels of the dtype and layout take
            (`ksopt.search.space.alignment`); with ``train`` their transposes too.
        structures: What to choose from, by name or names joined by commas: "ks", chains, and
            structures that `ksopt.operators.registry` has besides. The limits on families, sizes
            and factors are for chains alone.
        plugins: Modules that register structures or metrics of your own: the processes that measure
            for the search import them. In this one they are imported already.

    Raises:
        InvalidInputError: A value is not allowed; the sentence says what is.
    """

    budgets: tuple[str, ...] = LADDER
    batch: int | None = None
    dtype: str = "float32"
    layout: str = "batch_first"
    device: str = "auto"
    max_factors: int = MOST_FACTORS
    timeout_s: float | None = None
    seed: int = 0
    storage: str | None = field(default=None, repr=False)  # it may hold a password
    study: str = STUDY
    workers: int = 1
    out: Path | str | None = None
    min_rank: int | None = None
    min_use: float = 0.5
    weights: str | None = None
    max_error: float | None = None
    max_params: str | None = None
    min_speedup: float | None = None
    objective: str = "pareto"
    train: bool = False
    score: str | None = None
    energy: bool = False
    families: tuple[str, ...] | str = ()
    block_sizes: str | None = None
    chainable: bool = False
    aligned: bool = False
    structures: tuple[str, ...] | str = (registry.KRONECKER,)
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check()
        budgets = (self.budgets,) if isinstance(self.budgets, str) else tuple(self.budgets)
        object.__setattr__(self, "budgets", budgets or LADDER)
        if self.block_sizes is not None:
            # One text for what is the same, so that a study is known again.
            object.__setattr__(self, "block_sizes", str(BlockSizes.parse(self.block_sizes)))
        object.__setattr__(self, "families", names_of(self.families))
        object.__setattr__(self, "structures", _structures(self.structures))
        object.__setattr__(self, "plugins", tuple(self.plugins))
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
        object.__setattr__(self, "out", None if self.out is None else Path(self.out))

    def _check(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidInputError(
                f"objective {self.objective!r} is unknown: it must be 'pareto', 'pareto-error' or "
                "'latency'"
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
            )
        if self.layout not in LAYOUTS:
            raise InvalidInputError(
                f"layout {self.layout!r} is unknown: it must be 'batch_first' or 'batch_last'"
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
        """The options alone, by name, of which another request can be made."""
        return {one.name: getattr(self, one.name) for one in fields(SearchOptions)}

    def to_json(self) -> dict[str, Any]:
        """The options as plain values."""
        lists = ("budgets", "families", "structures", "plugins")
        options = self.options | {name: list(getattr(self, name)) for name in lists}
        return options | {"out": None if self.out is None else str(self.out)}


def _structures(given: str | Sequence[str]) -> tuple[str, ...]:
    """Structures by name, each once."""
    words = given.split(",") if isinstance(given, str) else given
    names = tuple(dict.fromkeys(word.strip() for word in words))
    if not names:
        raise InvalidInputError(f"structures: name at least one of {', '.join(registry.names())}")
    for name in names:
        if name != registry.KRONECKER:
            registry.structure_of(name)
    return names
