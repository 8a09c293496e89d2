"""Chain kernels as the emulator runs them, and what their results may be."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import chain_packing
import torch
from cuda_emulator import EmulatedKernel, EmulationError, Emulator, Instance, OnDemand, _Range
from packed_kernels import without_predicates
from torch import Tensor
from torch.nn import functional

from ksopt.epilogue import activation_of
from ksopt.kernels.families.common import (
    chain_launcher,
    chain_mlp_launcher,
    chain_mlp_tile,
    chain_pack_launcher,
    weight_packer,
)
from ksopt.kernels.families.common.chain_launcher import Arguments
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

ACTIVATIONS = {
    "none": lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}


@dataclass(frozen=True)
class Operands:
    """The operands of a call: x (rows, in_features), a factor of each sibling, bias, residual."""

    x: Tensor
    left: list[Tensor]
    right: list[Tensor]
    bias: Tensor
    residual: Tensor

    @classmethod
    def random(cls, s: Shape, dtype: str, rows: int, seed: int, device: str = "cpu") -> Operands:
        """Fresh ones; rows of x and residual lie apart, with NaN between them."""
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(torch, dtype)

        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, generator=generator) * scale).to(kind).to(device)

        features = s.siblings * s.left.out_features
        apart = torch.full(
            (max(rows, 1), s.right.in_features + features + 16), float("nan"), dtype=kind
        ).to(device)
        x, residual = apart[:rows, : s.right.in_features], apart[:rows, -features:]
        x.copy_(draw(rows, s.right.in_features))
        residual.copy_(draw(rows, features))
        left = [draw(*s.left.weight_shape, scale=s.left.c**-0.5) for _ in range(s.siblings)]
        right = [draw(*s.right.weight_shape, scale=s.right.c**-0.5) for _ in range(s.siblings)]
        return cls(x, left, right, draw(features), residual)

    def for_epilogue(self, epilogue: Epilogue) -> Operands:
        """The same, with a residual of as many features as the result has."""
        if not epilogue.is_gated:
            return self
        return replace(self, residual=self.residual[:, : self.residual.shape[1] // 2])


def expected(o: Operands, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sizes of its terms added up."""
    outs, sizes = [], []
    for left, right in zip(o.left, o.right, strict=True):
        z = ACTIVATIONS[epilogue.middle](ks_reference(o.x.double(), right.double()))
        outs.append(ks_reference(z, left.double()))
        sizes.append(ks_reference(z.abs(), left.double().abs()))
    y, size = torch.cat(outs, -1), torch.cat(sizes, -1)
    if epilogue.bias:
        y, size = y + o.bias.double(), size + o.bias.double().abs()
    activate = ACTIVATIONS[activation_of(epilogue.activation)]
    if not epilogue.is_gated:
        y = activate(y)
    else:
        (a, b), (size_of_a, size_of_b) = y.chunk(2, -1), size.chunk(2, -1)
        a = activate(a)
        y = a * b
        # By the product rule; the gate is rounded before it multiplies.
        size = size_of_a * (b.abs() + 2**-8 * size_of_b) + a.abs() * size_of_b + y.abs()
    if epilogue.residual:
        y, size = y + o.residual.double(), size + o.residual.double().abs()
    return y, size


def assert_mlp_right(y: Tensor, o: Operands, last: Operands, epilogue: Epilogue) -> None:
    """As `assert_right`, h and the second z rounded too."""
    h, size = expected(o, Epilogue(activation=epilogue.middle, bias=epilogue.bias))
    second = replace(last, x=h, residual=o.residual[:, : last.bias.numel()])
    after = Epilogue(bias=epilogue.bias, residual=epilogue.residual)
    truth, sizes = expected(second, after)
    # Roundings of the first z and of h move y by no more than the second chain of their sizes.
    spread = expected(
        replace(
            second, x=size, left=[w.abs() for w in last.left], right=[w.abs() for w in last.right]
        ),
        Epilogue(),
    )[0]
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[y.dtype]
    allowed = unit * (truth.abs() + sizes + 2.3 * spread) + 1e-6 * (sizes + spread) + 1e-6
    wrong = ~((y.double() - truth).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong"
    # Roundings add up by chance: a wrong order of features would be a hundred times as much.
    assert (y.double() - truth).norm() <= 4 * unit * truth.norm()


def assert_right(y: Tensor, o: Operands, epilogue: Epilogue) -> None:
    """Every element within one rounding of each z and one of y, as two products have them.

    An activation makes a difference at most 1.13 times as large; one between the factors is rounded
    too, and near zero what it gives may be smaller than what it takes.
    """
    truth, size = expected(o, epilogue)
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[o.x.dtype]
    roundings = 1 if epilogue.middle == "none" else 4
    own = 2**-24 if epilogue.in_float32 else unit
    allowed = own * truth.abs() + 1.2 * unit * roundings * size + 1e-6 * size + 1e-6
    assert y.shape == truth.shape
    assert y.dtype == (torch.float32 if epilogue.in_float32 else o.x.dtype)
    wrong = ~((y.double() - truth).abs() <= allowed)  # also true of NaN
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong, the first at "
        f"{wrong.nonzero()[0].tolist()}: {y[wrong][0].item()} instead of {truth[wrong][0].item()}"
    )


def build(
    emulator: Emulator,
    cases: list[tuple[Shape, Config, Epilogue, str]],
    edit: Callable[[str, str], str] = without_predicates,
) -> list[EmulatedKernel]:
    """A kernel for each case."""
    instances = [
        _instance(
            s.left,
            tile,
            chain_launcher.source(s, tile, epilogue, dtype),
            dtype,
            tile.shared_bytes(s),
        )
        for s, tile, epilogue, dtype in cases
    ]
    return emulator.build(instances, edit)


def on_demand(
    emulator: Emulator, cases: list[tuple[Shape, Config, Epilogue, str]]
) -> OnDemand[tuple[Shape, Config, Epilogue, str], EmulatedKernel]:
    """The kernels of a sweep, of which few may be run: see `build` and `OnDemand`."""
    return OnDemand(functools.partial(build, emulator), cases)


def build_mlps(
    emulator: Emulator, cases: list[tuple[Shape, Shape, chain_mlp_tile.Config, Epilogue, str]]
) -> list[EmulatedKernel]:
    """A kernel for each case of two chains."""
    instances = [
        _instance(
            first.left,
            tile,
            chain_mlp_launcher.source(first, second, tile, epilogue, dtype),
            dtype,
            tile.shared_bytes((first, second)),
        )
        for first, second, tile, epilogue, dtype in cases
    ]
    return emulator.build(instances, without_predicates)


def _instance(pattern: Pattern, tile: Any, source: str, dtype: str, shared: int) -> Instance:
    geometry = Geometry(tile.threads, shared, tile.rows, 1, 1)
    return Instance(Problem.of_factor(pattern, dtype, False), source, geometry)


def run(
    kernel: EmulatedKernel, case: tuple[Shape, Config, Epilogue, str], o: Operands, sms: int = 2
) -> Tensor:
    """y, by the emulated kernel on ``sms`` multiprocessors.

    Raises:
        EmulationError: an access or a wait was wrong.
    """
    return run_keeping(kernel, case, o, sms)[0]


def run_keeping(
    kernel: EmulatedKernel, case: tuple[Shape, Config, Epilogue, str], o: Operands, sms: int = 2
) -> tuple[Tensor, Tensor]:
    """As `run`, and what is between the factors, [siblings, rows, features].

    What is not stored has no features.
    """
    s, tile, epilogue, _ = case
    packed = chain_packing.pack(o.left, o.right, chain_packing.pack_index(s, tile))
    launch = chain_launcher.launch_of(tile, o.x.shape[0], sms)
    shared = tile.shared_bytes(s)
    z_features = s.right.out_features if epilogue.keeps_z else 0
    of_all = s.siblings * z_features
    memory = _launch(kernel, launch, tile, shared, epilogue, o, packed, o.bias, of_all)
    rows, features = o.residual.shape
    y, z = memory.split([rows * features, rows * of_all])
    return y.view(rows, features), z.view(s.siblings, rows, z_features)


def run_mlp(
    kernel: EmulatedKernel,
    case: tuple[Shape, Shape, chain_mlp_tile.Config, Epilogue, str],
    o: Operands,
    last: Operands,
    sms: int = 2,
) -> Tensor:
    """y of the two chains: ``o`` has x, the residual and the first chain, ``last`` the second.

    Raises:
        EmulationError: an access or a wait was wrong.
    """
    first, second, tile, epilogue, _ = case
    index = chain_packing.mlp_pack_index(first, second, tile)
    packed = chain_packing.pack([o.left[0], o.right[0]], [last.left[0], last.right[0]], index)
    launch = chain_launcher.launch_of(tile.first, o.x.shape[0], sms)
    shared = tile.shared_bytes((first, second))
    o = replace(o, residual=o.residual[:, : second.left.out_features])
    y = _launch(kernel, launch, tile, shared, epilogue, o, packed, last.bias, hidden=o.bias)
    return y.view(o.residual.shape)


def build_packers(
    emulator: Emulator, cases: list[tuple[Shape, Config]], are_layers: bool = False
) -> OnDemand[Instance, EmulatedKernel]:
    """A kernel that packs weights for each case."""
    return emulator.on_demand(
        [
            _instance(s.left, tile, chain_pack_launcher.source(s, tile, are_layers), "bfloat16", 0)
            for s, tile in cases
        ]
    )


def build_mlp_packers(
    emulator: Emulator, cases: list[tuple[Shape, Shape, chain_mlp_tile.Config, Epilogue, str]]
) -> list[EmulatedKernel]:
    """A kernel that packs the weights of both chains for each case."""
    instances = [
        _instance(
            *(first.left, tile, chain_mlp_launcher.pack_source(first, second, tile), dtype, 0)
        )
        for first, second, tile, _, dtype in cases
    ]
    return emulator.build(instances, without_predicates)


def run_packer(
    kernel: EmulatedKernel,
    elements: int,
    memory: Tensor,
    weights: Sequence[Tensor],
    chains: int | None = None,
) -> Tensor:
    """Weights that are views of ``memory``, packed: so many elements.

    Raises:
        EmulationError: an access was wrong.
    """
    packed = _aligned(torch.full((elements,), 77, dtype=memory.dtype))
    arguments = weight_packer.arguments_of(weights, chains or len(weights) // 2, packed)
    threads, blocks = chain_pack_launcher.THREADS, chain_pack_launcher.blocks_for(elements)
    _emulate(kernel, arguments, (blocks, threads, 0), (memory, torch.empty(0), packed))
    return packed


def _launch(
    kernel: EmulatedKernel,
    launch: tuple[int, int],
    tile: Any,
    shared: int,
    epilogue: Epilogue,
    o: Operands,
    packed: Tensor,
    bias: Tensor,
    z_features: int = 0,
    hidden: Tensor | None = None,
) -> Tensor:
    """y and, of so many features, what is between the factors, side by side.

    ``hidden`` is the bias of the first of two chains.
    """
    rows, features = o.residual.shape
    weights = _aligned(torch.cat([packed, bias, *([] if hidden is None else [hidden])]))
    apart = _aligned(o.x._base.reshape(-1))  # x and residual
    count = rows * (features + z_features)
    dtype = torch.float32 if epilogue.in_float32 else o.x.dtype
    y = _aligned(torch.full((count,), float("nan"), dtype=dtype))
    blocks, of_block = launch
    size, stride = o.x.element_size(), o.x.stride(0)
    kind, last = Arguments, ()
    if hidden is not None:
        kind = chain_mlp_launcher.Arguments
        place = weights.data_ptr() + (packed.numel() + bias.numel()) * size
        last = (place if epilogue.bias else 0,)
    arguments = kind(
        apart.data_ptr(),
        weights.data_ptr(),
        weights.data_ptr() + packed.numel() * size if epilogue.bias else 0,
        apart.data_ptr() + o.residual.storage_offset() * size if epilogue.residual else 0,
        y.data_ptr(),
        *(rows, stride, features, stride, of_block),
        y.data_ptr() + rows * features * size if z_features else 0,
        *last,
    )
    _emulate(kernel, arguments, (blocks, tile.threads, shared), (apart, weights, y))
    return y


def _emulate(
    kernel: EmulatedKernel,
    arguments: ctypes.Structure,
    launch: tuple[int, int, int],
    memory: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Launch (blocks, threads, shared bytes); of the memory only the last may be written."""
    blocks, threads, shared = launch
    message = ctypes.create_string_buffer(2048)
    ranges = [_Range(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in memory]
    status = kernel._loaded.emulate_launch(
        kernel._index,
        ctypes.byref(arguments),
        ctypes.c_size_t(ctypes.sizeof(arguments)),
        *(blocks, threads, ctypes.c_size_t(shared), 0),
        *(ctypes.byref(r) for r in ranges),
        *(message, ctypes.c_size_t(len(message))),
    )
    if status != 0:
        raise EmulationError(kernel._with_places(message.value.decode()))


def _aligned(tensor: Tensor) -> Tensor:
    """A copy that begins at a multiple of 128 bytes."""
    memory = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
    skip = -memory.data_ptr() % 128 // tensor.element_size()
    return memory[skip : skip + tensor.numel()].copy_(tensor)
