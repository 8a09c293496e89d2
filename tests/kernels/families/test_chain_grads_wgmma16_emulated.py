"""The kernels of chains' weight gradients, run on the CPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from checks import H200
from cuda_emulator import EmulationError
from emulated_chains import _aligned, _emulate, _instance
from packed_kernels import without_predicates
from torch import Tensor

from ksopt.kernels import gradient_autotuner
from ksopt.kernels.families import chain_grads_wgmma16 as launcher
from ksopt.kernels.families.common import chain_grads_tile as kernels
from ksopt.kernels.families.common import weight_grad
from ksopt.kernels.families.common.chain_grads_tile import Chain, Config, Launch, Tile
from ksopt.kernels.families.gradient_base import GradientProblem
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns import chain as patterns

# Every d that is taken; tiles that are filled up in both directions; several i; every cluster and
# number of warpgroups, those that share a stage's rows included.
CASES: list[tuple[str, Config]] = [
    ("(1,20,40,2)*(2,40,40,1)", Config(1, 1, Tile(1, 1), Tile(1, 1))),
    ("(1,96,40,2)*(2,40,72,1)", Config(2, 2, Tile(2, 2), Tile(1, 2))),
    ("(1,40,64,2)*(2,64,136,1)", Config(2, 8, Tile(1, 1), Tile(2, 3))),
    ("(1,10,20,4)*(5,16,24,1)", Config(4, 3, Tile(2, 2), Tile(1, 1))),
    ("(2,16,24,3)*(6,24,40,1)", Config(3, 4, Tile(3, 2), Tile(3, 1))),
    ("(1,5,9,8)*(3,24,8,1)", Config(4, 1, Tile(1, 2), Tile(4, 1))),
    ("(1,8,8,6)*(2,24,32,1)", Config(1, 8, Tile(1, 4), Tile(1, 1))),
    ("(1,136,72,2)*(2,72,264,1)", Config(2, 4, Tile(2, 4), Tile(1, 4))),
    ("(1,24,8,5)*(5,8,16,1)", Config(2, 3, Tile(1, 1), Tile(1, 1))),
]


# Of chains on the same x.
SIBLINGS: list[tuple[str, Config, int]] = [
    ("(1,20,40,2)*(2,40,40,1)", Config(2, 2, Tile(2, 1), Tile(1, 1)), 2),
    ("(1,24,24,3)*(3,24,40,1)", Config(1, 3, Tile(1, 2), Tile(1, 1)), 3),
    ("(1,24,16,2)*(2,16,24,1)", Config(1, 1, Tile(1, 1), Tile(1, 1)), 4),
]


@dataclass(frozen=True)
class Case:
    """A kernel of the sweep."""

    chain: Chain
    config: Config
    dtype: str
    with_bias: bool
    siblings: int = 1

    @property
    def source(self) -> str:
        """Its file."""
        return launcher.source(self.chain, self.config, self.dtype, self.with_bias, self.siblings)


def _cases() -> list[Case]:
    result = []
    for at, (text, config) in enumerate(CASES):
        left, right = patterns.Chain.parse(text)
        for dtype in ("bfloat16", "float16"):
            result.append(Case((left, right), config, dtype, (at + (dtype == "float16")) % 4 > 0))
    for text, config, siblings in SIBLINGS:
        left, right = patterns.Chain.parse(text)
        result.append(Case((left, right), config, "bfloat16", siblings != 2, siblings))
    return result


SWEEP = _cases()


class _Block:
    """What `_instance` asks of a tile."""

    def __init__(self, threads: int) -> None:
        self.threads, self.rows = threads, kernels.ROWS


@pytest.fixture(scope="module")
def emulated(emulator):
    return emulator.on_demand(
        [
            _instance(
                case.chain[0],
                _Block(case.config.threads),
                case.source,
                case.dtype,
                case.config.shared_bytes(case.chain),
            )
            for case in SWEEP
        ],
        without_predicates,
    )


@pytest.fixture(scope="module")
def adding(emulator):
    dtypes = ("bfloat16", "float16")
    instances = [
        _instance(SWEEP[0].chain[0], _Block(256), launcher.adding_source(dtype), "bfloat16", 0)
        for dtype in dtypes
    ]
    return dict(zip(dtypes, emulator.build(instances, without_predicates), strict=True))


def operands(case: Case, rows: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Their memory, and all siblings' operands in it, with NaN between the rows.

    They are gradients of y, what is between the factors, its gradients, and x: rows lie ever
    farther apart.
    """
    left, right = case.chain
    generator = torch.Generator().manual_seed(seed)
    widths = [left.out_features, left.in_features, right.out_features]
    widths = [one for one in widths for _ in range(case.siblings)] + [right.in_features]
    strides = [features + 24 + 8 * at for at, features in enumerate(widths)]
    sizes = [rows * stride for stride in strides]
    memory = _aligned(torch.full((sum(sizes),), float("nan"), dtype=getattr(torch, case.dtype)))
    result = []
    for features, stride, part in zip(widths, strides, memory.split(sizes), strict=True):
        inside = part.view(rows, stride)[:, 8 : 8 + features]
        inside.copy_(torch.randn(rows, features, generator=generator))
        result.append(inside)
    return memory, result


def computed(
    kernel, adding, case: Case, launch: Launch, memory: Tensor, rows: list[Tensor]
) -> list[Tensor]:
    """By the kernel, and by the one that adds shares where there are some.

    What a kernel writes lies side by side: the emulator looks for bytes that are not written.
    """
    left, right = case.chain
    of_bias = left.out_features if case.with_bias else 0
    elements = launcher.share_elements(case.chain, launch, case.with_bias)
    sizes = [(left.nnz, elements[0]), (right.nnz, elements[1])] * case.siblings
    sizes += [(of_bias, elements[0])] * case.siblings if of_bias else []
    of_shares = 2 * case.siblings * sum(elements)
    straight = sum(size for size, of_factor in sizes if of_factor == 0)
    later = sum(size for size, of_factor in sizes if of_factor > 0)
    first = _aligned(torch.full((of_shares + straight,), float("nan")).to(memory))
    second = _aligned(torch.full((later,), float("nan")).to(memory))
    shares, places = first[:of_shares].view(torch.float32), [first[of_shares:], second]
    results = []
    for size, of_factor in sizes:
        results.append(places[of_factor > 0][:size])
        places[of_factor > 0] = places[of_factor > 0][size:]
    for at in range(2 * case.siblings):
        results[at] = results[at].view(case.chain[at % 2].weight_shape)
    arguments = launcher.arguments_of(
        rows, results, shares if of_shares else None, case.chain, launch
    )
    grid = (launch.blocks(case.chain), case.config.threads, case.config.shared_bytes(case.chain))
    _emulate(kernel, arguments, grid, (memory, memory[:0], first))
    if of_shares:
        added = launcher.adding_arguments(rows, results, shares, case.chain, launch)
        blocks = launcher.adding_blocks(case.chain, launch, case.with_bias)
        _emulate(
            adding, added, (blocks, weight_grad.ADDING_THREADS, 0), (shares, shares[:0], second)
        )
    return results


def assert_right(actual: list[Tensor], case: Case, rows: list[Tensor]) -> None:
    siblings, x = case.siblings, rows[-1]
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[case.dtype]
    assert len(actual) == siblings * (3 if case.with_bias else 2)
    for at in range(siblings):
        grad, between, grad_between = rows[at:-1:siblings]
        both = zip(actual[2 * at :], case.chain, (grad, grad_between), (between, x), strict=False)
        for dk, p, dy, z in both:
            truth = weight_grad_decomposed(dy.double(), z.double(), p.a, p.d, False)
            sizes = weight_grad_decomposed(dy.abs().double(), z.abs().double(), p.a, p.d, False)
            wrong = ~((dk.double() - truth).abs() <= unit * truth.abs() + 1e-6 * sizes + 1e-6)
            assert not wrong.any(), f"{p} of {at}: {int(wrong.sum())} of {p.nnz} are wrong"
        if case.with_bias:
            truth, sizes = grad.double().sum(0), grad.abs().double().sum(0)
            wrong = actual[2 * siblings + at].double() - truth
            assert (wrong.abs() <= unit * truth.abs() + 1e-6 * sizes).all()


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(SWEEP)), ids=lambda at: f"{SWEEP[at].chain}-{at}")
def test_they_are_the_gradients(emulated, adding, at):
    case = SWEEP[at]
    launches = [(rows, (1, 1)) for rows in (1, 64, 600)] + [(390, (2, 1)), (300, (1, 3))]
    for rows, shares in launches:
        memory, inputs = operands(case, rows, rows)
        launch = kernels.launch_of(case.config, rows, shares, case.siblings)
        actual = computed(emulated[at], adding[case.dtype], case, launch, memory, inputs)
        assert_right(actual, case, inputs)


def test_infinities_stay_where_they_meet(emulated, adding):
    """Sums of other j are computed, and thrown away."""
    case = SWEEP[2]
    memory, inputs = operands(case, 70, 0)
    inputs[1][3, 5] = float("inf")
    launch = kernels.launch_of(case.config, 70, (1, 1))
    dk, other, *_ = computed(emulated[2], adding[case.dtype], case, launch, memory, inputs)
    p = case.chain[0]
    expected = weight_grad_decomposed(inputs[0].double(), inputs[1].double(), p.a, p.d, False)
    assert torch.equal(dk.isfinite(), expected.isfinite())
    assert not dk.isfinite().all()
    assert other.isfinite().all()


@pytest.mark.parametrize(
    ("meeting", "noticed"),
    [
        ("    __syncthreads();  // the stages are free\n    float4* const kept", "race: write"),
        ("      cluster_barrier();\n    } else", "race: read"),
        ("cluster_barrier();  // none may end", "have ended"),
    ],
    ids=["stages", "sums", "end"],
)
def test_blocks_that_do_not_meet_are_noticed(emulator, meeting: str, noticed: str) -> None:
    """Without one meeting: before stages are overwritten, sums are read, and blocks end."""
    case = SWEEP[2]

    def edit(name: str, text: str) -> str:
        text = without_predicates(name, text)
        if name != "chain_grads_wgmma16.cuh":
            return text
        assert text.count(meeting) == 1
        call = "__syncthreads();" if "__syncthreads();" in meeting else "cluster_barrier();"
        return text.replace(meeting, meeting.replace(call, ";"))

    shared = case.config.shared_bytes(case.chain)
    block = _Block(case.config.threads)
    instance = _instance(case.chain[0], block, case.source, case.dtype, shared)
    (kernel,) = emulator.build([instance], edit)
    memory, inputs = operands(case, 600, 0)
    launch = kernels.launch_of(case.config, 600, (1, 1))
    with pytest.raises(EmulationError, match=noticed):
        computed(kernel, None, case, launch, memory, inputs)


def best(chain: Chain, rows: int) -> Launch:
    problem = GradientProblem("chain_weights", chain, "bfloat16")
    launch: Launch = gradient_autotuner.ranked(problem, rows, H200)[0].launch
    return launch


@pytest.mark.slow
def test_launches_fill_the_device_and_leave_no_share_empty() -> None:
    for text, _ in (*CASES, ("(1,768,64,2)*(2,64,192,1)", None)):
        left, right = patterns.Chain.parse(text)
        chain = (left, right)
        for rows in (1, 25_088):
            launch = best(chain, rows)
            for shares, of_block in zip(launch.shares, launch.rows_per_block, strict=True):
                assert of_block % kernels.ROWS == 0
                of_share = of_block * launch.config.cluster
                assert (shares - 1) * of_share < rows <= shares * of_share
            assert kernels.predicted_us(launch, chain, rows, H200) > 0
    launch = best(chain, 25_088)
    assert 100 <= launch.blocks(chain) <= 132


def test_what_it_does_not_compute_has_a_reason() -> None:
    for text, dtype, words in (
        ("(1,64,64,16)*(16,64,64,1)", "bfloat16", "d = 16"),
        ("(1,64,64,1)*(1,64,64,1)", "bfloat16", "is one matrix"),
        ("(1,64,64,2)*(2,64,64,1)", "float32", "float32 is not one of float16, bfloat16"),
    ):
        left, right = patterns.Chain.parse(text)
        assert words in str(kernels.unsupported((left, right), dtype, H200))
    left, right = patterns.Chain.parse("(1,64,64,2)*(2,64,64,1)")
    assert kernels.unsupported((left, right), "bfloat16", H200) is None
