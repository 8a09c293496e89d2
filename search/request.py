"""What is asked of a search: sizes, budgets, device, limits. Texts become numbers here."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.validate import checked_int
from ksopt.search.space.alignment import Alignment
from ksopt.search.space.block_sizes import ANY_SIZE, BlockSizes
from ksopt.search.space.constraints import Constraints
from ksopt.search.space.families import names_of
from ksopt.search.storage_url import without_password as without_password

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

_DIMS = re.compile(r"\s*([0-9]{1,9})\s*[xX×]\s*([0-9]{1,9})\s*")
_NUMBER = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([%kKmMgG]?)\s*")
_LARGEST = 1e300  # what has more digits is as much too large, and no float
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True)
class Dims:
    """Size of the layer, named as in ``torch.nn.Linear(in_features, out_features)``."""

    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features"):
            checked_int(getattr(self, name), name, f"Dims({self.in_features!r}, ...)")

    @classmethod
    def parse(cls, text: str) -> Dims:
        """The dims that ``INxOUT`` names.

        Raises:
            InvalidInputError: The text has another form, or a size is 0.

        Example:
            >>> Dims.parse("768x3072")
            Dims(in_features=768, out_features=3072)
            >>> Dims.parse("768")
            Traceback (most recent call last):
            ksopt.errors.InvalidInputError: dims '768': write INxOUT, as in nn.Linear(in, out), \
such as 768x3072
        """
        match = _DIMS.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInputError(
                f"dims {text!r}: write INxOUT, as in nn.Linear(in, out), such as 768x3072"
            )
        in_features, out_features = int(match[1]), int(match[2])
        if in_features < 1 or out_features < 1:
            raise InvalidInputError(f"dims {text!r}: both sizes must be at least 1")
        return cls(in_features, out_features)

    @property
    def dense_parameters(self) -> int:
        """Weights of the dense layer, bias not counted."""
        return self.in_features * self.out_features

    def __str__(self) -> str:
        return f"{self.in_features}x{self.out_features}"


@dataclass(frozen=True)
class Budget:
    """The most weights that a chain may have, and the text that said so. Bias is not counted."""

    text: str
    parameters: int

    @classmethod
    def parse(cls, text: str, dims: Dims) -> Budget:
        """Read ``25%`` or ``0.25`` (a share of the dense weights), or ``600k``, ``2.4M`` (a count).

        A number without a unit is a share up to 1 if it has a decimal point, and a count otherwise.

        Raises:
            InvalidInputError: The text has another form, or asks for no weights, or for more than
                the dense layer has.

        Example:
            >>> dims = Dims(768, 3072)
            >>> [Budget.parse(text, dims).parameters for text in ("25%", "0.25", "600k", "1.2M")]
            [589824, 589824, 600000, 1200000]
            >>> Budget.parse("300%", dims)
            Traceback (most recent call last):
            ksopt.errors.InvalidInputError: budget '300%' is more than the dense layer's 2,359,296 \
weights: give at most 100%
        """
        match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInputError(
                f"budget {text!r}: write a share of the dense weights (25% or 0.25) "
                "or a count (600k, 2.4M)"
            )
        number, unit = min(float(match[1]), _LARGEST), match[2].lower()
        dense = dims.dense_parameters
        if unit == "%" or (not unit and "." in match[1]):
            share = number / 100 if unit else number
            if not unit and number > 1:
                raise InvalidInputError(
                    f"budget {text!r}: a number with a decimal point is a share of the dense "
                    f"weights, at most 1.0; for a percentage write {match[1]}%, for a count 600k"
                )
            # Rounded, so that 0.29 % of a million is 2,900 whatever binary fractions make of it.
            count = math.floor(round(share * dense, 6))
        else:
            count = math.floor(round(number * _UNITS.get(unit, 1), 6))
        if number == 0:
            raise InvalidInputError(f"budget {text!r} allows no weights: give more than 0")
        if count > dense:
            raise InvalidInputError(
                f"budget {text!r} is more than the dense layer's {dense:,} weights: "
                "give at most 100%"
            )
        if count < 1:
            raise InvalidInputError(
                f"budget {text!r} of the dense layer's {dense:,} weights is less than one weight"
            )
        return cls(text.strip(), count)


@dataclass(frozen=True)
class SearchRequest:
    """Everything that decides what a search measures; texts as on the command line.

    Args:
        dims: ``INxOUT``, or a `Dims`.
        budgets: One text per step, such as ``("25%",)``; empty means the ladder 10, 25 and 50 %.
        batch: Rows of the input; None takes 256 on a CPU and 8192 on a GPU.
        dtype: float32, float16 or bfloat16 (fp32, fp16, bf16).
        layout: "batch_first" or "batch_last", of input and output.
        device: "auto" (the first GPU, else the CPU), "cpu", "cuda", "cuda:1", ...
        max_factors: Most factors of a chain, 1 to 3.
        trials: Chains to measure in all, those of an earlier run of the same study counted.
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

    Raises:
        InvalidInputError: A value is not allowed; the sentence says what is.

    Example:
        >>> SearchRequest("768x3072", budgets=("25%",)).steps
        (Budget(text='25%', parameters=589824),)
    """

    dims: Dims | str
    budgets: tuple[str, ...] = LADDER
    batch: int | None = None
    dtype: str = "float32"
    layout: str = "batch_first"
    device: str = "auto"
    max_factors: int = MOST_FACTORS
    trials: int = 72
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
    steps: tuple[Budget, ...] = field(init=False)

    def __post_init__(self) -> None:
        dims = self.dims if isinstance(self.dims, Dims) else Dims.parse(self.dims)
        budgets = (self.budgets,) if isinstance(self.budgets, str) else tuple(self.budgets)
        budgets = budgets or LADDER
        steps = {budget.parameters: budget for budget in (Budget.parse(b, dims) for b in budgets)}
        if self.max_params is not None:
            most = Budget.parse(self.max_params, dims)
            within = {count: step for count, step in steps.items() if count <= most.parameters}
            steps = within | ({} if len(within) == len(steps) else {most.parameters: most})
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
        for name, least in (
            ("batch", 1),
            ("trials", 1),
            ("max_factors", 1),
            ("min_rank", 1),
            ("workers", 1),
        ):
            if getattr(self, name) is not None:
                checked_int(getattr(self, name), name, "search", minimum=least)
        if checked_int(self.seed, "seed", "search", minimum=0) >= SEEDS:
            raise InvalidInputError(
                f"seed {self.seed}: give a whole number from 0 to {SEEDS - 1} (2**32 - 1)"
            )
        if self.max_factors > MOST_FACTORS:
            raise InvalidInputError(
                f"factors {self.max_factors}: a search takes chains of at most {MOST_FACTORS}"
            )
        full = min(dims.in_features, dims.out_features)
        if self.min_rank is not None and self.min_rank > full:
            raise InvalidInputError(
                f"min_rank {self.min_rank}: a {dims} layer has rank at most min(in, out) = {full}"
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
        if self.block_sizes is not None:
            # One text for what is the same, so that a study is known again.
            object.__setattr__(self, "block_sizes", str(BlockSizes.parse(self.block_sizes)))
        object.__setattr__(self, "families", names_of(self.families))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "budgets", budgets)
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
        object.__setattr__(self, "out", None if self.out is None else Path(self.out))
        # Two texts for one count (25% and 0.25) are one step; steps rise.
        object.__setattr__(self, "steps", tuple(steps[count] for count in sorted(steps)))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes the same request of."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        plain = {"dims": str(self.size), "budgets": [step.text for step in self.steps]}
        return values | plain | {"out": None if self.out is None else str(self.out)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SearchRequest:
        """The request that `to_json` wrote."""
        return cls(**{**value, "budgets": tuple(value["budgets"])})

    @property
    def size(self) -> Dims:
        """``dims``, read."""
        assert isinstance(self.dims, Dims)
        return self.dims

    @property
    def rank(self) -> int:
        """The least rank bound in force."""
        return self.min_rank or min(self.size.in_features, self.size.out_features)

    @property
    def constraints(self) -> Constraints:
        """What the chains have to fulfil besides budget, rank and number of factors."""
        alignment = Alignment(
            element_bytes=4 if self.dtype == "float32" else 2,
            batch_last=self.layout == "batch_last",
            train=self.train,
        )
        return Constraints(
            families=tuple(self.families),
            block_sizes=ANY_SIZE
            if self.block_sizes is None
            else BlockSizes.parse(self.block_sizes),
            chainable=self.chainable,
            alignment=alignment if self.aligned else None,
        )

    def admits(self, chain: Chain) -> bool:
        """Whether a chain of the layer's size is one that is asked for, whatever its weights.

        A study that goes on may hold chains that were asked for with a smaller rank, more factors
        or other limits.

        Example:
            >>> request = SearchRequest("64x64", max_factors=2)
            >>> low_rank, monarch = Chain.low_rank(64, 64, 16), Chain.monarch(64, 64, p=4)
            >>> request.admits(low_rank), request.admits(monarch)
            (False, True)
        """
        return (
            len(chain) <= self.max_factors
            and chain.rank_bound >= self.rank
            and self.constraints.admits(chain)
        )

    @property
    def command(self) -> str:
        """The command line that makes this request again.

        Example:
            >>> SearchRequest("768x3072", budgets=("25%",), batch=256, device="cpu").command
            'ksopt search --dims 768x3072 --budget 25% --batch 256 --dtype float32 \
--layout batch_first --device cpu --factors 3 --min-rank 768 --min-use 0.5 --trials 72 --seed 0'
        """
        return command_line(self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the command line that makes this request again; None where left out."""
        return {
            "dims": str(self.size),
            "budget": " ".join(step.text for step in self.steps),
            "batch": self.batch,
            "dtype": self.dtype,
            "layout": self.layout,
            "device": self.device,
            "factors": self.max_factors,
            "min-rank": self.rank,
            "min-use": f"{self.min_use:g}",
            "families": ",".join(self.families) or None,
            "block-sizes": self.block_sizes,
            "chainable": self.chainable or None,
            "aligned": self.aligned or None,
            "weights": None if self.weights is None else shlex.quote(self.weights),
            "max-error": None if self.max_error is None else f"{self.max_error:g}",
            "max-params": self.max_params,
            "min-speedup": None if self.min_speedup is None else f"{self.min_speedup:g}",
            "objective": None if self.objective == "pareto" else self.objective,
            "train": self.train or None,
            "score": None if self.score is None else shlex.quote(self.score),
            "energy": self.energy or None,
            "trials": self.trials,
            "timeout": None if self.timeout_s is None else f"{self.timeout_s:g}",
            "seed": self.seed,
            "storage": (
                None if self.storage is None else shlex.quote(without_password(self.storage))
            ),
            "study": None if self.study == STUDY else shlex.quote(self.study),
            "workers": None if self.workers == 1 else self.workers,
            "out": None if self.out is None else shlex.quote(str(self.out)),
        }


def command_line(options: Mapping[str, Any]) -> str:
    """The words of ``ksopt search`` with options, without those that are None.

    Example:
        >>> command_line({"dims": "8x8", "trials": 3, "timeout": None, "train": True})
        'ksopt search --dims 8x8 --trials 3 --train'
    """
    words = [
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in options.items()
        if value is not None
    ]
    return " ".join(["ksopt search", *words])
