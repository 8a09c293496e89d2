"""Chains of any length and size in one launch: values against float64, layouts, strides, graphs."""

import datetime
import random

import pytest
import torch

from ksopt import ks_linear, precision
from ksopt.bench import random_subjects
from ksopt.epilogue import ACTIVATIONS, with_epilogue
from ksopt.kernels import plan_autotuner, planner
from ksopt.kernels.families.base import family_of
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem
from ksopt.measure.accuracy import AccuracyCheck, Around
from ksopt.patterns.chain import Chain

pytestmark = pytest.mark.gpu
KINDS = ("bfloat16", "float16", "float32", "tf32")
CHAINS = (
    *("(1,128,128,4)*(4,128,128,1)", "(1,24,20,8)*(8,20,24,1)", "(85,2,1,1)*(1,17,9,5)"),
    *("(6,7,5,3)*(1,30,17,3)*(3,17,9,1)", "(1,8,8,64)*(8,8,8,8)*(64,8,8,1)", "(5,11,13,1)"),
    *("(3,9,6,1)*(1,9,35,2)*(2,35,8,1)*(1,4,7,4)", "(1,192,64,2)*(2,64,192,1)"),
)
BATCHES = (1, 33, 4099)
TILES_EACH = 3
SEED = datetime.date.today().toordinal()


def problem_of(chain, kind, last, epilogue, siblings=1):
    dtype = "float32" if kind == "tf32" else kind
    return Problem(chain, dtype, last, kind != "tf32", epilogue, siblings)


def check(problem, rows, tiles, draw):
    """Every element of some tiles' results, written into memory of NaN."""
    family, spec = family_of("chain_mma"), DeviceSpec.of_device(0)
    fitting = [one for one in family.configs(problem, spec) if family.fits(problem, one, spec)]
    o = random_operands(problem, rows, torch.device("cuda"))
    around = Around(o.bias, problem.epilogue.activation, o.residual, problem.siblings)
    with precision.fp32_products("ieee" if problem.exact else "tf32"):
        judge = AccuracyCheck(o.x, o.weights, problem.layout, around=around)
        for tile in draw.sample(fitting, min(tiles, len(fitting))):
            launch = family.launcher(problem, tile, 0)
            fault = judge.fault_of(lambda x, run=launch: run(x, o.weights, o.bias, o.residual))
            assert fault is None, (problem, rows, tile, fault)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("chain", [Chain.parse(text) for text in CHAINS], ids=str)
def test_values_of_tiles_tails_and_epilogues(chain, last, kind):
    draw = random.Random(f"{chain} {last} {kind}")
    for rows in BATCHES:
        after = Epilogue(True, draw.choice(sorted(ACTIVATIONS)), draw.random() < 0.5)
        check(problem_of(chain, kind, last, after), rows, TILES_EACH, draw)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("siblings", [2, 3, 4])
def test_values_of_siblings(siblings, last, kind):
    draw = random.Random(f"{siblings} {last} {kind}")
    for text in ("(1,24,20,8)*(8,20,24,1)", "(1,192,64,2)*(2,64,192,1)"):
        for rows in BATCHES:
            after = Epilogue(True, draw.choice(sorted(ACTIVATIONS)), draw.random() < 0.5)
            problem = problem_of(Chain.parse(text), kind, last, after, siblings)
            check(problem, rows, 1, draw)


def test_random_chains_of_the_day():
    draw, spec = random.Random(SEED), DeviceSpec.of_device(0)
    print(f"seed {SEED}")
    for chain, rows in random_subjects.draw(60, SEED):
        problem = problem_of(chain, draw.choice(KINDS), draw.random() < 0.5, Epilogue(bias=True))
        if family_of("chain_mma").unsupported_reason(problem, spec) is None:
            check(problem, min(rows, 3000), 1, draw)


def test_rows_that_lie_apart_or_anywhere_are_read():
    problem = problem_of(Chain.parse("(1,24,20,8)*(8,20,24,1)"), "bfloat16", False, Epilogue(True))
    launch = launcher_of(problem, 100)
    o = random_operands(problem, 100, torch.device("cuda"))
    expected = launch(o.x, o.weights, o.bias)
    for skip in (8, 3):  # rows of whole 16 bytes, and others, which are copied
        wide = torch.full((100, 400), torch.nan, dtype=o.x.dtype, device="cuda")
        apart = wide[:, skip : skip + o.x.shape[1]]
        assert torch.equal(launch(apart.copy_(o.x), o.weights, o.bias), expected)
    out = torch.full((100, 192 + 16), torch.nan, dtype=o.x.dtype, device="cuda")[:, 8:-8]
    launch(o.x, o.weights, o.bias, None, out)
    assert torch.equal(out, expected)


def launcher_of(problem, rows):
    spec, family = DeviceSpec.of_device(0), family_of("chain_mma")
    tiles = [one for one in family.configs(problem, spec) if family.fits(problem, one, spec)]
    best = min(tiles, key=lambda one: family.predicted_us(problem, one, rows, spec))
    return family.launcher(problem, best, 0)


def test_an_infinity_stays_one_in_three_products():
    problem = problem_of(Chain.parse("(1,40,64,2)*(2,64,33,1)"), "float32", False, Epilogue())
    o = random_operands(problem, 50, torch.device("cuda"))
    o.x[7, 5], o.x[9, 1], o.x[11, 2] = torch.inf, -torch.inf, torch.nan
    y, expected = launcher_of(problem, 50)(o.x, o.weights), o.x.double()
    for weight in reversed(o.weights):
        a, _, c, d = weight.shape
        x = expected.view(-1, a, c, d)
        expected = torch.einsum("nald,akld->nakd", x, weight.double()).reshape(50, -1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isposinf(), expected.isposinf())
    assert torch.equal(y.isneginf(), expected.isneginf())


def test_a_layer_takes_it_and_the_host_library_launches_it(monkeypatch):
    """Of weights that are no parameters, which are not merged; with odd rows, in both layouts."""
    monkeypatch.setenv("KSOPT_TUNE", "model")
    plan_autotuner.forget()
    chain = Chain.parse("(1,16,3,12)*(1,36,141,1)")
    for last in (False, True):
        problem = problem_of(chain, "bfloat16", last, Epilogue(True, "gelu"))
        assert planner.plan_of(problem, 578).ways == ("chain_mma",)
        o = random_operands(problem, 578, torch.device("cuda"))
        layout = problem.layout
        with torch.no_grad():
            runs = [
                ks_linear(o.x, o.weights, o.bias, layout=layout, activation="gelu")
                for _ in range(3)
            ]
            with torch.profiler.profile() as profile:
                ks_linear(o.x, o.weights, o.bias, layout=layout, activation="gelu")
        kernels = [one.name for one in profile.events() if "chain_mma" in one.name]
        assert len(kernels) == 1
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[0], runs[2])
        x, weights = o.x.double().cpu(), [weight.double().cpu() for weight in o.weights]
        y = ks_linear(x, weights, layout=layout)
        y = with_epilogue(y, o.bias.double().cpu(), "gelu", None, last)
        assert (runs[0].double().cpu() - y).norm() <= 0.01 * y.norm()
    plan_autotuner.forget()


def test_it_is_captured_in_a_graph():
    problem = problem_of(Chain.parse("(1,24,20,8)*(8,20,24,1)"), "float16", False, Epilogue(True))
    launch = launcher_of(problem, 64)
    o = random_operands(problem, 64, torch.device("cuda"))
    expected = launch(o.x, o.weights, o.bias)
    torch.cuda.synchronize()
    graph, y = torch.cuda.CUDAGraph(), torch.full_like(expected, torch.nan)
    with torch.cuda.graph(graph):
        launch(o.x, o.weights, o.bias, None, y)
    graph.replay()
    assert torch.equal(y, expected)
