"""The fp32 batch-last family on warpgroup products: its cost model, launcher and compiled code."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from checks import H200
from torch import Tensor

from ksopt.jit import nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.batch_last_wgmma_tf32x3 import ColumnsLauncher, Config
from ksopt.kernels.launcher import Launcher
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern

batch_last_wgmma_tf32x3 = family_of("batch_last_wgmma_tf32x3")


def problem_of(shape: tuple[int, int, int, int], exact: bool = True) -> Problem:
    return Problem.of_factor(Pattern(*shape), "float32", True, exact)


def instructions(cubin: bytes) -> Counter[int]:
    """How often each operation code of sm_90 stands in a kernel's machine code."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", cubin, sections + at * entry_bytes) for at in range(count)
    ]
    name_table = headers[names][4]
    counts: Counter[int] = Counter()
    for name, _, _, _, offset, size in headers:
        if cubin.startswith(b".text.", name_table + name):
            for at in range(offset, offset + size, 16):
                counts[struct.unpack_from("<Q", cubin, at)[0] & 0xFFF] += 1
    return counts


HGMMA, FADD = 0xDF0, 0x221


def some_tiles() -> list[tuple[Problem, Config]]:
    """One of each way to chain products, over patterns of one stage a tile and of many."""
    draw = random.Random(0)
    chosen: dict[tuple[object, ...], tuple[Problem, Config]] = {}
    for shape in ((4, 48, 48, 16), (2, 192, 64, 4), (2, 128, 128, 4), (1, 384, 384, 6)):
        problem = problem_of(shape)
        every = list(batch_last_wgmma_tf32x3.configs(problem, H200))
        for c in draw.sample(every, len(every)):
            one = c.stages_per_tile(problem.pattern) == 1
            chosen.setdefault((c.groups_n > 1, c.mt, c.chain, c.pending, one), (problem, c))
    return list(chosen.values())


@pytest.mark.slow
def test_no_product_and_no_addition_is_lost_in_compilation() -> None:
    """Which has happened: see the last assertion of ``BatchLastWgmmaTf32x3Tile``."""
    for problem, c in some_tiles():
        code = nvrtc.cubin(batch_last_wgmma_tf32x3.source(problem, c), "sm_90a").data
        counts = instructions(code)
        steps = c.kl // 8 * c.mt  # of a stage, whose loops are all unrolled
        assert counts[HGMMA] == 3 * steps, (problem.pattern, c)
        # Sums of chains, and what is left of every value of x.
        assert counts[FADD] >= steps // c.chain * c.nt * 4 + 4 * steps, (problem.pattern, c)


class Recording(Launcher):
    """Stands in for a kernel: keeps what it is called with."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, Geometry(128, 0, 64, 1, 1), kernel=0, fallback=None)
        self.calls: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        self.calls.append((x, weight, out))
        return x

    def packed(self, weight: Tensor) -> Tensor:
        self.calls.append((weight, weight, None))
        return weight.reshape(1, 1, 1, -1).clone()


@pytest.mark.parametrize(
    ("make", "fit"),
    [
        (lambda: torch.randn(64, 8), True),
        (lambda: torch.randn(64, 2, 6), True),
        (lambda: torch.randn(64, 2, 1, 6), True),
        (lambda: torch.randn(64, 16)[:, :8], True),
        (lambda: torch.randn(64, 16)[:, 4:12], True),
        (lambda: torch.randn(64, 16)[:, 1:9], False),  # rows begin anywhere
        (lambda: torch.randn(64, 13)[:, :8], False),
        (lambda: torch.randn(64, 7), False),  # those of y do
        (lambda: torch.randn(8, 64).T, False),
        (lambda: torch.randn(64, 6, 2).transpose(1, 2), False),
        (lambda: torch.randn(64), False),
        (lambda: torch.randn(64, 16)[:, ::2], False),
    ],
)
def test_rows_that_are_not_aligned_go_to_the_older_kernel(
    make: Callable[[], Tensor], fit: bool
) -> None:
    problem = problem_of((2, 8, 8, 4))
    pack, multiply, older = (Recording(problem) for _ in range(3))
    launch = ColumnsLauncher("a form", pack, multiply, lambda: older)
    x, weight = make(), torch.randn(problem.pattern.weight_shape)
    out = torch.empty_like(x)
    launch(x, weight, out)
    used, unused = (multiply, older)[:: 1 if fit else -1]
    assert not unused.calls
    assert used.calls[0][0] is x
    assert (used.calls[0][1] is weight) is not fit
    assert used.calls[0][2] is out
    assert all(call[2] is None for call in pack.calls)


def test_tiles_that_read_weights_in_one_order_share_what_is_packed() -> None:
    problem = problem_of((4, 96, 96, 16))
    sizes: dict[tuple[int, int], set[int]] = {}
    for config in batch_last_wgmma_tf32x3.configs(problem, H200):
        layers = config.stages_per_tile(problem.pattern) * config.kl // 4
        order = (config.outputs, layers)
        sizes.setdefault(order, set()).add(config.packed_elements(problem.pattern))
    assert len(sizes) > 1
    assert all(len(counts) == 1 for counts in sizes.values())


def test_sums_in_the_tensor_cores_are_short_where_c_is() -> None:
    for c, longest in ((64, 1), (96, 1), (128, 2), (1024, 2)):
        tiles = batch_last_wgmma_tf32x3.configs(problem_of((4, 64, c, 4)), H200)
        assert max(tile.chain for tile in tiles) == longest


def test_registers_that_are_taken_were_given_up() -> None:
    """To ask for more than a block has waits for ever."""
    for groups_m in (2, 3, 4):
        config = Config(1, groups_m, 2, 16, 16, 6, False, 2, 0, 66)
        at_start = 65_536 // config.threads // 8 * 8
        taken = 128 * (24 + config.multipliers * config.register_limit)
        assert taken <= at_start * config.threads
        assert config.register_limit % 8 == 0
