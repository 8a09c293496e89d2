"""Chains of any length and size in one launch: packing and products, run on the CPU."""

from __future__ import annotations

import datetime
import functools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from checks import H200, gpu
from cuda_emulator import EmulatedKernel, Emulator, Instance, OnDemand
from emulated_chains import ACTIVATIONS, _aligned, _emulate
from torch import Tensor

from ksopt.bench import random_subjects
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common import chain_mma_launcher, weight_packer
from ksopt.kernels.families.common.chain_mlp_launcher import Arguments
from ksopt.kernels.families.common.chain_mma_tile import Config
from ksopt.kernels.problem import Epilogue, Geometry, Problem, SecondLayer
from ksopt.patterns.chain import Chain
from ksopt.reference import ks_reference

family = family_of("chain_mma")

# Chain, dtype, layout, epilogue, and siblings if there are any. Sums short and long, d that pair
# and others, one to four factors.
SHAPES = [
    ("(1,32,16,4)*(2,32,32,1)", "bfloat16", False, Epilogue()),
    ("(1,24,20,8)*(8,20,24,1)", "float16", False, Epilogue(True, "gelu", True)),
    ("(85,2,1,1)*(1,17,9,5)", "bfloat16", False, Epilogue(True)),
    ("(2,2,2,50)*(1,40,5,5)", "float32", False, Epilogue(True, "relu", True)),
    ("(6,7,5,3)*(1,30,17,3)*(3,17,9,1)", "float16", False, Epilogue(True, "silu")),
    ("(1,16,40,4)*(4,40,33,1)", "float32", False, Epilogue(residual=True)),
    ("(1,32,48,2)*(2,48,32,1)", "tf32", False, Epilogue(True)),
    ("(3,9,6,1)*(1,9,35,2)*(2,35,8,1)*(1,4,7,4)", "bfloat16", False, Epilogue()),
    ("(5,11,13,1)", "bfloat16", False, Epilogue(True, "gelu_tanh", True)),
    ("(1,16,16,4)*(2,32,24,1)", "bfloat16", True, Epilogue(True, "gelu", True)),
    ("(7,6,3,2)*(2,21,34,1)", "float32", True, Epilogue(residual=True)),
    ("(1,21,8,2)*(2,8,10,1)", "float16", True, Epilogue()),
    ("(1,24,3,1)*(1,3,13,1)", "bfloat16", False, Epilogue()),  # a row between of a few bytes
    ("(6,8,10,1)*(3,10,16,2)", "bfloat16", False, Epilogue(True, "gelu", True)),
    ("(4,3,5,2)*(8,5,3,1)", "float32", True, Epilogue(True, residual=True)),
    ("(1,24,16,4)*(2,32,24,1)", "float32", False, Epilogue(True, "gelu"), 3),
    ("(2,8,12,3)*(6,12,10,1)", "bfloat16", True, Epilogue(True, residual=True), 2),
    ("(4,16,8,2)*(8,8,24,1)", "float16", False, Epilogue(True, residual=True), 4),
]
# Two layers: each one's chain and epilogue; the first one's leaves out siblings and residual.
MLPS = [
    (("(1,40,16,1)", Epilogue(activation="silu")), ("(1,16,40,1)", Epilogue()), "bfloat16"),
    (
        ("(1,24,8,4)*(2,16,16,1)", Epilogue(True, "gelu")),
        ("(1,10,24,2)*(2,24,48,1)", Epilogue(True, "relu", True)),
        "float16",
    ),
    (
        ("(4,12,32,1)", Epilogue(True, "gelu_tanh")),
        ("(8,6,6,1)", Epilogue(residual=True)),
        "tf32",
    ),
    (("(1,16,40,1)", Epilogue(True)), ("(1,9,7,2)*(2,7,8,1)", Epilogue()), "tf32"),
    (("(1,15,5,3)*(3,5,33,1)", Epilogue(activation="relu")), ("(5,2,3,3)", Epilogue()), "tf32"),
]
BATCHES = (1, 40, 150)


@dataclass(frozen=True)
class Pair:
    """The kernels of a case: one that packs, one that multiplies."""

    pack: EmulatedKernel
    multiply: EmulatedKernel


def problem_of(chain: str, kind: str, last: bool, epilogue: Epilogue, siblings: int = 1) -> Problem:
    dtype = "float32" if kind == "tf32" else kind
    return Problem(Chain.parse(chain), dtype, last, kind != "tf32", epilogue, siblings)


def mlp_of(first: tuple[str, Epilogue], second: tuple[str, Epilogue], kind: str) -> Problem:
    (chain, ahead), (last, after) = first, second
    one = problem_of(chain, kind, False, ahead)
    return replace(one, second=SecondLayer(Chain.parse(last), after))


def cases() -> list[tuple[Problem, Config]]:
    """Two tiles of each shape."""
    several = []
    problems = [*(problem_of(*shape) for shape in SHAPES), *(mlp_of(*one) for one in MLPS)]
    for at, problem in enumerate(problems):
        tiles = [tile for tile in family.configs(problem, gpu(4)) if tile.bm <= 64]
        most = max(tile.groups for tile in tiles)  # one tile of several groups
        several += [(problem, tile) for tile in random.Random(at).sample(tiles, 1)]
        tiles = [tile for tile in tiles if tile.groups == most]
        several += [(problem, tile) for tile in random.Random(-at).sample(tiles, 1)]
    return several


CASES = cases()


def build(emulator: Emulator, several: list[tuple[Problem, Config]]) -> list[Pair]:
    instances = []
    for problem, tile in several:
        shared = family.shared_bytes(problem, tile)
        geometry = Geometry(tile.threads, shared, tile.bm, 1, 1)
        factor = Problem.of_factor(problem.chain.patterns[0], problem.dtype, False)
        instances += [Instance(factor, text, geometry) for text in family.sources(problem, tile)]
    built = emulator.build(instances)
    return [Pair(*two) for two in zip(built[0::2], built[1::2], strict=True)]


@pytest.fixture(scope="module")
def kernels(emulator):
    return OnDemand(functools.partial(build, emulator), CASES)


@dataclass(frozen=True)
class Operands:
    """The operands of a call."""

    x: Tensor
    weights: list[Tensor]
    bias: Tensor
    residual: Tensor
    hidden_bias: Tensor

    @classmethod
    def random(cls, problem: Problem, rows: int, seed: int) -> Operands:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, problem.dtype)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        def lying(features: int) -> Tensor:
            return draw(features, rows) if problem.batch_last else draw(rows, features)

        patterns = [p for chain in problem.chains for p in chain] * problem.siblings
        weights = [draw(*p.weight_shape) * p.c**-0.5 for p in patterns]
        out = problem.out_features
        hidden = draw(problem.chain.out_features)
        return cls(lying(problem.chain.in_features), weights, draw(out), lying(out), hidden)


def run(pair: Pair, problem: Problem, tile: Config, o: Operands) -> Tensor:
    """y, by the emulated kernels on two multiprocessors."""
    stages, size = family.stages(problem, tile), o.x.element_size()
    shares = tile.groups * problem.siblings
    elements = sum(stage.packed_bytes for stage in stages) * shares // size
    biases = torch.cat([o.bias, o.hidden_bias])
    packed = _aligned(torch.full((elements + biases.numel(),), float("nan"), dtype=o.x.dtype))
    flat = _aligned(torch.cat([w.reshape(-1) for w in o.weights]))
    views, at = [], 0
    for w in o.weights:
        views.append(flat[at : at + w.numel()].view(w.shape))
        at += w.numel()
    none = packed[:0]
    chains = problem.siblings if problem.second is None else 2
    packing = weight_packer.arguments_of(views, chains, packed)
    threads = chain_mma_launcher.PACK_THREADS
    _emulate(pair.pack, packing, (3, threads, 0), (flat, none, packed[:elements]))
    assert not packed[:elements].isnan().any()
    packed[elements:] = biases
    vectors = 128 // size
    residual_at = -(-o.x.numel() // vectors) * vectors
    both = _aligned(torch.zeros(residual_at + o.residual.numel(), dtype=o.x.dtype))
    both[: o.x.numel()] = o.x.reshape(-1)
    both[residual_at:] = o.residual.reshape(-1)
    y = _aligned(torch.full((o.residual.numel(),), float("nan"), dtype=o.x.dtype))
    last, rows = problem.batch_last, o.x.shape[1 if problem.batch_last else 0]
    blocks, of_block = chain_mma_launcher.launch_of(tile, shares, rows, 2)
    out = rows if last else problem.out_features
    after = problem.layers()[-1].epilogue
    is_hidden = problem.second is not None and problem.epilogue.bias
    arguments = Arguments(
        both.data_ptr(),
        packed.data_ptr(),
        packed.data_ptr() + elements * size if after.bias else 0,
        both.data_ptr() + residual_at * size if after.residual else 0,
        *(y.data_ptr(), rows, rows if last else problem.chain.in_features, out, out, of_block),
        hidden_bias=packed.data_ptr() + (elements + o.bias.numel()) * size if is_hidden else 0,
    )
    launch = (blocks, tile.threads, family.shared_bytes(problem, tile))
    _emulate(pair.multiply, arguments, launch, (both, packed, y))
    return y.view(o.residual.shape)


def expected(problem: Problem, o: Operands) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sizes of what roundings may add up to."""
    if problem.second is not None:
        first, second = problem.layers()
        own, others = o.weights[: len(first.chain)], o.weights[len(first.chain) :]
        hidden = replace(o, weights=own, bias=o.hidden_bias)
        h, size = expected(first, hidden)
        y, terms = expected(second, replace(o, x=h, weights=others))
        # What h is off by, the second chain multiplies.
        absolute = [weight.abs() for weight in others]
        bare = replace(second, epilogue=Epilogue())
        return y, terms + expected(bare, replace(o, x=size, weights=absolute))[0]
    x, size = o.x.double(), o.x.double().abs()
    if problem.batch_last:
        x, size = x.T, size.T
    of_each = len(problem.chain)
    results, sizes = [], []
    for at in range(0, len(o.weights), of_each):
        result, terms = x, size
        for weight in reversed(o.weights[at : at + of_each]):
            result = ks_reference(result, weight.double())
            terms = ks_reference(terms, weight.double().abs())
        results.append(result)
        sizes.append(terms)
    x, size = torch.cat(results, -1), torch.cat(sizes, -1)
    after = problem.epilogue
    if after.bias:
        x, size = x + o.bias.double(), size + o.bias.double().abs()
    x = ACTIVATIONS[after.activation](x)
    if after.residual:
        residual = o.residual.double().T if problem.batch_last else o.residual.double()
        x, size = x + residual, size + residual.abs()
    return (x.T, size.T) if problem.batch_last else (x, size)


def assert_right(y: Tensor, problem: Problem, o: Operands) -> None:
    truth, size = expected(problem, o)
    unit = {"float32": 2**-21, "float16": 2**-10, "bfloat16": 2**-7}[problem.dtype]
    unit = unit if problem.exact else 2**-9
    wrong = ~((y.double() - truth).abs() <= unit * (truth.abs() + size) + 1e-6)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, {wrong.nonzero()[0].tolist()}"
    assert (y.double() - truth).norm() <= 2 * unit * truth.norm()


def name(at: int) -> str:
    problem, tile = CASES[at]
    words = (
        "-then-".join(map(str, problem.chains)),
        problem.dtype,
        problem.layout,
        *problem.epilogue.names,
    )
    words = (*words, f"x{problem.siblings}") if problem.siblings > 1 else words
    return "-".join(map(str, (*words, tile.bm, tile.warps, tile.mt, tile.nt, tile.groups)))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results_are_right(kernels, at):
    problem, tile = CASES[at]
    for rows in BATCHES:
        operands = Operands.random(problem, rows, seed=at)
        assert_right(run(kernels[at], problem, tile, operands), problem, operands)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "at", [0, pytest.param(10, marks=pytest.mark.slow), 20, len(CASES) - 5, len(CASES) - 1]
)
def test_what_is_not_finite_stays_in_its_row_and_class(kernels, at, value):
    """An infinity makes an infinity where PyTorch's products make one, three TF32 products too."""
    problem, tile = CASES[at]
    o = Operands.random(problem, 20, seed=at)
    x = o.x.T if problem.batch_last else o.x
    x[7, 1] = value
    y, (truth, _) = run(kernels[at], problem, tile, o), expected(problem, o)
    assert torch.equal(y.isnan(), truth.isnan())
    assert torch.equal(y.isposinf(), truth.isposinf())
    assert torch.equal(y.isneginf(), truth.isneginf())


@pytest.mark.slow
def test_random_chains_of_the_day(emulator):
    """Sizes, tiles and epilogues that no day before had."""
    seed = datetime.date.today().toordinal()
    draw, tried = random.Random(seed), 0
    for chain, rows in random_subjects.draw(30, seed):
        kind = draw.choice(("bfloat16", "float16", "float32", "tf32"))
        after = Epilogue(True, draw.choice(("none", "gelu")), draw.random() < 0.5)
        siblings = draw.choice((1, 1, 1, 2, 3))
        problem = problem_of(str(chain), kind, draw.random() < 0.5, after, siblings)
        if family.unsupported_reason(problem, H200) is not None:
            continue
        tile = draw.choice(list(family.configs(problem, H200)))
        print(f"seed {seed}: {problem} {tile}")
        (pair,) = build(emulator, [(problem, tile)])
        operands = Operands.random(problem, min(rows, tile.bm + 3), seed)
        assert_right(run(pair, problem, tile, operands), problem, operands)
        tried += 1
    assert tried > 8
