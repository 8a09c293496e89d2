"""Kernels on warpgroup products as the emulator runs them, those that pack weights included."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuda_emulator import EmulatedKernel, Emulator, Instance, OnDemand
from torch import Tensor

from ksopt.epilogue import After
from ksopt.kernels.families.common.packed_weight import PackedFamily
from ksopt.kernels.problem import Geometry, Problem


def without_predicates(header: str, text: str) -> str:
    """A header, with calls of the emulator instead of the things that need a PTX predicate."""
    if header == "common/mbarrier.cuh":
        wait = r"uint32 over = 0;.*?memory\"\);\n\s*\}"
        call = "emulate::wait_for_phase(shared_address(&state), unsigned(parity));"
        text, count = re.subn(wait, call, text, flags=re.DOTALL)
        assert count == 1
    if header == "common/wgmma_16bit.cuh":
        text = text[: text.index("#define")] + (
            "template <typename T, int N> void wgmma_mma_async_16(float (&sums)[N / 2],"
            " const uint32 (&a)[4], uint64 b, int accumulate) {\n"
            "  using namespace emulate::ptx;\n"
            "  constexpr auto widen = std::is_same_v<T, Float16> ? cvt_f32_f16 : widen_bf16;\n"
            "  emulate::ptx::wgmma_mma_async_16<N, widen>(sums, a, b, accumulate);\n"
            "}\n"
        )
    if header == "common/wgmma_rows.cuh":
        text = text[: text.index("#define")] + (
            "template <typename T, int N> void multiply_rows(float (&sums)[N / 2], uint64 a,"
            " uint64 b, int accumulate) {\n"
            "  using namespace emulate::ptx;\n"
            "  constexpr auto widen = std::is_same_v<T, Float16> ? cvt_f32_f16 : widen_bf16;\n"
            "  const int warp = threadIdx.x / 32 % 4;\n"
            "  emulate::ptx::multiply_rows<N, widen>(sums, a, b, warp, accumulate);\n"
            "}\n"
        )
    if header == "common/wgmma_tf32.cuh":
        text = text[: text.index("#define")] + (
            "template <int N> void wgmma_mma_async_tf32(float (&sums)[N / 2],"
            " const uint32 (&a)[4], uint64 b, int accumulate) {\n"
            "  emulate::ptx::wgmma_mma_async_tf32<N>(sums, a, b, accumulate);\n}\n"
        )
    return text


@dataclass(frozen=True)
class PackedKernel:
    """As `packing_launcher.PackedLauncher`, emulated: one kernel packs, the other multiplies."""

    pack: EmulatedKernel
    multiply: EmulatedKernel

    def __call__(self, x: Tensor, weight: Tensor, seed: int = 0) -> Tensor:
        return self.multiply(x, self.pack.packed(weight, seed), seed)

    def with_epilogue(
        self, x: Tensor, weight: Tensor, after: After, seed: int = 0
    ) -> Tensor | None:
        return self.multiply.with_epilogue(x, self.pack.packed(weight, seed), after, seed)

    def launched_as(self, geometry: Geometry) -> PackedKernel:
        return replace(self, multiply=self.multiply.launched_as(geometry))


def instances(family: PackedFamily[Any], problem: Problem, tile: Any) -> list[Instance]:
    """The kernel that packs, and the one that multiplies."""
    return [
        Instance(
            family.pack_problem(problem, tile),
            family.pack_source(problem, tile),
            family.pack_geometry(problem, tile),
        ),
        Instance(problem, family.source(problem, tile), family.geometry(problem, tile)),
    ]


def build(
    emulator: Emulator,
    family: PackedFamily[Any],
    cases: Iterable[tuple[Problem, Any]],
    edit: Callable[[str, str], str] = without_predicates,
) -> list[PackedKernel]:
    """A kernel for each problem and tile of a family."""
    built = emulator.build([one for case in cases for one in instances(family, *case)], edit)
    return [PackedKernel(*pair) for pair in zip(built[::2], built[1::2], strict=True)]


def on_demand(
    emulator: Emulator, family: PackedFamily[Any], cases: Sequence[tuple[Problem, Any]]
) -> OnDemand[tuple[Problem, Any], PackedKernel]:
    """The kernels of a sweep, of which few may be run: see `build` and `OnDemand`."""
    return OnDemand(functools.partial(build, emulator, family), cases)
