"""Tiles of csrc/cuda/chain_wgmma16.cuh: the supported chains, and the tiles that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.epilogue import Activation, activation_of
from ksopt.kernels import problem
from ksopt.kernels.families.common.two_factors import multiplier_registers, unsupported_form
from ksopt.kernels.families.common.weight_packer import MOST_SIBLINGS
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec
from ksopt.patterns.chain import Chain, Pattern
from ksopt.patterns.divisors import divisors

_BARRIER_BYTES = 128
_MOST_SHARED_BIAS = 1536  # features
_OTHER_REGISTERS = 44  # of a thread that multiplies, beside sums and operands


@dataclass(frozen=True)
class Epilogue(problem.Epilogue):
    """The operations of the kernel beside the products.

    Attributes:
        middle: activation of the right factor's result, before the left one; of two chains, of
            the first one's result.
        keeps_z: whether the values between the factors are written to memory too.
    """

    middle: Activation = "none"
    keeps_z: bool = False

    @classmethod
    def of(cls, of_problem: problem.Problem) -> Epilogue:
        """The epilogue of a problem of one layer or of two, of which one launch computes all."""
        first, last = of_problem.epilogue, of_problem.layers()[-1].epilogue
        is_one = of_problem.second is None
        middle: Activation = "none" if is_one else activation_of(first.activation)
        return cls(last.bias, last.activation, last.residual, last.in_float32, middle)


@dataclass(frozen=True)
class Shape:
    """Chains (1,b1,c1,d1)*(a2,b2,c2,1) of the same patterns on one x.

    Attributes:
        left, right: the chain's patterns; x meets ``right`` first.
        siblings: how many chains.
    """

    left: Pattern
    right: Pattern
    siblings: int = 1

    @classmethod
    def of(cls, chain: Chain, siblings: int = 1) -> Shape:
        """The shape of a chain of two factors."""
        left, right = chain
        return cls(left, right, siblings)

    @property
    def l_of_block(self) -> int:
        """Values of z of one class that a block of the right factor computes."""
        return self.right.b // self.left.d

    @property
    def tiles_of_block(self) -> int:
        """`l_of_block` in tiles of 8, the last one padded."""
        return -(-self.l_of_block // 8)

    @property
    def classes(self) -> int:
        """Classes j of all siblings."""
        return self.siblings * self.left.d

    @property
    def steps(self) -> int:
        """Steps of 16 values of z in a class."""
        return -(-self.right.a * self.tiles_of_block // 2)

    def flops(self, batch: int) -> int:
        """Operations of the products, without padding."""
        return 2 * batch * self.siblings * (self.left.nnz + self.right.nnz)

    def bytes(self, batch: int) -> int:
        """Bytes of x, the weights and y, each moved once."""
        features = self.right.in_features + self.siblings * self.left.out_features
        return 2 * (batch * features + self.siblings * (self.left.nnz + self.right.nnz))

    def __str__(self) -> str:
        times = "" if self.siblings == 1 else f"{self.siblings} x "
        return f"{times}{self.left}*{self.right}"


@dataclass(frozen=True)
class Config:
    """Template arguments of ``ChainTile``, in its order.

    Attributes:
        cluster: blocks that share the work on their rows; several are for few rows.
    """

    groups: int
    blocks: int
    nk: int
    ks: int
    splits: int
    slot_j: int
    slot_p: int
    stages: int
    cluster: int = 1

    @property
    def rows(self) -> int:
        """Rows of x that a block has at a time."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.groups + 1)

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies."""
        return multiplier_registers(self.groups, self.blocks)

    @property
    def at_once(self) -> int:
        """Steps of a group of products, as ``AT_ONCE`` in the template."""
        most = min(self.slot_p, 6)
        return max(n for n in range(1, most + 1) if self.slot_p % n == 0)

    @property
    def packing(self) -> Config:
        """The plainest tile that reads the same packed weights."""
        return replace(self, groups=1, blocks=1, slot_j=1, slot_p=1, stages=2, cluster=1)

    def columns(self, s: Shape) -> int:
        """Columns of z that a warpgroup computes at a time."""
        return s.classes * (s.tiles_of_block // self.splits) * 8

    def first_slot_bytes(self, s: Shape) -> int:
        """Rows of x, and the weights of the right factor for them."""
        return (self.rows + self.columns(s)) * self.ks * 2

    @property
    def second_slot_bytes(self) -> int:
        """Weights of the left factor."""
        return self.slot_j * self.slot_p * self.nk * 32

    def stash_bytes(self, s: Shape) -> int:
        """z of a block's rows."""
        return self.groups * s.classes * s.steps * 2048

    def ring_slots(self, s: Shape) -> tuple[int, int]:
        """Slots that pass through the ring for each of the two factors."""
        parts = -(-s.right.c // self.ks)
        of_chunk = min(s.left.d, 8) // self.slot_j * (s.steps // self.slot_p)
        return self.z_blocks(s) * parts, self.chunks(s) * of_chunk

    def z_blocks(self, s: Shape) -> int:
        """Parts of z that are computed at a time."""
        return s.right.a * self.splits

    def chunks(self, s: Shape) -> int:
        """Chunks of outputs of all siblings."""
        return s.siblings * -(-s.left.b // self.nk) * (s.left.d // min(s.left.d, 8))

    def turns(self, s: Shape, after: problem.Epilogue) -> int:
        """Chunks of outputs, or with a gate pairs of chunks, that are computed together."""
        return self.chunks(s) // (2 if after.is_gated else 1)

    def packed_elements(self, s: Shape) -> int:
        """Elements of the packed weights of all siblings."""
        first, second = self.ring_slots(s)
        return first * self.columns(s) * self.ks + second * self.second_slot_bytes // 2

    def shared_bytes(self, s: Shape) -> int:
        """Dynamic shared memory of a block."""
        slot = max(self.first_slot_bytes(s), self.second_slot_bytes)
        return self.fixed_bytes(s) + self.stages * slot

    def fixed_bytes(self, s: Shape) -> int:
        """Shared memory beside the ring: barriers, the bias, z."""
        features = s.siblings * s.left.out_features
        bias = -(-features * 2 // 128) * 128 if features <= _MOST_SHARED_BIAS else 0
        return _BARRIER_BYTES + bias + self.stash_bytes(s)


def unsupported_reason(s: Shape, dtype: str, device: DeviceSpec) -> str | None:
    """Why no kernel of this family computes the chains on ``device``, or None if one does."""
    left, right = s.left, s.right
    reason = unsupported_form(left, right, dtype, device)
    if reason is not None:
        return reason
    if not 1 <= s.siblings <= MOST_SIBLINGS:
        return f"{s.siblings} siblings are not 1 to {MOST_SIBLINGS}"
    if left.d not in (1, 2, 4) and left.d % 8 != 0:
        return f"d = {left.d} of the left factor is not 1, 2, 4 or a multiple of 8"
    if right.b % left.d != 0:
        return f"b = {right.b} of the right factor is not a multiple of the left one's d = {left.d}"
    if right.c % 8 != 0 or left.out_features % 8 != 0:
        return "rows of x's blocks and of y are not whole runs of 16 bytes"
    if next(configs(s, device), None) is None:
        return "no tile fits in shared memory and registers"
    return None


def configs(
    s: Shape, device: DeviceSpec, after: problem.Epilogue | None = None
) -> Iterator[Config]:
    """All tiles worth considering, in no order.

    Args:
        s: chains that are supported.
        device: what the tiles must fit into.
        after: the epilogue: a residual or a gate takes registers.
    """
    after = after or problem.Epilogue()
    j = min(s.left.d, 8)
    run = 8 * max(1, 4 // s.left.d)
    most = max(-(-s.left.b // run) * run, run)
    for groups, blocks in ((1, 1), (1, 2), (2, 1), (3, 1)):
        for splits in divisors(s.tiles_of_block):
            for ks in (16, 32, 48, 64, 96, 128):
                if -(-s.right.c // 16) * 16 % ks != 0:
                    continue
                for nk in range(run, min(256 // j, most) + 1, run):
                    if nk % 16 != 0 and nk != most:
                        continue
                    if -(-s.left.b // nk) * nk * 8 > s.left.b * 9 and nk != run:
                        continue  # too much would be filled up
                    tile = Config(groups, blocks, nk, ks, splits, 1, 1, 2)
                    tile = _with_slots(tile, s)
                    stages = _most_stages(tile, s, device)
                    if _fits_registers(tile, s, after) and stages >= 2:
                        for cluster in _clusters(tile, s, after):
                            if cluster <= device.multiprocessors:  # of a part of a GPU, too
                                yield replace(tile, stages=stages, cluster=cluster)


def template_arguments(s: Shape, tile: Config) -> tuple[str, str]:
    """The arguments of ``ChainPattern``, and those of ``ChainTile`` after the pattern."""
    left, right = s.left, s.right
    pattern = (right.a, right.b, right.c, left.b, left.d, s.siblings)
    return ", ".join(map(str, pattern)), ", ".join(map(str, fields(tile)))


def fields(tile: Config) -> tuple[int, ...]:
    """A tile's numbers, in order."""
    return astuple(tile)


def _clusters(tile: Config, s: Shape, after: problem.Epilogue) -> list[int]:
    """The numbers of blocks that can share a tile's work, each with blocks of z and chunks."""
    most = 1 if tile.blocks > 1 else min(tile.z_blocks(s), tile.turns(s, after))
    return [n for n in (1, 2, 4, 8) if n <= most]


def _with_slots(tile: Config, s: Shape) -> Config:
    """The tile, with as much of the left factor in a slot as one of the right has room for."""
    first = tile.first_slot_bytes(s)
    choices = [(1, steps) for steps in divisors(s.steps)]
    choices += [(j, s.steps) for j in divisors(min(s.left.d, 8))]
    sizes = sorted((j * steps, j, steps) for j, steps in choices)
    fitting = [one for one in sizes if one[0] * tile.nk * 32 <= first] or sizes[:1]
    _, j, steps = fitting[-1]
    return replace(tile, slot_j=j, slot_p=steps)


def _most_stages(tile: Config, s: Shape, device: DeviceSpec) -> int:
    limit = min(SHARED_LIMIT, device.shared_bytes // tile.blocks - 1024)
    slot = max(tile.first_slot_bytes(s), tile.second_slot_bytes)
    return min((limit - tile.fixed_bytes(s)) // slot, 8)


def _fits_registers(tile: Config, s: Shape, after: problem.Epilogue) -> bool:
    first = tile.columns(s) // 2 + tile.ks // 16 * 8
    sums = min(s.left.d, 8) * tile.nk // 2
    second = sums + sums // 2 * (after.residual + after.is_gated) + tile.at_once * 8
    return tile.columns(s) <= 256 and max(first, second) + _OTHER_REGISTERS <= tile.registers
