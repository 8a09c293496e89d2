"""Runs every kernel family once on some patterns, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py mma16 wgmma16

Names of families: only those, and the general kernel; a number n behind them: every n-th pattern,
as racecheck takes minutes for all. ``chains``: those of chains alone; ``chains
0``: with the first of eight chains (racecheck takes minutes). ``mlps``: those of two layers, and
what packs their weights; ``mlps 0``: of the first of two. ``weight_grads``: those of weight
gradients; ``input_grads``: those of chains' input gradients; ``chain_grads``: those of chains'
weight gradients; ``expanded``: the one behind products by matrices with zeros; ``repair``: the one
behind products by chains' matrices with zeros; ``transposes``: those around PyTorch's batched
product; ``epilogues``: those of factors with an epilogue.

The patterns are the smallest of the tests' sample, one of each d in turn, and some of odd sizes;
the batch is small and odd: every tail is met, and the tools' slowness does not matter. (Errors of
driver calls are left out because cuda-bindings asks the driver for functions that it may not have.)
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ksopt.bench.paper_patterns import stratified_sample
from ksopt.epilogue import Activation, After
from ksopt.kernels.chain_repair import ChainRepair
from ksopt.kernels.families import naive
from ksopt.kernels.families.base import TemplateFamily, families, family_of
from ksopt.kernels.families.common import input_grad_tile
from ksopt.kernels.families.gradient_base import Gradient, GradientProblem, gradient_families
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem, SecondLayer
from ksopt.patterns.chain import Chain, Pattern

ROWS = 37
# What no family but those of `gather_mma` and the general kernel takes.
ODD = ((7, 5, 33, 3), (2, 9, 20, 5), (1, 3, 7, 41), (9, 17, 1, 1), (1, 3, 70, 19), (2, 130, 90, 1))
# b without divisors for wide tiles, and groups whose results begin at odd addresses.
PADDED = ((2, 37, 24, 3), (3, 13, 24, 1), (3, 21, 22, 4), (2, 29, 100, 16))
CHAINS = (
    ("(1,48,16,8)*(2,64,192,1)", Epilogue(True, "gelu", True), 1, "bfloat16", False),
    ("(1,40,24,2)*(3,16,40,1)", Epilogue(True), 1, "bfloat16", False),
    ("(1,96,32,2)*(2,32,96,1)", Epilogue(True), 3, "bfloat16", False),
    ("(1,96,32,2)*(2,32,96,1)", Epilogue(True, "silu_gate", True), 2, "bfloat16", False),
    ("(1,96,32,2)*(2,32,96,1)", Epilogue(True, "gelu", in_float32=True), 1, "bfloat16", False),
    ("(1,24,16,4)*(2,16,12,2)*(2,24,32,1)", Epilogue(True, "relu"), 1, "float16", False),
    ("(1,48,16,8)*(2,64,192,1)", Epilogue(True, "gelu", True), 1, "float32", False),
    ("(1,40,24,2)*(3,16,40,1)", Epilogue(True, "silu"), 1, "bfloat16", True),
    ("(1,48,32,2)*(2,32,48,1)", Epilogue(True), 1, "bfloat16", False),  # packed for gradients, too
    ("(1,48,32,2)*(2,32,48,1)", Epilogue(True, "gelu"), 1, "bfloat16", False),
)
MLPS = (
    ("(1,32,16,4)*(2,32,32,1)", "(1,16,16,4)*(2,32,64,1)"),
    ("(1,64,24,2)*(2,24,32,1)", "(1,8,16,8)*(1,128,128,1)"),
    ("(2,24,40,1)", "(1,40,24,2)"),
)
# Factors, siblings, and what the last factor's product goes through; numbers of rows; and how many
# launches of a family there are for each, at most.
GRADIENTS: dict[Gradient, tuple[tuple[tuple[str, int, Activation], ...], tuple[int, int], int]] = {
    "weight": (
        (
            ("(2,40,72,1)", 1, "none"),
            ("(1,40,12,2)", 1, "none"),
            ("(2,5,9,8)", 1, "none"),
            ("(1,10,18,4)", 1, "none"),
            ("(1,6,4,12)", 1, "none"),
        ),
        (64, 300),
        24,
    ),
    "chain_weights": (
        (
            ("(1,20,40,2)*(2,40,40,1)", 1, "none"),
            ("(2,16,24,3)*(6,24,40,1)", 1, "none"),
            ("(1,72,72,2)*(2,72,136,1)", 1, "none"),
            ("(1,20,40,2)*(2,40,40,1)", 3, "none"),
        ),
        (ROWS, 700),
        12,
    ),
    "chain_input": (
        (
            ("(1,52,48,2)*(3,32,72,1)", 1, "none"),
            ("(1,72,64,1)*(2,32,40,1)", 1, "none"),
            ("(1,40,32,4)*(4,32,24,1)", 1, "none"),
            ("(1,19,32,8)*(4,64,72,1)", 1, "none"),
            ("(1,52,48,2)*(3,32,72,1)", 3, "none"),
            ("(1,52,48,2)*(3,32,72,1)*(1,108,64,2)", 1, "gelu"),
            ("(1,72,64,1)*(2,32,40,1)*(1,20,32,4)", 1, "silu"),
        ),
        (ROWS, 300),
        4,
    ),
}


def smallest(count: int) -> list[Pattern]:
    """The smallest patterns of the sample, one of each d before a second of any."""
    ordered = sorted(stratified_sample(100, seed=0), key=lambda p: p.nnz)
    by_d: dict[int, list[Pattern]] = {}
    for pattern in ordered:
        by_d.setdefault(pattern.d, []).append(pattern)
    turns = itertools.zip_longest(*(by_d[d] for d in sorted(by_d)))
    return [pattern for turn in turns for pattern in turn if pattern is not None][:count]


def run_chains(at: int | None = None) -> int:
    """Run the families of chains on some, or on the one at a place of `CHAINS`; how often."""
    ran, device = 0, DeviceSpec.of_device(0)
    for text, after, siblings, dtype, last in CHAINS if at is None else CHAINS[at : at + 1]:
        chain = Chain.parse(text)
        problem = Problem(chain, dtype, last, epilogue=after, siblings=siblings)
        for family in families():
            if not family.takes_chains or family.unsupported_reason(problem, device) is not None:
                continue
            tiles = list(family.configs(problem, device))
            tiles = [tile for tile in tiles if family.fits(problem, tile, device)]
            for tile, rows in itertools.product(tiles[:: max(1, len(tiles) // 3)], (ROWS, 200)):
                print(f"{text}: {tile}, {rows} rows", flush=True)  # a tool may take minutes for one
                operands = random_operands(problem, rows, torch.device("cuda"))
                family.launcher(problem, tile, 0)(*operands.arguments(problem))
                ran += 1
                if family.stores_intermediate(problem):
                    left, right = chain
                    shape = input_grad_tile.Shape(left, right, siblings)
                    of_grad = None  # or the tile that the weights are packed for, too
                    if input_grad_tile.unsupported_reason(shape, dtype, device) is None:
                        of_grad = input_grad_tile.best(shape, rows, device)[0]
                    for also in {None, of_grad}:
                        keeping = family.storing_launcher(problem, tile, 0, also)
                        keeping(operands.x, operands.weights, operands.bias)
                        ran += 1
    return ran


def run_mlps(at: int | None = None) -> int:
    """Run the families of two layers on some, or on those at a place of `MLPS`; how often."""
    ran, device = 0, DeviceSpec.of_device(0)
    for texts in MLPS if at is None else MLPS[at : at + 1]:
        up, down = map(Chain.parse, texts)
        second = SecondLayer(down, Epilogue(True, "none", True))
        ahead = Epilogue(len(up) > 1, "gelu")
        problem = Problem(up, "bfloat16", False, epilogue=ahead, second=second)
        for family in families():
            if not family.takes_mlps or family.unsupported_reason(problem, device) is not None:
                continue
            tiles = list(family.configs(problem, device))
            tiles = [tile for tile in tiles if family.fits(problem, tile, device)]
            for tile, rows in itertools.product(tiles[:: max(1, len(tiles) // 3)], (ROWS, 200)):
                operands = random_operands(problem, rows, torch.device("cuda"))
                y = family.launcher(problem, tile, 0)(*operands.arguments(problem))
                assert not torch.isnan(y).any(), (texts, tile)
                ran += 1
    return ran


def _gradient_operands(problem: GradientProblem, rows: int) -> list[Any]:
    """As the launchers of `GradientFamily` take them."""

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda").to(getattr(torch, problem.dtype))

    left, *others = problem.factors
    if problem.gradient == "weight":
        return [drawn(rows, left.out_features), drawn(rows, left.in_features)]
    right, *below = others
    siblings = range(problem.siblings)
    if problem.gradient == "chain_weights":
        features = (left.out_features, left.in_features, right.out_features)
        widths = [n for n in features for _ in siblings] + [right.in_features]
        return [drawn(rows, n) for n in widths]
    grads = [drawn(rows, left.out_features) for _ in siblings]
    weights = [drawn(*p.weight_shape) for p in [left, right] * problem.siblings + below]
    behind = [(drawn(rows, p.in_features), drawn(p.out_features)) for p in below]
    return [grads, weights, *itertools.chain(*behind)]


def run_gradients(kind: Gradient) -> int:
    """Run every family of a kind of gradient, with few rows and with several shares of them."""
    ran, device = 0, DeviceSpec.of_device(0)
    few = replace(device, multiprocessors=2)  # where blocks have more rows
    cases, several, most = GRADIENTS[kind]
    every = itertools.product(cases, several, ("bfloat16", "float32"))
    for (text, siblings, activation), rows, dtype in every:
        factors = tuple(map(Pattern.parse, text.split("*")))
        with_bias = kind != "chain_input"
        problem = GradientProblem(kind, factors, dtype, with_bias, siblings, activation)
        for family in gradient_families(kind):
            if family.unsupported_reason(problem, device) is not None:
                continue
            launches = [it for one in (device, few) for it in family.launches(problem, rows, one)]
            launches = list(dict.fromkeys(launches))
            for launch in launches[:: max(1, -(-len(launches) // most))]:
                print(f"{problem}: {launch}, {rows} rows", flush=True)
                results = family.launcher(problem, launch, 0)(*_gradient_operands(problem, rows))
                assert not any(torch.isnan(one).any() for one in results), (text, launch)
                ran += 1
    return ran


def run_expanded() -> int:
    """Run the kernel behind products by matrices with zeros, on rows with infinities; how often."""
    ran, device, family = 0, DeviceSpec.of_device(0), family_of("expanded_bmm")
    for sizes, last in itertools.product(
        ((2, 40, 24, 4), (1, 5, 3, 9), (7, 3, 5, 1)), (False, True)
    ):
        problem = Problem.of_factor(Pattern(*sizes), "bfloat16", last)
        for config in family.configs(problem, device):
            x = torch.randn(300, problem.pattern.in_features, device="cuda").bfloat16()
            x[::7, 1] = torch.inf
            weight = torch.randn(problem.pattern.weight_shape, device="cuda").bfloat16()
            y = family.launcher(problem, config, 0)(x.T.contiguous() if last else x, weight)
            assert not torch.isnan(y).any(), (sizes, config)
            ran += 1
    return ran


def run_repair() -> int:
    """Run the kernel behind products by chains' matrices with zeros, on spoilt rows; how often."""
    ran = 0
    for text in ("(14,3,18,2)*(4,63,6,2)", "(3,1500,4,1)*(2,6,2,1)", "(3,2,1600,1)*(2,2400,3,1)"):
        chain = Chain.parse(text)
        for dtype, last, bias in itertools.product(
            ("bfloat16", "float32"), (False, True), (False, True)
        ):
            problem = Problem(chain, dtype, last, epilogue=Epilogue(bias))
            operands = random_operands(problem, 70, torch.device("cuda"))
            shape = (chain.out_features, 70) if last else (70, chain.out_features)
            y = torch.zeros(shape, device="cuda", dtype=operands.x.dtype)
            (y if last else y.T)[0, ::7] = torch.nan
            repair = ChainRepair(problem, 0)
            repair(operands.x, operands.weights, operands.bias, y)
            assert not torch.isnan(y).any(), problem
            ran += 1
    return ran


def run_transposes() -> int:
    """Run the transposes around PyTorch's batched product; how often."""
    ran, device, family = 0, DeviceSpec.of_device(0), family_of("transpose_bmm")
    for sizes in ((1, 8, 24, 2), (2, 16, 40, 3), (3, 24, 16, 12), (1, 128, 64, 32)):
        for dtype in ("float32", "float16", "bfloat16"):
            problem = Problem.of_factor(Pattern(*sizes), dtype, False)
            for config, rows in itertools.product(family.configs(problem, device), (ROWS, 300)):
                operands = random_operands(problem, rows, torch.device("cuda"))
                y = family.launcher(problem, config, 0)(operands.x, operands.weights[0])
                assert not torch.isnan(y).any(), (sizes, dtype)
                ran += 1
    return ran


def run_epilogues() -> int:
    """Run the kernels of factors that have an epilogue; how often."""
    ran, device = 0, DeviceSpec.of_device(0)
    after = itertools.cycle([Epilogue(True), Epilogue(True, "gelu", True), Epilogue(residual=True)])
    several = [family for family in families() if family.takes_epilogues]
    for pattern in (*smallest(4), *(Pattern(*sizes) for sizes in PADDED)):
        for dtype, family in itertools.product(("float32", "bfloat16"), several):
            problem = Problem.of_factor(pattern, dtype, False)
            if family.unsupported_reason(problem, device) is not None:
                continue
            tiles = list(family.configs(problem, device))
            behind = [next(after)]
            if family.takes_float32_results and dtype == "bfloat16":
                behind.append(Epilogue(True, "silu", in_float32=True))
            several_tiles = {tiles[len(tiles) // 3], tiles[-1]}
            for epilogue, tile, rows in itertools.product(behind, several_tiles, (3, ROWS)):
                whole = replace(problem, epilogue=epilogue)
                o = random_operands(whole, rows, torch.device("cuda"))
                launcher = family.launcher(whole, tile, 0)
                own = After(o.bias, epilogue.activation, o.residual, epilogue.in_float32)
                y = launcher.with_epilogue(o.x, o.weights[0], own)
                assert y is not None, whole
                assert not torch.isnan(y).any(), whole
                ran += 1
    return ran


OF_CHAINS: dict[str, Callable[[], int]] = {
    "epilogues": run_epilogues,
    "transposes": run_transposes,
    "expanded": run_expanded,
    "repair": run_repair,
    "chains": run_chains,
    "mlps": run_mlps,
    "weight_grads": partial(run_gradients, "weight"),
    "input_grads": partial(run_gradients, "chain_input"),
    "chain_grads": partial(run_gradients, "chain_weights"),
}


def main() -> None:
    every = {
        family.name: family
        for family in families()
        if isinstance(family, TemplateFamily) and not family.is_fallback
    }
    if len(sys.argv) == 2 and sys.argv[1] in OF_CHAINS:
        print(f"{OF_CHAINS[sys.argv[1]]()} launches of {sys.argv[1]}")
        torch.cuda.synchronize()
        return
    one_of = {"chains": run_chains, "mlps": run_mlps}
    if len(sys.argv) == 3 and sys.argv[1] in one_of and sys.argv[2].isdigit():
        ran = one_of[sys.argv[1]](int(sys.argv[2]))
        print(f"{ran} launches of {sys.argv[1]} {sys.argv[2]}")
        torch.cuda.synchronize()
        return
    names = [one for one in sys.argv[1:] if not one.isdigit()]
    unknown = set(names) - set(every)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join(every)}")
    chosen = [family for name, family in every.items() if name in (names or every)]
    ran = 0
    device = DeviceSpec.of_device(0)
    dtypes = ("float32", "float16", "bfloat16")
    patterns = [*smallest(10), *(Pattern(*sizes) for sizes in ODD + PADDED)]
    patterns = patterns[:: next((int(one) for one in sys.argv[1:] if one.isdigit()), 1)]
    for pattern, dtype, last in itertools.product(patterns, dtypes, (False, True)):
        # Exact products of short sums are left to PyTorch: there the kernels compute in TF32.
        exact = dtype != "float32" or pattern.c >= 32
        problem = Problem.of_factor(pattern, dtype, last, exact)
        x = torch.randn(ROWS, pattern.in_features, device="cuda").to(getattr(torch, dtype))
        x = x.T.contiguous() if last else x
        weight = torch.randn(pattern.weight_shape, device="cuda").to(x.dtype)
        launchers = [naive.launcher(problem, 0)]
        for family in chosen:
            if family.unsupported_reason(problem, device) is None:
                tiles = list(family.configs(problem, device))
                two = {tiles[len(tiles) // 3], tiles[-1]}
                launchers += [family.launcher(problem, tile, 0) for tile in two]
        for launch in launchers:
            y = launch(x, weight)
            torch.cuda.synchronize()
            assert not torch.isnan(y).any(), (pattern, dtype, last)
            ran += 1
    print(f"ran {ran} kernels on {len(patterns)} patterns")


if __name__ == "__main__":
    main()
