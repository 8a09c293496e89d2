"""Chains of any length and size with their epilogue, in one launch (csrc/cuda/chain_mma.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ksopt.epilogue import ACTIVATIONS
from ksopt.kernels.families.base import ANY_TYPE, KernelFamily, register_family
from ksopt.kernels.families.common import chain_mma_launcher
from ksopt.kernels.families.common.chain_cost import ACTIVATION_US
from ksopt.kernels.families.common.chain_mma_launcher import LaunchChain, LaunchMlp
from ksopt.kernels.families.common.chain_mma_tile import Config, Stage
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.families.common.weight_packer import MOST_FACTORS, MOST_SIBLINGS
from ksopt.kernels.problem import RESERVED_SHARED, SHARED_LIMIT, DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

_MOST_BLOCKS = 6
_REGISTERS, _MOST_REGISTERS = 65536, 255
_FEWEST_WARPS = 8  # of a multiprocessor: fewer hide no latency
_SHORTEST_SPLIT_SUM = 32  # three TF32 products of shorter ones are less exact than cuBLAS's sums
_LARGEST_INT = 2**31 - 1
# Small blocks are padded to 8 outputs and 16 sums. Where that multiplies the weights' memory by
# more than the first number, and it is more bytes than the second, the chain is refused.
_MOST_TIMES, _FEW_BYTES = 8, 2**22

# The cost model's constants, of one multiprocessor in a microsecond. Fitted to 168 tiles of 25
# chains (bfloat16 and float32, both layouts, one H200, b3caeff): eight of ten take 0.87 to 1.17
# times what is predicted. The rate of memory is an H200's, as in other models.
_DRAM_BYTES = 32_300.0
_CACHE_BYTES = 168_000.0  # of weights, all that warps ask for at a time
_STEPS = {1: 1_780.0, 3: 212.0}  # products of tensor cores, by those of two numbers
_ADDED = 682_000.0  # multiplications and additions without tensor cores
_LAID = 11_100.0  # elements of x, or of y, one by one
_ROUND_US = 0.107  # a warp's unit: its first weights, its results
_STEP_US = 0.053
_TILE_US = 1.48  # loads, stores and barriers of a tile
_LAUNCH_US = 4.2
_OVERLAP = 1.42


@register_family
class ChainMma(KernelFamily[Config]):
    """Chains, siblings, two layers, single factors with an epilogue: one launch, y written once."""

    name = "chain_mma"
    dtypes = ANY_TYPE
    capability: ClassVar[tuple[int, int]] = (8, 0)
    packs_from_d = 1
    takes_chains = True
    takes_mlps = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        patterns = _patterns(problem)
        if problem.is_factor:
            return "one factor's product alone has other kernels"
        if problem.siblings > MOST_SIBLINGS:
            return f"it computes at most {MOST_SIBLINGS} siblings, and these are {problem.siblings}"
        if len(patterns) > MOST_FACTORS:
            return f"it computes at most {MOST_FACTORS} factors, and this has {len(patterns)}"
        if problem.epilogue.activation not in ACTIVATIONS:
            return f"{problem.epilogue.activation} is not one of {', '.join(ACTIVATIONS)}"
        row_bytes = problem.chain.out_features * (4 if problem.dtype == "float32" else 2)
        if problem.siblings > 1 and not problem.batch_last and row_bytes % 16:
            return f"a sibling's row of {row_bytes} bytes is no multiple of 16 bytes"
        if problem.second is not None and problem.dtype == "float32" and problem.exact:
            return "two layers in exact float32 are as fast by a launch each, and more accurate"
        features = max(max(p.in_features, p.out_features) for p in patterns)
        least = Config(16, 4, 1, 1, _groups(problem)[-1], 1)
        stages = self.stages(problem, least)
        if 16 * features > _LARGEST_INT or least.shared_bytes(stages) > device.shared_bytes:
            return f"16 rows of {features} features do not fit in shared memory"
        packed = sum(one.packed_bytes for one in stages) * least.groups * problem.siblings
        weights = sum(p.nnz for p in patterns) * stages[0].size * problem.siblings
        if packed > _FEW_BYTES and packed > _MOST_TIMES * weights:
            return f"its weights would take {packed} bytes, where these take {weights}"
        if next(self.configs(problem, device), None) is None:
            return "no tile fits in shared memory"
        return None

    def stages(self, problem: Problem, config: Config) -> tuple[Stage, ...]:
        """The factors, or a group's shares, in the order in which x meets them."""
        size = 4 if problem.dtype == "float32" else 2
        patterns = [replace(p, a=p.a // config.groups) for p in _patterns(problem)]
        stages = []
        for at, p in enumerate(patterns):
            after = patterns[at + 1] if at + 1 < len(patterns) else None
            tiles = -(-p.b // 8)
            units = -(-tiles // config.nt)
            jt = 2 if _pairs_of_j(p, after) else 1
            products = _products(p.c, problem)
            stages.append(Stage(p, size, products, config.mt, -(-tiles // units), jt))
        return tuple(stages)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        widest = max(-(-p.b // 8) for p in _patterns(problem))
        widths = sorted({min(nt, widest) for nt in (1, 2, 4, 8)})
        limit = min(device.shared_bytes, SHARED_LIMIT + RESERVED_SHARED)
        for groups, bm, mt, nt, warps in itertools.product(
            _groups(problem), (16, 32, 48, 64, 96, 128), (1, 2, 3, 4), widths, (4, 8, 16)
        ):
            if bm % (16 * mt) or (bm > 48 and mt == 1):
                continue
            tile = Config(bm, warps, mt, nt, groups, 1)
            stages = self.stages(problem, tile)
            if max(one.units(bm) for one in stages) < warps and warps > 4:
                continue
            registers = max(72, *(one.registers for one in stages))
            if registers > _MOST_REGISTERS:
                continue
            shared = tile.shared_bytes(stages) + RESERVED_SHARED
            blocks = min(limit // shared, _REGISTERS // (32 * warps * registers), _MOST_BLOCKS)
            if blocks * warps >= _FEWEST_WARPS or (blocks and warps == 4 and bm == 16):
                yield replace(tile, blocks=blocks)

    def shared_bytes(self, problem: Problem, config: Config) -> int:
        return config.shared_bytes(self.stages(problem, config))

    def prepares_weight(self, p: Pattern) -> bool:
        return True

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        stages, size = self.stages(problem, config), 4 if problem.dtype == "float32" else 2
        tiles, groups = -(-batch // config.bm), config.groups
        shares = groups * problem.siblings
        persistent_ctas = min(tiles, max(1, device.multiprocessors * config.blocks // shares))
        of_block = -(-tiles // persistent_ctas)
        blocks = persistent_ctas * shares
        at_a_time = -(-blocks // device.multiprocessors)  # blocks of a multiprocessor
        busy = min(1.0, blocks / device.multiprocessors)

        # The tile's time on each resource, and the time that it waits.
        last = problem.layers()[-1]
        n, m = problem.chain.in_features // groups, last.chain.out_features // groups
        features = n + (2 * m if last.epilogue.residual else m)
        memory = config.bm * features * size / (_DRAM_BYTES / max(busy, 0.3))
        caches = sum(one.packed_bytes for one in stages) / _CACHE_BYTES
        products = added = laid = 0.0
        waits = _TILE_US
        for stage in stages:
            width = stage.nt * -(-stage.tiles // stage.nt) * 8
            outputs = config.bm * stage.planes * width
            if stage.products:
                products += outputs / 128 * stage.steps / _STEPS[stage.products]
            else:
                added += outputs * stage.pattern.c / _ADDED
            rounds = -(-stage.units(config.bm) // config.warps)
            waits += rounds * (_ROUND_US + _STEP_US * stage.steps)
        if stages[0].pattern.d > 1 or problem.batch_last or problem.has_unaligned_rows:
            laid += config.bm * n / _LAID
        if problem.batch_last:
            laid += config.bm * m / _LAID
        activated = 0.0  # of one layer it is in no prediction: `with_epilogue_us`
        if problem.second is not None:
            several = [one for one in problem.layers() if one.epilogue.activation != "none"]
            outputs = sum(one.chain.out_features // groups for one in several)
            activated = config.bm * outputs * ACTIVATION_US
        things = (memory, caches, products, added, laid, activated)
        # A block does one after the other; blocks of a multiprocessor share what there is.
        alone = of_block * (sum(things) + waits)
        together = (of_block * at_a_time * one for one in things)
        return _LAUNCH_US + overlapped((alone, *together), _OVERLAP)

    def sources(self, problem: Problem, config: Config) -> list[str]:
        stages = self.stages(problem, config)
        shared = config.shared_bytes(stages)
        return list(chain_mma_launcher.sources(problem, config, stages, shared))

    def launcher(
        self, problem: Problem, config: Config, device_index: int
    ) -> LaunchChain | LaunchMlp:
        stages = self.stages(problem, config)
        shared = config.shared_bytes(stages)
        kind = LaunchChain if problem.second is None else LaunchMlp
        return kind(problem, config, stages, shared, device_index)


def _patterns(problem: Problem) -> list[Pattern]:
    """The factors of one or two layers, in the order in which x meets them."""
    return [p for chain in problem.chains for p in reversed(chain.patterns)]


def _products(c: int, problem: Problem) -> int:
    """Tensor-core products per pair of numbers, for sums of ``c`` values; 0 where slower."""
    if problem.dtype != "float32":
        return 1 if c > 4 else 0
    if problem.exact:
        return 3 if c >= _SHORTEST_SPLIT_SUM else 0
    return 1 if c > 2 else 0


def _groups(problem: Problem) -> list[int]:
    """Some of the numbers of shares that all factors' i can be divided into."""
    common = math.gcd(*(p.a for p in _patterns(problem)))
    size = 4 if problem.dtype == "float32" else 2
    features = (problem.chain.in_features, problem.layers()[-1].chain.out_features)
    several = [
        groups
        for groups in range(1, common + 1)
        if common % groups == 0
        and (
            groups == 1 or problem.batch_last or all(n // groups * size % 16 == 0 for n in features)
        )
    ]
    return sorted({several[0], several[len(several) // 2], several[-1]})


def _pairs_of_j(p: Pattern, after: Pattern | None) -> bool:
    """Whether results of adjacent j are adjacent in the row that they are written to."""
    return p.d % 2 == 0 and (after is None or (after.d == 1 and after.c % 2 == 0))
