"""The tensor-core families for any b, c, d and alignment, run on the CPU by the emulator."""

import datetime
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import pytest
import torch
from checks import Tiles, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulatedKernel, EmulationError, Emulator, Instance, OnDemand
from packed_kernels import PackedKernel
from packed_kernels import instances as packed_instances

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.gather_mma import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

gather_mma, gather_mma_packed = family_of("gather_mma"), family_of("gather_mma_packed")

# No d, b or c that other families want; sums short and long, one block and many, all j and windows.
SHAPES = [
    ("bfloat16", (1, 57, 35, 1)),
    ("float16", (7, 5, 33, 2)),
    ("bfloat16", (3, 9, 20, 5)),
    ("float16", (2, 3, 130, 7)),
    ("bfloat16", (11, 3, 1, 1)),
    ("float16", (1, 5, 7, 37)),
    ("float32", (2, 50, 45, 1)),
    ("float32", (5, 3, 7, 5)),
    ("float32", (1, 11, 2, 41)),
    ("float32", (1, 6, 40, 35)),
    ("bfloat16", (1, 12, 700, 9)),
    ("float32", (2, 9, 401, 10)),
    # Rows of whole chunks, which `ldmatrix` brings.
    ("bfloat16", (4, 13, 40, 1)),
    ("float32", (1, 20, 44, 1)),
]
BATCHES = (1, 17, 130)
CONFIGS_EACH = 2
OF_THE_DAY = 6
OF_TEMPLATE = (
    "warps",
    "bm",
    "mt",
    "nt",
    "ns",
    "jt",
    "groups",
    "jc",
    "parts",
    "step",
    "weights",
)

Kernel = EmulatedKernel | PackedKernel


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape, tiles that have most values no earlier case had."""
    tiles = Tiles(OF_TEMPLATE)
    for dtype, shape in SHAPES:
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
        candidates = tiles_of(problem)
        for _ in range(CONFIGS_EACH):
            yield problem, tiles.draw(candidates)


def tiles_of(problem: Problem) -> list[Config]:
    """Of both families, as many of each way to bring weights; none with many rows."""
    by_weights: dict[str, list[Config]] = {}
    for family in (gather_mma, gather_mma_packed):
        for one in family.configs(problem, gpu(4)):
            if one.bm <= 64:
                by_weights.setdefault(one.weights, []).append(one)
    draw = random.Random(str(problem.pattern))
    fewest = min(map(len, by_weights.values()), default=0)
    return [tile for several in by_weights.values() for tile in draw.sample(several, fewest)]


CASES = list(cases())


def build_all(emulator: Emulator, several: list[tuple[Problem, Config]]) -> list[Kernel]:
    instances = [one for problem, config in several for one in instances_of(problem, config)]
    built = iter(emulator.build(instances))
    return [
        next(built) if config.weights == "stored" else PackedKernel(next(built), next(built))
        for _, config in several
    ]


def instances_of(problem: Problem, config: Config) -> list[Instance]:
    if config.weights == "stored":
        source = gather_mma.source(problem, config)
        return [Instance(problem, source, gather_mma.geometry(problem, config))]
    return packed_instances(gather_mma_packed, problem, config)


@pytest.fixture(scope="module")
def kernels(emulator):
    return OnDemand(partial(build_all, emulator), CASES)


def name(at: int) -> str:
    problem, c = CASES[at]
    units = f"{c.warps}x{c.bm}x{c.mt}x{c.nt}x{c.ns}x{c.jt}"
    tile = f"{units}-{c.groups}i-{c.jc}j-{c.parts}-{c.step}l-{c.weights}"
    return f"{problem.pattern}-{problem.dtype}-{tile}"


def test_the_cases_differ_in_every_template_argument():
    for field in OF_TEMPLATE:
        assert len({asdict(config)[field] for _, config in CASES}) >= 2, field
    assert any(config.parts > 1 for _, config in CASES)
    assert any(config.groups > 1 for _, config in CASES)
    assert {gather_mma.products(*case) for case in CASES} == {0, 1, 3}


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, _ = CASES[at]
    for batch in BATCHES:
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
    assert torch.equal(y, kernels[at](x, weight, seed=1)), "it depends on the order of threads"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=BATCHES[-2], seed=at)


@pytest.mark.parametrize("at", range(0, len(CASES), 10), ids=name)
def test_strides(kernels, at):
    problem, _ = CASES[at]
    x, weight = operands(problem, 29, seed=0)
    rows, features = x.shape
    spread = torch.full((2 * rows, 3 * features), float("nan"), dtype=x.dtype)
    spread[::2, ::3] = x
    shifted = torch.empty(rows * features + 1, dtype=x.dtype)
    shifted[1:] = x.reshape(-1)
    views = {
        "both strides": spread[::2, ::3],
        "the other layout's memory": x.T.contiguous().T,
        "misaligned": shifted[1:].view(rows, features),
        "one row for all": x[:1].expand(rows, features),
    }
    weights = {
        "contiguous": weight,
        "permuted": weight.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    }
    for view in views.values():
        for w in weights.values():
            assert_close_to_float64(kernels[at](view, w), view, w, problem)


@pytest.mark.slow
def test_factors_of_the_day(emulator):
    """Sizes, tiles and rows that no day before had."""
    seed = int(datetime.date.today().strftime("%Y%m%d"))
    draw = random.Random(seed)
    several = []
    while len(several) < OF_THE_DAY:
        sizes = [round(2 ** (draw.random() * math.log2(most))) for most in (6, 60, 90, 45)]
        dtype = draw.choice(["bfloat16", "float16", "float32"])
        problem = Problem.of_factor(Pattern(*sizes), dtype, batch_last=False)
        candidates = tiles_of(problem)
        if candidates and problem.pattern.in_features < 3000:
            several.append((problem, draw.choice(candidates)))
    result = build_all(emulator, several)
    for (problem, config), kernel in zip(several, result, strict=True):
        print(f"seed {seed}: {problem} {config}")
        x, weight = operands(problem, draw.randint(1, 140), seed=seed)
        assert_close_to_float64(kernel(x, weight), x, weight, problem)


@pytest.mark.parametrize("shape", [(2, 25, 70, 3), (3, 9, 7, 2)])
def test_one_product_is_tf32(emulator, shape):
    """The values are TF32 numbers, so that nothing but the sums rounds."""
    problem = Problem.of_factor(Pattern(*shape), "float32", batch_last=False, exact=False)
    config = next(gather_mma.configs(problem, gpu(4)))
    (kernel,) = build_all(emulator, [(problem, config)])
    x, weight = (
        (one.view(torch.int32) & ~0x1FFF).view(torch.float32)
        for one in operands(problem, 33, seed=5)
    )
    assert_close_to_float64(kernel(x, weight), x, weight, problem)


FAULTS = {
    "no barrier before the products": (
        "__syncthreads();  // the stage is filled",
        "// the stage is filled",
        "race|nothing wrote|under way",
    ),
    "no barrier before results leave": (
        "    __syncthreads();\n    write_results",
        "    write_results",
        "race|nothing wrote",
    ),
    "rows beyond the batch": (
        "rows = rows_inside<Tile::BM>(at.arguments.batch - tile * Tile::BM), l0",
        "rows = Tile::BM, l0",
        "outside",
    ),
    "a tile's chunks beyond the operand": (" && end <= at.x_end", "", "outside"),
    "chunks beyond the operand": ("from + Tile::VECTOR <= at.x_end", "true", "outside"),
    "what others write beside a run": (
        "if (begin < 0 || begin + VECTOR > length || ",
        "if (begin >= length || ",
        "race|outside|nothing wrote",
    ),
    "no zeros behind sums": (
        "*reinterpret_cast<uint4*>(weights + chunk * 16) = make_uint4(0, 0, 0, 0);",
        "",
        "nothing wrote",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(emulator, fault):
    before, after, message = FAULTS[fault]
    problem = Problem.of_factor(Pattern(2, 9, 21, 3), "bfloat16", batch_last=False)
    config = next(
        one for one in gather_mma.configs(problem, gpu(4)) if (one.bm, one.groups) == (32, 1)
    )

    def edit(header: str, text: str) -> str:
        if header != "gather_mma.cuh":
            return text
        assert before in text
        return text.replace(before, after)

    (kernel,) = emulator.build(instances_of(problem, config), edit)
    x, weight = operands(problem, 33, seed=0)
    x = x.contiguous()
    with pytest.raises(EmulationError, match=message):
        kernel(x, weight)
