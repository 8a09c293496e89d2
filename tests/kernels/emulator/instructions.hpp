// The PTX instructions that device code uses, one function each: the one place to add more.
//
// cuda_emulator.py turns an inline-assembly statement into a call for each of its instructions. The
// function's name is the mnemonic with every run of other characters than letters, digits and "_"
// replaced by "_"; its parameters are the operands in the order of the PTX text, flattened: a
// destination is a reference, a source a value, a shared-memory address a uint32_t.
//
//   asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value))   becomes
//   emulate::ptx::cvt_rn_f16_f32(bits, value)
//
// To add an instruction, write its function here, straight from the PTX manual. If the lanes of a
// warp act together, put the operands in a struct and give it to `warp_collective`, as the matrix
// products do. INSTRUCTION keeps a function out of the memory checks, which are for device code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime.hpp"

#define INSTRUCTION __attribute__((no_sanitize("thread"), noinline)) inline

namespace emulate::ptx {

using std::uint16_t;
using std::uint32_t;

// Conversions ---------------------------------------------------------------------------------

INSTRUCTION uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

INSTRUCTION float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

INSTRUCTION void cvt_f32_f16(float& result, uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float magnitude = exponent == 0    ? std::ldexp(float(mantissa), -24)
                          : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                           : std::ldexp(float(mantissa | 1024), exponent - 25);
  result = std::copysign(magnitude, half & 0x8000 ? -1.0f : 1.0f);
}

// Round to nearest even: `nearbyint` in the default rounding mode does it once the value is scaled
// so that the last place of the result is 1.
INSTRUCTION void cvt_rn_f16_f32(uint16_t& result, float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) {
    result = 0x7fff;
  } else if (magnitude >= 65520.0f) {  // half way between the largest number and the next step
    result = sign | 0x7c00;
  } else if (magnitude < 0x1p-14f) {
    result = sign | uint16_t(std::nearbyint(std::ldexp(magnitude, 24)));  // subnormal, or rounds up
  } else {
    int exponent;
    std::frexp(magnitude, &exponent);  // magnitude in [2^(exponent-1), 2^exponent)
    const int places = int(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));  // 1024 .. 2048
    result = sign | uint16_t((exponent + 14) * 1024 + places - 1024);  // 2048 carries on
  }
}

INSTRUCTION void cvt_rn_bf16_f32(uint16_t& result, float value) {
  const uint32_t bits = bits_of(value);
  result = std::isnan(value) ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INSTRUCTION void cvt_rn_f16x2_f32(uint32_t& result, float high, float low) {
  uint16_t upper, lower;
  cvt_rn_f16_f32(upper, high);
  cvt_rn_f16_f32(lower, low);
  result = uint32_t(upper) << 16 | lower;
}

INSTRUCTION void cvt_rn_bf16x2_f32(uint32_t& result, float high, float low) {
  uint16_t upper, lower;
  cvt_rn_bf16_f32(upper, high);
  cvt_rn_bf16_f32(lower, low);
  result = uint32_t(upper) << 16 | lower;
}

// Round to nearest, ties away from zero, keeping 10 bits of mantissa.
INSTRUCTION void cvt_rna_tf32_f32(uint32_t& result, float value) {
  const uint32_t bits = bits_of(value);
  result = std::isfinite(value) ? (bits + 0x1000) & ~0x1fffu : bits;
}

INSTRUCTION void cvt_rn_tf32_f32(uint32_t& result, float value) {
  const uint32_t bits = bits_of(value);
  result = std::isfinite(value) ? (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu : bits;
}

// Approximations: hardware's are off by about 2^-22.
INSTRUCTION void ex2_approx_ftz_f32(float& result, float value) { result = std::exp2(value); }
INSTRUCTION void rcp_approx_ftz_f32(float& result, float value) { result = 1.0f / value; }

// Copies --------------------------------------------------------------------------------------

INSTRUCTION void cp_async_cg_shared_global(uint32_t shared, const void* global, int bytes,
                                           int source_bytes) {
  if (bytes != 16) fail("cp.async.cg copies 16 bytes, not %d", bytes);
  if (source_bytes < 0 || source_bytes > 16) fail("cp.async reads 0 to 16 bytes, not %d", source_bytes);
  copy_async(shared, global, 16, unsigned(source_bytes), __builtin_return_address(0));
}

INSTRUCTION void cp_async_cg_shared_global_L2_128B(uint32_t shared, const void* global, int bytes,
                                                   int source_bytes) {
  if (bytes != 16) fail("cp.async.cg copies 16 bytes, not %d", bytes);
  if (source_bytes < 0 || source_bytes > 16) fail("cp.async reads 0 to 16 bytes, not %d", source_bytes);
  copy_async(shared, global, 16, unsigned(source_bytes), __builtin_return_address(0));
}

INSTRUCTION void cp_async_commit_group() { commit_copies(); }

INSTRUCTION void cp_async_wait_group(int pending) { wait_for_copies(unsigned(pending)); }

INSTRUCTION void cp_async_wait_all() {
  commit_copies();
  wait_for_copies(0);
}

INSTRUCTION void ld_shared_u16(uint32_t& result, uint32_t address) {
  result = *static_cast<const uint16_t*>(read_shared(address, 2, __builtin_return_address(0)));
}
INSTRUCTION void ld_shared_u32(uint32_t& result, uint32_t address) {
  result = *static_cast<const uint32_t*>(read_shared(address, 4, __builtin_return_address(0)));
}
INSTRUCTION void ld_shared_v2_u32(uint32_t& x, uint32_t& y, uint32_t address) {
  const auto from = static_cast<const uint32_t*>(read_shared(address, 8, __builtin_return_address(0)));
  x = from[0], y = from[1];
}
INSTRUCTION void ld_shared_v4_u32(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, uint32_t address) {
  const auto from = static_cast<const uint32_t*>(read_shared(address, 16, __builtin_return_address(0)));
  x = from[0], y = from[1], z = from[2], w = from[3];
}
INSTRUCTION void st_shared_u16(uint32_t address, uint16_t value) {
  *static_cast<uint16_t*>(write_shared(address, 2, __builtin_return_address(0))) = value;
}
INSTRUCTION void st_shared_u32(uint32_t address, uint32_t value) {
  *static_cast<uint32_t*>(write_shared(address, 4, __builtin_return_address(0))) = value;
}

INSTRUCTION void st_shared_v2_u32(uint32_t address, uint32_t x, uint32_t y) {
  const auto to = static_cast<uint32_t*>(write_shared(address, 8, __builtin_return_address(0)));
  to[0] = x, to[1] = y;
}

// Accesses of device code: not INSTRUCTIONs, so that they are checked.
inline void st_global_v4_b32(void* to, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  *static_cast<uint4*>(to) = make_uint4(w0, w1, w2, w3);
}
inline void st_global_v2_b32(void* to, uint32_t w0, uint32_t w1) {
  *static_cast<uint2*>(to) = make_uint2(w0, w1);
}
inline void ld_global_nc_v4_b32(uint32_t& w0, uint32_t& w1, uint32_t& w2, uint32_t& w3, const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  w0 = words.x, w1 = words.y, w2 = words.z, w3 = words.w;
}

// Only a hint: what it must not be is misaligned.
INSTRUCTION void prefetch_global_L2(const void*) {}
INSTRUCTION void cp_async_bulk_prefetch_L2_global(const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) fail("a bulk prefetch of an address that is no multiple of 16");
  if (bytes <= 0 || bytes % 16 != 0) fail("a bulk prefetch of %d bytes, no multiple of 16", bytes);
}

// Other kernels: one kernel is emulated, alone; what it does before it waits for others is checked --

INSTRUCTION void griddepcontrol_wait() { wait_for_kernel_ahead(); }
INSTRUCTION void griddepcontrol_launch_dependents() { let_next_kernel_in(); }

// Clusters ------------------------------------------------------------------------------------

INSTRUCTION void barrier_cluster_arrive_release_aligned() { arrive_at_cluster_barrier(); }
INSTRUCTION void barrier_cluster_wait_acquire_aligned() { wait_at_cluster_barrier(); }
INSTRUCTION void barrier_cluster_arrive_release() { arrive_at_cluster_barrier(); }
INSTRUCTION void barrier_cluster_wait_acquire() { wait_at_cluster_barrier(); }
INSTRUCTION void mapa_shared_cluster_u32(uint32_t& result, uint32_t address, int rank) {
  result = shared_offset_in(address, unsigned(rank));
}
INSTRUCTION void ld_shared_cluster_v4_f32(float& x, float& y, float& z, float& w, uint32_t address) {
  const float* const from = static_cast<const float*>(read_shared_of_cluster(address, 16, __builtin_return_address(0)));
  x = from[0], y = from[1], z = from[2], w = from[3];
}
INSTRUCTION void ld_shared_cluster_f32(float& value, uint32_t address) {
  value = *static_cast<const float*>(read_shared_of_cluster(address, 4, __builtin_return_address(0)));
}
INSTRUCTION void st_shared_cluster_v2_u32(uint32_t address, uint32_t x, uint32_t y) {
  uint32_t* const to = static_cast<uint32_t*>(write_shared_of_cluster(address, 8, __builtin_return_address(0)));
  to[0] = x, to[1] = y;
}
INSTRUCTION void st_shared_cluster_v4_u32(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  uint32_t* const to = static_cast<uint32_t*>(write_shared_of_cluster(address, 16, __builtin_return_address(0)));
  to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}

// Barriers ------------------------------------------------------------------------------------

INSTRUCTION void bar_sync(int name, int threads) { named_barrier(unsigned(name), unsigned(threads)); }
INSTRUCTION void bar_arrive(int name, int threads) { arrive_at_named_barrier(unsigned(name), unsigned(threads)); }

// Loads of four 8 x 8 matrices by a warp: lane 8i + r brings the address of row r of matrix i, and
// word i of lane 4g + q is elements 2q and 2q + 1 of row g of it, or, transposed, of column g.

struct MatrixRows {
  uint32_t* words[4];
  const uint16_t* row;
};

template <bool TRANSPOSED> INSTRUCTION void load_matrices(void* const (&lanes)[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) {
      uint32_t halves[2];
      for (int h = 0; h < 2; ++h) {
        const int row = TRANSPOSED ? 2 * q + h : g, column = TRANSPOSED ? g : 2 * q + h;
        halves[h] = static_cast<const MatrixRows*>(lanes[8 * i + row])->row[column];
      }
      *static_cast<const MatrixRows*>(lanes[lane])->words[i] = halves[1] << 16 | halves[0];
    }
  }
}

#define LOAD_FOUR_MATRICES(name, transposed)                                                       \
  INSTRUCTION void name(uint32_t& w0, uint32_t& w1, uint32_t& w2, uint32_t& w3, uint32_t shared) { \
    const void* row = read_shared(shared, 16, __builtin_return_address(0));                        \
    MatrixRows own{{&w0, &w1, &w2, &w3}, static_cast<const uint16_t*>(row)};                       \
    warp_collective(#name, &own, load_matrices<transposed>);                                       \
  }
LOAD_FOUR_MATRICES(ldmatrix_sync_aligned_m8n8_x4_shared_b16, false)
LOAD_FOUR_MATRICES(ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16, true)

// Matrix products of a warp -------------------------------------------------------------------
//
// Lane = 4 g + q. An accumulator holds rows g and g + 8, columns 2q and 2q + 1. Products of 16-bit
// factors are exact in fp32; sums are made in double and rounded once, where hardware rounds (or
// cuts) a little differently: results agree to about the rounding of fp32.

struct MatrixOperands {
  float* d[4];
  uint32_t a[4], b[2];
  float c[4];
};

struct Matrices {
  double a[16][16], b[16][8];  // a[row][k], b[k][column]
};

INSTRUCTION void multiply(void* const (&lanes)[32], const Matrices& m, int k_size) {
  for (int lane = 0; lane < 32; ++lane) {
    const MatrixOperands& own = *static_cast<const MatrixOperands*>(lanes[lane]);
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
      double sum = own.c[e];
      for (int k = 0; k < k_size; ++k) sum += m.a[row][k] * m.b[k][column];
      *own.d[e] = float(sum);
    }
  }
}

// a[0..3]: (row g, k 2q..), (g + 8, 2q..), (g, 2q + 8..), (g + 8, 2q + 8..), low half first;
// b[0..1]: (k 2q.., column g), (2q + 8.., g).
template <void (*WIDEN)(float&, uint16_t)>
INSTRUCTION void multiply_16_bit(void* const (&lanes)[32]) {
  Matrices m;
  const auto widen = [](uint32_t word, int half) __attribute__((no_sanitize("thread"))) {
    float value;
    WIDEN(value, uint16_t(half ? word >> 16 : word));
    return value;
  };
  for (int lane = 0; lane < 32; ++lane) {
    const MatrixOperands& own = *static_cast<const MatrixOperands*>(lanes[lane]);
    const int g = lane / 4, q = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r) {
        m.a[g + r % 2 * 8][2 * q + r / 2 * 8 + half] = widen(own.a[r], half);
      }
      for (int r = 0; r < 2; ++r) m.b[2 * q + r * 8 + half][g] = widen(own.b[r], half);
    }
  }
  multiply(lanes, m, 16);
}

INSTRUCTION void widen_bf16(float& result, uint16_t bits) { result = float_of(uint32_t(bits) << 16); }

#define MATRIX_PRODUCT_16_BIT(name, widen)                                                         \
  INSTRUCTION void name(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1,      \
                        uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1,    \
                        float c2, float c3) {                                                      \
    MatrixOperands own{{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};        \
    warp_collective(#name, &own, multiply_16_bit<widen>);                                          \
  }
MATRIX_PRODUCT_16_BIT(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, cvt_f32_f16)
MATRIX_PRODUCT_16_BIT(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, widen_bf16)

// a[0..3]: (row g, k q), (g + 8, q), (g, q + 4), (g + 8, q + 4); b[0..1]: (k q, column g),
// (q + 4, g). Hardware ignores the low 13 bits of each factor.
INSTRUCTION void multiply_tf32(void* const (&lanes)[32]) {
  Matrices m;
  for (int lane = 0; lane < 32; ++lane) {
    const MatrixOperands& own = *static_cast<const MatrixOperands*>(lanes[lane]);
    const int g = lane / 4, q = lane % 4;
    for (int r = 0; r < 4; ++r) m.a[g + r % 2 * 8][q + r / 2 * 4] = float_of(own.a[r] & ~0x1fffu);
    for (int r = 0; r < 2; ++r) m.b[q + r * 4][g] = float_of(own.b[r] & ~0x1fffu);
  }
  multiply(lanes, m, 8);
}

INSTRUCTION void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(
    float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  MatrixOperands own{{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
  warp_collective("mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32", &own, multiply_tf32);
}

// Warpgroup products --------------------------------------------------------------------------
//
// A warp's rows depend on no other warp, so its lanes act alone. Products are done at once; that
// their operands and sums may not be touched before the wait is not checked, nor are the fences.

INSTRUCTION void wgmma_fence_sync_aligned() {}
INSTRUCTION void wgmma_commit_group_sync_aligned() {}
INSTRUCTION void wgmma_wait_group_sync_aligned(int) {}
INSTRUCTION void fence_proxy_async_shared_cta() {}
INSTRUCTION void setmaxnreg_inc_sync_aligned_u32(int) {}
INSTRUCTION void setmaxnreg_dec_sync_aligned_u32(int) {}

struct WarpgroupOperands {
  float* sums;
  uint32_t a[4];
  std::uint64_t b;
  bool accumulate;
  const void* caller;
};

template <int N> INSTRUCTION void multiply_rows_tf32(void* const (&lanes)[32]) {
  double a[16][8], b[8][N];
  for (int lane = 0; lane < 32; ++lane) {
    const WarpgroupOperands& own = *static_cast<const WarpgroupOperands*>(lanes[lane]);
    for (int r = 0; r < 4; ++r) a[lane / 4 + r % 2 * 8][lane % 4 + r / 2 * 4] = float_of(own.a[r] & ~0x1fffu);
  }
  const WarpgroupOperands& first = *static_cast<const WarpgroupOperands*>(lanes[0]);
  // 8 columns x 4 of the summation are 128 bytes in one run.
  const uint32_t address = described_address(uint32_t(first.b & 0x3fff) << 4), next_sum = uint32_t(first.b >> 16 & 0x3fff) << 4,
                 next_column = uint32_t(first.b >> 32 & 0x3fff) << 4;
  if (first.b >> 62) fail("only operands that are not swizzled are emulated");
  for (int n = 0; n < N; ++n) {
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      std::memcpy(words, read_shared(address + half * next_sum + n / 8 * next_column + n % 8 * 16, 16, first.caller), 16);
      for (int k = 0; k < 4; ++k) b[half * 4 + k][n] = float_of(words[k] & ~0x1fffu);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const WarpgroupOperands& own = *static_cast<const WarpgroupOperands*>(lanes[lane]);
    for (int e = 0; e < N / 2; ++e) {
      const int row = lane / 4 + e % 4 / 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      double sum = own.accumulate ? own.sums[e] : 0.0;
      for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][column];
      own.sums[e] = float(sum);
    }
  }
}

// Sums of 64 x N: what wgmma.mma_async.sync.aligned.m64nNk8.f32.tf32.tf32 does with a in registers.
template <int N>
INSTRUCTION void wgmma_mma_async_tf32(float (&sums)[N / 2], const uint32_t (&a)[4], std::uint64_t b,
                                         int accumulate) {
  WarpgroupOperands own{sums, {a[0], a[1], a[2], a[3]}, b, accumulate != 0, __builtin_return_address(0)};
  warp_collective("wgmma", &own, multiply_rows_tf32<N>);
}

// Sums of 64 x N: what wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16 (or bf16, by WIDEN) does
// with a in registers, laid out as for m16n8k16.
template <int N, void (*WIDEN)(float&, uint16_t)> INSTRUCTION void multiply_rows_16_bit(void* const (&lanes)[32]) {
  float a[16][16], b[16][N];
  for (int lane = 0; lane < 32; ++lane) {
    const WarpgroupOperands& own = *static_cast<const WarpgroupOperands*>(lanes[lane]);
    for (int r = 0; r < 4; ++r) {
      for (int half = 0; half < 2; ++half) {
        WIDEN(a[lane / 4 + r % 2 * 8][lane % 4 * 2 + r / 2 * 8 + half], uint16_t(own.a[r] >> 16 * half));
      }
    }
  }
  const WarpgroupOperands& first = *static_cast<const WarpgroupOperands*>(lanes[0]);
  // 8 columns x 8 of the summation are 128 bytes in one run.
  const uint32_t address = described_address(uint32_t(first.b & 0x3fff) << 4), next_sum = uint32_t(first.b >> 16 & 0x3fff) << 4,
                 next_column = uint32_t(first.b >> 32 & 0x3fff) << 4;
  if (first.b >> 62) fail("only operands that are not swizzled are emulated");
  for (int n = 0; n < N; ++n) {
    for (int half = 0; half < 2; ++half) {
      uint16_t values[8];
      std::memcpy(values, read_shared(address + half * next_sum + n / 8 * next_column + n % 8 * 16, 16, first.caller), 16);
      for (int k = 0; k < 8; ++k) WIDEN(b[half * 8 + k][n], values[k]);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const WarpgroupOperands& own = *static_cast<const WarpgroupOperands*>(lanes[lane]);
    for (int e = 0; e < N / 2; ++e) {
      const int row = lane / 4 + e % 4 / 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      double sum = own.accumulate ? own.sums[e] : 0.0;
      for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][column];
      own.sums[e] = float(sum);
    }
  }
}

template <int N, void (*WIDEN)(float&, uint16_t)>
INSTRUCTION void wgmma_mma_async_16(float (&sums)[N / 2], const uint32_t (&a)[4], std::uint64_t b, int accumulate) {
  WarpgroupOperands own{sums, {a[0], a[1], a[2], a[3]}, b, accumulate != 0, __builtin_return_address(0)};
  warp_collective("wgmma", &own, multiply_rows_16_bit<N, WIDEN>);
}

struct RowsOperands {
  float* sums;
  std::uint64_t a, b;
  int warp;  // of the warpgroup
  bool accumulate;
  const void* caller;
};

// Element `feature` of row `row` of an operand of rows of 128 bytes, permuted by chunks of 16.
INSTRUCTION uint16_t element_of_rows(std::uint64_t operand, int row, int feature, const void* caller) {
  if (operand >> 62 != 1) fail("only operands of permuted rows of 128 bytes are emulated here");
  const uint32_t first = described_address(uint32_t(operand & 0x3fff) << 4), next_panel = uint32_t(operand >> 16 & 0x3fff) << 4,
                 next_rows = uint32_t(operand >> 32 & 0x3fff) << 4;
  const uint32_t line = first + feature / 64 * next_panel + row / 8 * next_rows + row % 8 * 128;
  // Which place a chunk has depends on the address, as in the hardware.
  const uint32_t address = line + ((feature % 64 / 8) ^ (line / 128 % 8)) * 16 + feature % 8 * 2;
  uint16_t value;
  std::memcpy(&value, read_shared(address, 2, caller), 2);
  return value;
}

template <int N, void (*WIDEN)(float&, uint16_t)> INSTRUCTION void multiply_rows_of_both(void* const (&lanes)[32]) {
  float a[16][16], b[16][N];  // [row][feature]
  const RowsOperands& first = *static_cast<const RowsOperands*>(lanes[0]);
  for (int k = 0; k < 16; ++k) {
    for (int m = 0; m < 16; ++m) WIDEN(a[k][m], element_of_rows(first.a, k, first.warp * 16 + m, first.caller));
    for (int n = 0; n < N; ++n) WIDEN(b[k][n], element_of_rows(first.b, k, n, first.caller));
  }
  for (int lane = 0; lane < 32; ++lane) {
    const RowsOperands& own = *static_cast<const RowsOperands*>(lanes[lane]);
    if (own.a != first.a || own.b != first.b) fail("the lanes of a warp name different operands");
    for (int e = 0; e < N / 2; ++e) {
      const int m = lane / 4 + e % 4 / 2 * 8, n = e / 4 * 8 + lane % 4 * 2 + e % 2;
      double sum = own.accumulate ? own.sums[e] : 0.0;
      for (int k = 0; k < 16; ++k) sum += double(a[k][m]) * b[k][n];
      own.sums[e] = float(sum);
    }
  }
}

// Sums of 64 x N: what wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16 (or bf16, by WIDEN) does with both
// factors in shared memory, the summation along their rows.
template <int N, void (*WIDEN)(float&, uint16_t)>
INSTRUCTION void multiply_rows(float (&sums)[N / 2], std::uint64_t a, std::uint64_t b, int warp, int accumulate) {
  RowsOperands own{sums, a, b, warp, accumulate != 0, __builtin_return_address(0)};
  warp_collective("wgmma", &own, multiply_rows_of_both<N, WIDEN>);
}

// Phase barriers ------------------------------------------------------------------------------

INSTRUCTION void mbarrier_init_shared_cta_b64(uint32_t at, int count) { set_up_mbarrier(at, unsigned(count)); }
INSTRUCTION void mbarrier_arrive_shared_cta_b64(unsigned long long& token, uint32_t at) {
  token = 0;
  arrive_at_mbarrier(at);
}

INSTRUCTION void mbarrier_arrive_expect_tx_shared_cta_b64(unsigned long long& token, uint32_t at, uint32_t bytes) {
  token = 0;
  expect_bytes(at, bytes);
  arrive_at_mbarrier(at);
}
// The copies land at once: whoever does not wait for the arrival reads what this thread wrote.
INSTRUCTION void cp_async_mbarrier_arrive_noinc_shared_cta_b64(uint32_t at) {
  commit_copies();
  wait_for_copies(0);
  arrive_at_mbarrier(at);
}
INSTRUCTION void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t shared, const void* global,
                                                                                uint32_t bytes, uint32_t at) {
  copy_in_bulk(shared, global, bytes, at, __builtin_return_address(0));
}

}  // namespace emulate::ptx
