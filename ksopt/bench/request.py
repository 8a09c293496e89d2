"""The request of `ksopt bench kernels`, parsed from its options and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ksopt.baselines import BASELINES
from ksopt.bench import paper_patterns, random_subjects
from ksopt.bench.options import BenchOptions
from ksopt.errors import InvalidInputError
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.measure import device as devices
from ksopt.measure.roofline import Roofline
from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import ALONE, Surroundings
from ksopt.patterns.validate import checked_int
from ksopt.reference import LAYOUTS, is_batch_last
from ksopt.system import option_fields, untrusted
from ksopt.system.limits import ELEMENT_BYTES

DTYPES = ("float16", "bfloat16", "float32", "tf32")
"""The dtypes of products; tf32 is float32 whose products a GPU computes in TF32."""

EAGER = (
    "bmm", "bmm_loop", "expand", "bmm_paper", "einsum", "einsum_weight_first", "bmm_weight_first",
    "conv", "dense",
)  # fmt: skip
"""The ways that ``eager`` stands for: those that may be PyTorch's fastest on some product."""

PAPER = ("bmm_paper", "einsum", "bsr", "dense", "sparse")
"""The paper's baselines, in its own implementations."""

INDUCTOR = ("inductor_bmm", "inductor_einsum")
PRODUCT_ONLY = "bmm_paper_product"
"""bmm_paper without its two permutations; no rival, as its input and result are permuted."""

BOTH = "both"
CPU_BATCH = 256
_MOST_RANDOM = 100_000


@dataclass(frozen=True)
class Subject:
    """A product to measure: a chain, of one factor for a pattern, and the rows of x.

    Attributes:
        chain: What is multiplied by.
        batch: Rows of x.
        around: What is computed with the product: then it is a layer.
    """

    chain: Chain
    batch: int
    around: Surroundings = ALONE

    def __str__(self) -> str:
        return f"{self.layer} batch {self.batch}"

    @property
    def layer(self) -> str:
        """The chain with its epilogue and siblings, in words."""
        siblings = self.around.siblings
        several = [f"{siblings} siblings"] if siblings > 1 else []
        return " ".join([str(self.chain), *self.around.epilogue, *several])

    @property
    def epilogue(self) -> Epilogue:
        """What follows the product."""
        return Epilogue.of_names(self.around.epilogue)

    def problem(self, dtype: str, batch_last: bool, exact: bool = True) -> Problem:
        """The problem; ``dtype``, ``batch_last`` and ``exact`` are as for `Problem`."""
        siblings = self.around.siblings
        return Problem(self.chain, dtype, batch_last, exact, self.epilogue, siblings)

    def bytes_moved(self, dtype: str) -> int:
        """Bytes of all siblings' x, y and weights, and of bias and residual, once each.

        Args:
            dtype: As of `Chain.bytes`.
        """
        products = self.around.siblings * self.chain.bytes(self.batch, dtype)
        return products + self._added_bytes(dtype)

    def flops(self) -> int:
        """Floating-point operations of all siblings' products."""
        return self.around.siblings * self.chain.flops(self.batch)

    def floor_us(self, roofline: Roofline) -> float:
        """The floors of all siblings' factors, and the time to read bias and residual."""
        products = self.around.siblings * roofline.chain_floor_us(self.chain, self.batch)
        return products + roofline.floor_us(self._added_bytes(roofline.dtype), 0)

    def _added_bytes(self, dtype: str) -> int:
        """Bytes of bias and residual."""
        problem = self.problem("float32" if dtype == "tf32" else dtype, batch_last=False)
        after = problem.epilogue
        added = after.bias * problem.product_features
        added += after.residual * self.batch * problem.out_features
        return int(added * ELEMENT_BYTES[problem.dtype])

    def to_json(self) -> dict[str, Any]:
        """The product as JSON values; `from_json` reads them."""
        around = {} if self.around == ALONE else self.around.to_json()
        return {"chain": str(self.chain), "batch": self.batch, **around}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Subject:
        """The product that `to_json` wrote."""
        around = Surroundings.from_json(value) if "siblings" in value else ALONE
        return cls(Chain.parse(value["chain"]), value["batch"], around)

    @property
    def is_pattern(self) -> bool:
        """Whether it is a single factor."""
        return len(self.chain) == 1


@dataclass(frozen=True)
class BenchRequest:
    """The checked request: everything that decides the measurements. `of` creates it.

    Attributes:
        subjects: The products, in the order measured, without duplicates.
        dtype: Element type of inputs, weights and results.
        layout: The layout that ksopt is timed in, or ``both``; PyTorch's ways are timed in both.
        against: Names of PyTorch's ways: baselines, ``inductor_bmm``, ``inductor_einsum``.
        device: torch's name of the device, with its index where it is a GPU.
        graph: Whether to time replays of CUDA graphs.
        inductor_sample: Number of subjects that Inductor compiles.
        seed: Of the inputs, of a sample of the patterns, and of random subjects.
        every_way: Whether to try ways that multiplications by zero make slow.
        options: The source of the request, with the dtype and batch in force.
    """

    subjects: tuple[Subject, ...]
    dtype: str
    layout: str
    against: tuple[str, ...]
    device: str
    graph: bool
    inductor_sample: int
    seed: int
    every_way: bool
    options: BenchOptions

    @classmethod
    def of(cls, options: BenchOptions) -> BenchRequest:
        """Check a request as it comes from a command line.

        Raises:
            InvalidInputError: An option is invalid; the sentence names the allowed values.

        Example:
            >>> options = BenchOptions(patterns=("(1,2,3,4)",), device="cpu", batch="7,8")
            >>> [str(subject) for subject in BenchRequest.of(options).subjects]
            ['(1,2,3,4) batch 7', '(1,2,3,4) batch 8']
        """
        device = devices.resolve(options.device)
        gpu = device.type == "cuda"
        dtype = options.dtype or ("float16" if gpu else "float32")
        if dtype not in DTYPES:
            raise InvalidInputError(f"dtype {dtype!r}: it must be one of {', '.join(DTYPES)}")
        if dtype == "tf32" and not gpu:
            raise InvalidInputError(f"dtype tf32 is for NVIDIA GPUs, and the device is {device}")
        if options.layout != BOTH:
            is_batch_last(options.layout)
        if options.graph and not gpu:
            raise InvalidInputError(f"--graph replays CUDA graphs, and the device is {device}")
        default = paper_patterns.BATCH if gpu else CPU_BATCH
        batches = _batches(options.batch) if options.batch is not None else (default,)
        checked_int(options.inductor_sample, "--inductor-sample", "bench", minimum=0)
        checked_int(options.seed, "seed", "bench", minimum=0)
        around = Surroundings.checked(options.epilogue, options.siblings, "bench")
        patterns, chains = tuple(options.patterns), tuple(options.chains)
        if not patterns and not chains:
            raise InvalidInputError(
                "nothing to measure: give --patterns (paper, sample:N, random:N, a file, or "
                "patterns such as "
                '"(4,64,64,16)") or --chain'
            )
        own = batches if options.batch is not None else None
        subjects = [
            subject
            for word in patterns
            for subject in _subjects_of(word, options.seed, batches, own)
        ]
        subjects += [Subject(Chain.parse(text), rows) for text in chains for rows in batches]
        is_random = all(word.startswith("random:") for word in patterns) and not chains
        rows = None if is_random and own is None else ",".join(map(str, batches))
        return cls(
            subjects=tuple(dict.fromkeys(replace(one, around=around) for one in subjects)),
            dtype=dtype,
            layout=options.layout,
            against=_ways(options.against),
            device=str(device),
            graph=options.graph,
            inductor_sample=options.inductor_sample,
            seed=options.seed,
            every_way=options.every_way,
            options=replace(
                options,
                patterns=patterns,
                chains=chains,
                epilogue=around.epilogue,
                dtype=dtype,
                batch=rows,
            ),
        )

    @property
    def command(self) -> str:
        """The command line of this request, without the output folder."""
        return " ".join(["ksopt bench kernels", *option_fields.words(self.options)])

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        dtype: torch.dtype = getattr(torch, self.torch_name)
        return dtype

    @property
    def torch_name(self) -> str:
        """torch's name of the dtype."""
        return "float32" if self.dtype == "tf32" else self.dtype

    @property
    def fp32_products(self) -> str:
        """The precision of float32 products: ``ieee`` or ``tf32``."""
        return "tf32" if self.dtype == "tf32" else "ieee"

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts that ksopt is timed in."""
        return LAYOUTS if self.layout == BOTH else (self.layout,)

    @property
    def compiled(self) -> frozenset[Subject]:
        """The subjects that Inductor compiles: every n-th one, so that all kinds occur."""
        count = min(self.inductor_sample, len(self.subjects))
        places = (len(self.subjects) * i // count for i in range(count))
        return frozenset(self.subjects[place] for place in places)

    def identity(self) -> dict[str, object]:
        """The values that all runs of a folder share, as JSON values.

        The caller adds the device's name; its index does not matter.
        """
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "options"}
        named["subjects"] = [str(subject) for subject in self.subjects]
        named["against"] = list(self.against)
        named["device"] = torch.device(self.device).type
        return named


def _batches(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(part) for part in text.split(","))
    except ValueError:
        rows = (0,)
    if min(rows) < 1:
        raise InvalidInputError(
            f"batch {text!r}: give whole numbers of rows of at least 1, such as 25088 or 1,16,64"
        )
    return rows


def _subjects_of(
    word: str, seed: int, batches: tuple[int, ...], own: tuple[int, ...] | None
) -> list[Subject]:
    """The subjects of a word of --patterns; random ones have their own rows if ``own`` is None."""
    if not word.startswith("random:"):
        return [Subject(chain, rows) for chain in _chains_of(word, seed) for rows in batches]
    count = word.removeprefix("random:")
    if not _is_count(count, _MOST_RANDOM):
        raise InvalidInputError(
            f"--patterns {word!r}: N of random:N must be a whole number from 1 to {_MOST_RANDOM:,}"
        )
    drawn = random_subjects.draw(int(count), seed)
    return [Subject(chain, rows) for chain, one in drawn for rows in own or (one,)]


def _chains_of(word: str, seed: int) -> list[Chain]:
    """The patterns of a word of --patterns, as chains of one factor."""
    if word == "paper":
        return [Chain((pattern,)) for pattern in paper_patterns.patterns()]
    if word.startswith("sample:"):
        count = word.removeprefix("sample:")
        most = len(paper_patterns.patterns())
        if not _is_count(count, most):
            raise InvalidInputError(
                f"--patterns {word!r}: N of sample:N must be a whole number from 1 to {most}"
            )
        return [Chain((pattern,)) for pattern in paper_patterns.stratified_sample(int(count), seed)]
    if word.strip().startswith("("):
        return [_pattern(word, "")]
    path = Path(word)
    try:
        lines = untrusted.text(path, "the file").splitlines()
    except InvalidInputError:
        raise InvalidInputError(
            f"--patterns {word!r}: it must be paper, sample:N, random:N, a readable file with a "
            'pattern a line, or a pattern such as "(4,64,64,16)"'
        ) from None
    numbered = ((n, line.partition("#")[0].strip()) for n, line in enumerate(lines, 1))
    chains = [_pattern(line, f"{path}, line {n}: ") for n, line in numbered if line]
    if not chains:
        raise InvalidInputError(f"--patterns {word!r}: the file holds no pattern")
    return chains


def _is_count(text: str, most: int) -> bool:
    return re.fullmatch("[0-9]{1,9}", text) is not None and 1 <= int(text) <= most


def _pattern(text: str, where: str) -> Chain:
    try:
        chain = Chain.parse(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}{error}") from None
    if len(chain) > 1:
        raise InvalidInputError(f"{where}{text!r} has {len(chain)} factors: give it with --chain")
    return chain


def _ways(text: str) -> tuple[str, ...]:
    names: list[str] = []
    groups = {"eager": EAGER, "inductor": INDUCTOR}
    for name in text.split(","):
        known = (*groups, *BASELINES, *INDUCTOR, PRODUCT_ONLY)
        if name not in known:
            allowed = ", ".join(known)
            raise InvalidInputError(
                f"against {name!r}: give some of {allowed}, with commas between them"
            )
        names += groups.get(name, (name,))
    return tuple(dict.fromkeys(names))
