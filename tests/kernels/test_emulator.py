"""The emulator itself: it runs right code rightly, and finds every kind of fault.

The last tests take one thing away from the real headers at a time: each must then fail.
"""

import re
import shutil

import pytest
import torch
from checks import assert_close_to_float64, gpu, operands
from cuda_emulator import EmulationError, Instance, TranslationError, translate

from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern

mma16 = family_of("mma16")
naive = family_of("naive")

THREADS = 64
SCALAR = Pattern(1, 1, 1, 1)
SEEDS = (0, 1, 2)


def instance(body: str, pattern: Pattern = SCALAR, threads: int = THREADS) -> Instance:
    """One block whose threads run ``body``; t is the thread, x, w and y are fp32."""
    source = (
        '#include "common/kernel_params.cuh"\n'
        '#include "common/pdl.cuh"\n'
        '#include "common/ptx.cuh"\n'
        'extern "C" __global__ void __launch_bounds__(1024) small(const Arguments arguments) {\n'
        "  const float* x = static_cast<const float*>(arguments.x);\n"
        "  const float* w = static_cast<const float*>(arguments.weight);\n"
        "  float* y = static_cast<float*>(arguments.y);\n"
        "  const int t = threadIdx.x;\n"
        f"  __shared__ __align__(16) float tile[{4 * THREADS}];\n"
        f"{body}\n}}\n"
    )
    return Instance(
        Problem.of_factor(pattern, "float32", False), source, Geometry(threads, 0, 1, 1, 1)
    )


COPY = "cp_async_16(tile + 4 * t, x + t / 4 * 4, true); cp_async_commit_group();"

# Each kernel reads x[t] and writes y[t] for t below THREADS. The words are of the report.
FAULTS = {
    "read after write": ("tile[t] = x[t]; y[t] = tile[t & ~1];", "race: read .* wrote"),
    "write after read": (
        "tile[t] = x[t]; __syncthreads(); y[t] = tile[t + 1 & 63]; tile[t] = 0;",
        "race: write .* had read",
    ),
    "two writers": (
        "tile[t / 2] = x[t]; __syncthreads(); y[t] = tile[t / 2];",
        "race: write .* wrote",
    ),
    "a warp without its barrier": (
        "tile[t] = x[t]; __syncthreads(); float v = tile[t ^ 1]; tile[t] = v; y[t] = v;",
        "race: read .* wrote",
    ),
    "some of a barrier's threads": (
        "named_barrier_sync(1 + t / 32, 40); y[t] = x[t];",
        "for ever",
    ),
    "a barrier of another warp": (
        "tile[t] = x[t]; named_barrier_sync(1 + t / 32, 32); y[t] = tile[t % 32];",
        "race: read",
    ),
    "a warp's barrier for two warps": (
        "tile[t] = x[t]; __syncwarp(); y[t] = tile[t % 32];",
        "race|nothing wrote",
    ),
    "shared memory as it came": ("y[t] = tile[t];", "nothing wrote there before"),
    "an index beyond its array": ("tile[t * 5] = x[t]; y[t] = x[t];", "beyond its array's bound"),
    "beyond a shared array": (
        "float* p = tile; p[t + 200] = x[t]; y[t] = x[t];",
        "outside the block's shared memory: write",
    ),
    "beyond x": ("y[t] = x[t + 1];", "outside x, weight and y: read of 4 bytes at byte 256 of x"),
    "before x": ("y[t] = x[t - 1];", "outside x, weight and y: read of 4 bytes at byte -4 of x"),
    "beyond y": ("y[t + 1] = x[t];", "outside x, weight and y: write of 4 bytes at byte 256 of y"),
    "write to x": ("const_cast<float*>(x)[t] = 0; y[t] = 0;", "only read there: write .* of x"),
    "read of y": ("y[t] = x[t] + y[63 - t];", "only write there: read .* of y"),
    "y twice": ("y[t] = x[t]; __syncthreads(); y[63 - t] = x[t];", "written twice"),
    "y not at all": ("if (t < 63) y[t] = x[t];", "byte 252 of y was never written"),
    "half a block at a barrier": (
        "if (t < 32) __syncthreads(); y[t] = x[t];",
        "for ever: thread 0 waits at a barrier of the block; thread 32 has ended",
    ),
    "half a warp at a barrier": ("if (t % 2) __syncwarp(); y[t] = x[t];", "lanes of its warp"),
    "misaligned vector": (
        "y[t] = __uint_as_float(reinterpret_cast<const uint4*>(x + t / 8 * 8 + 1)->x);",
        "misaligned access",
    ),
    "misaligned copy": ("cp_async_16(tile + 4 * t, x + 1, true);", "not a multiple of its size"),
    "a copy read too early": (COPY + "y[t] = tile[4 * t];", "copy to it is under way"),
    "a copy waited for by one": (
        COPY + "cp_async_wait_group<0>(); y[t] = tile[t < 4 ? 0 : 4 * (t - 4)];",
        "race: read|copy to it is under way",
    ),
    "a copy that nobody waits for": (COPY + "y[t] = x[t];", "ended before a copy it began"),
    "a copy that nobody commits": (
        "cp_async_16(tile + 4 * t, x, true); y[t] = x[t];",
        "never committed",
    ),
    "x before the wait": (
        "const float v = x[t]; griddepcontrol_wait(); y[t] = v;",
        "x or y is accessed before the wait for the kernel ahead, at",
    ),
    "y before the wait": (
        "y[t] = 1; griddepcontrol_wait();",
        "x or y is accessed before the wait for the kernel ahead, at",
    ),
    "a copy before the wait": (
        COPY + "griddepcontrol_wait(); cp_async_wait_group<0>(); __syncthreads(); y[t] = tile[t];",
        "x or y is accessed before the wait for the kernel ahead, at",
    ),
    "a weight before the wait": (
        "const float v = w[0]; griddepcontrol_wait(); y[t] = v;",
        "a weight that the kernel ahead may write is read before the wait for it, at",
    ),
    "the next kernel before the wait": (
        "griddepcontrol_launch_dependents(); griddepcontrol_wait(); y[t] = x[t];",
        "the next kernel is let in before the wait",
    ),
    "a predicate": (
        'asm("@p mov.u32 %0, %1;" : "=f"(y[t]) : "f"(x[t]));',
        "predicates and PTX declarations are not emulated",
    ),
    "an unknown instruction": (
        'asm volatile("prefetch.global.L1 [%0];" :: "l"(x)); y[t] = x[t];',
        "prefetch.global.L1 is not in emulator/instructions.hpp",
    ),
}  # fmt: skip

GOOD = {
    "x": "y[t] = x[t];",
    "shared": "tile[t] = x[t]; __syncthreads(); y[t] = tile[63 - t];",
    "warp": (
        "tile[t] = x[t]; __syncwarp();"
        "float v = tile[t ^ 1]; __syncwarp();"
        "tile[t] = v; y[t] = v;"
    ),
    "named": "tile[t] = x[t]; named_barrier_sync(1 + t / 32, 32); y[t] = tile[t ^ 31];",
    "copy": COPY + "cp_async_wait_group<0>(); __syncthreads(); y[t] = tile[4 * (63 - t) + t % 4];",
    "early": (
        "const float v = w[0]; follow_kernel_ahead(); y[t] = x[t] + v;"
    ),
    "no copy": (
        "cp_async_16(tile + 4 * t, nullptr, false); "
        "cp_async_commit_group(); cp_async_wait_group<0>();"
        "y[t] = tile[4 * t];"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def small_kernels(emulator):
    bodies = {name: body for name, (body, _) in FAULTS.items()} | GOOD
    return dict(zip(bodies, emulator.build([instance(b) for b in bodies.values()]), strict=True))


def run(kernel, seed=0, settled=False):
    x = torch.arange(1.0, THREADS + 1)[:, None].clone()
    return x[:, 0], kernel(x, torch.zeros(SCALAR.weight_shape), seed, settled=settled)[:, 0]


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_is_detected_in_every_order(small_kernels, fault, seed):
    # In another order another one of the threads concerned may be the first that goes wrong.
    words = FAULTS[fault][1] if seed == 0 else "."
    with pytest.raises(EmulationError, match=words):
        run(small_kernels[fault], seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_right_kernels_pass(small_kernels, seed):
    t = torch.arange(THREADS)
    for name, order in {"x": t, "shared": 63 - t, "warp": t ^ 1, "named": t ^ 31}.items():
        x, y = run(small_kernels[name], seed)
        assert torch.equal(y, x[order]), name
    x, y = run(small_kernels["copy"], seed)
    assert torch.equal(y, x[(63 - t) // 4 * 4 + t % 4])
    assert torch.equal(run(small_kernels["no copy"], seed)[1], torch.zeros(THREADS))
    x, y = run(small_kernels["early"], seed, settled=True)
    assert torch.equal(y, x)


@pytest.mark.skipif(shutil.which("addr2line") is None, reason="addr2line is not installed")
def test_a_report_names_the_line(small_kernels):
    with pytest.raises(EmulationError, match=r"at kernels\d\.cpp:\d+ .*block 0, thread 63"):
        run(small_kernels["beyond x"])


def test_an_unknown_declaration_is_refused():
    with pytest.raises(TranslationError, match="unknown form"):
        translate("__shared__ struct { int a; } s;", "some.cuh")


def test_a_load_that_the_compiler_may_move_is_refused():
    """Else it may run where a condition forbids it, on addresses that are none."""
    load = 'asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));'
    assert "asm" not in translate(load, "some.cuh")
    with pytest.raises(TranslationError, match="not volatile"):
        translate(load.replace(" volatile", ""), "some.cuh")


def test_conversions_round_as_pytorch_does(emulator):
    loop = "for (long long m = t; m < arguments.batch; m += 64) "
    pair = "const uint32 p = pack_pair<{0}>(-x[m], x[m]); y[m] = to_float({0}{{{1}}});"
    bodies = {
        "float16": loop + "y[m] = to_float(from_float<Float16>(x[m]));",
        "bfloat16": loop + "y[m] = to_float(from_float<BFloat16>(x[m]));",
        "float16 pair, high": loop + "{" + pair.format("Float16", "uint16(p >> 16)") + "}",
        "bfloat16 pair, high": loop + "{" + pair.format("BFloat16", "uint16(p >> 16)") + "}",
        "float16 pair, low": loop + "{" + pair.format("Float16", "uint16(p)") + "}",
        "bfloat16 pair, low": loop + "{" + pair.format("BFloat16", "uint16(p)") + "}",
    }
    halves = torch.arange(0, 1 << 16, 7, dtype=torch.int32).to(torch.int16).view(torch.float16)
    exact = halves.float()
    bits = exact.view(torch.int32)
    # Numbers, the points half way to the next, and their neighbours on both sides.
    near = [bits + step for step in (0, 1, -1, 1 << 12, (1 << 12) + 1, (1 << 12) - 1, 1 << 15)]
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (20_000,), generator=generator).to(torch.int32)
    x = torch.cat([*near, anything]).view(torch.float32)[:, None]
    kernels = emulator.build([instance(body) for body in bodies.values()])
    for name, kernel in zip(bodies, kernels, strict=True):
        sign = -1.0 if name.endswith("low") else 1.0
        expected = (sign * x).to(getattr(torch, name.split()[0])).float()
        torch.testing.assert_close(
            kernel(x, torch.zeros(1, 1, 1, 1)), expected, rtol=0, atol=0, equal_nan=True, msg=name
        )


def test_tf32_product_and_matrix_loads(emulator):
    """Against products written from the fragments' definition in the PTX manual."""
    product = """
      const int g = t / 4, q = t % 4;  // x: 16 x 8, w: 8 columns of 8
      uint32 a[4], b[2];
      for (int r = 0; r < 4; ++r) a[r] = __float_as_uint(x[(g + r % 2 * 8) * 8 + q + r / 2 * 4]);
      for (int r = 0; r < 2; ++r) b[r] = __float_as_uint(w[g * 8 + q + r * 4]);
      float sum[4] = {};
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                   "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
      for (int e = 0; e < 4; ++e) y[(g + e / 2 * 8) * 8 + 2 * q + e % 2] = sum[e];
    """
    load = """
      uint16* halves = reinterpret_cast<uint16*>(tile);  // four 8 x 8 matrices of 0 .. 255
      for (int e = t; e < 256; e += 32) halves[e] = e;
      __syncthreads();
      uint32 words[4];
      const uint32 row = static_cast<uint32>(__cvta_generic_to_shared(halves + t * 8));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(row));
      for (int i = 0; i < 4; ++i)
        for (int h = 0; h < 2; ++h) y[i * 64 + t * 2 + h] = words[i] >> 16 * h & 0xffff;
    """
    square, many = Pattern(1, 8, 8, 1), Pattern(1, 256, 1, 1)
    tf32, plain, transposed = emulator.build(
        [
            instance(product, square, 32),
            instance(load.replace("x4{}", "x4"), many, 32),
            instance(load.replace("x4{}", "x4.trans"), many, 32),
        ]
    )
    x, weight = operands(tf32.instance.problem, 16, seed=0)
    cut = [(v.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for v in (x, weight)]
    assert_close_to_float64(tf32(x.contiguous(), weight), *cut, tf32.instance.problem)
    matrices = torch.arange(256.0).view(4, 8, 8)
    none, w = torch.zeros(1, 1), torch.zeros(many.weight_shape)
    assert torch.equal(plain(none, w).view(4, 8, 8), matrices)
    assert torch.equal(transposed(none, w).view(4, 8, 8), matrices.transpose(1, 2))


def without(pattern: str, which: int, replacement: str = ""):
    """An edit that takes away the given match, in the header that has the name."""

    def edit(text: str) -> str:
        matches = list(re.finditer(pattern, text))
        assert len(matches) > which, f"{pattern} is not in the header: the test needs another one"
        at = matches[which]
        return text[: at.start()] + replacement + text[at.end() :]

    return edit


NAIVE = Problem.of_factor(Pattern(2, 17, 33, 3), "float16", True)
WIDE = Problem.of_factor(Pattern(1, 24, 40, 8), "float16", False)
NARROW = Problem.of_factor(Pattern(2, 24, 72, 3), "bfloat16", False)
BARRIER, WAIT = r"__syncthreads\(\);", r"cp_async_wait_group<[^>]*>\(\);"

# What is taken from which header, and what the report then says.
MUTATIONS = {
    "general: the barrier before the products": (
        NAIVE, "naive.cuh", without(BARRIER, 0), "race|nothing wrote"),
    "general: the barrier after the products": (
        NAIVE, "naive.cuh", without(BARRIER, 1), "race"),
    "general: the tail of l": (
        NAIVE, "naive.cuh", without(r"&& l0 \+ l < P::C", 0), "outside x|are wrong"),
    "general: the tail of k, of the result": (
        NAIVE, "naive.cuh", without(r"&& k < P::B", 0), "written twice|outside"),
    "general: the last tile of k": (
        NAIVE, "naive.cuh", without(r"P::B \+ OUTPUTS - 1", 0, "P::B"), "never written"),
    "general: a column too few": (
        NAIVE, "naive.cuh", without(r"ROWS \+ 1\]", 0, "ROWS - 1]"), "beyond its array"),
    "mma16: the barrier before the products": (
        NARROW, "mma16.cuh", without(BARRIER, 0), "race|under way|nothing wrote"),
    "mma16: the barrier before the result": (
        WIDE, "mma16.cuh", without(BARRIER, 1), "race|nothing wrote"),
    "mma16: the wait": (WIDE, "mma16.cuh", without(WAIT, 0), "under way"),
    "mma16: one stage less to wait for": (
        WIDE,
        "mma16.cuh",
        without(WAIT, 0, "cp_async_wait_group<Tile::STAGES - 1>();"),
        "under way",
    ),
    "mma16: the tail of the batch": (
        WIDE, "mma16.cuh", without(r"arguments\.batch - row0", 1, "BM"), "outside"),
    "mma16: two outputs changed": (
        WIDE, "common/smem_layout.cuh", without(r"column / 2 \+ column % 2 \* 4", 0, "column"),
        "are wrong|race"),
    "ptx: the halves of a pair": (
        WIDE, "common/ptx.cuh", without(r'"f"\(high\), "f"\(low\)', 0, '"f"(low), "f"(high)'),
        "are wrong"),
    "ptx: two fragments": (
        WIDE, "common/ptx.cuh", without(r'"r"\(a\[1\]\), "r"\(a\[2\]\)', 0, '"r"(a[2]), "r"(a[1])'),
        "are wrong"),
}  # fmt: skip


def real_kernel(emulator, problem, edit=lambda name, text: text):
    if problem == NAIVE:
        config = naive.default_config(problem)
        result = naive.source(problem, config), naive.geometry(problem, config)
    else:
        tile = next(
            c
            for c in mma16.configs(problem, gpu(1))
            if c.stages == 3 and c.warps_n > 1 and c.warps_m > 1
        )
        result = mma16.source(problem, tile), mma16.geometry(problem, tile)
    (kernel,) = emulator.build([Instance(problem, *result)], edit)
    return kernel


def compute(kernel, problem):
    x, weight = operands(problem, 2 * kernel.instance.geometry.rows_per_tile + 5, seed=0)
    assert_close_to_float64(kernel(x, weight), x, weight, problem)


@pytest.mark.parametrize("problem", [NAIVE, WIDE, NARROW], ids=["naive", "wide", "narrow"])
def test_the_real_kernels_pass(emulator, problem):
    compute(real_kernel(emulator, problem), problem)


@pytest.mark.sweep
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_real_kernels_fail_without(emulator, mutation):
    problem, header, edit, report = MUTATIONS[mutation]
    kernel = real_kernel(emulator, problem, lambda n, text: edit(text) if n == header else text)
    with pytest.raises(AssertionError, match=report):
        compute(kernel, problem)
