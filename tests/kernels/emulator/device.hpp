// CUDA C++ as the host's compiler sees it: included before the real headers of csrc/cuda.
//
// Two constructs are not C++ at all: inline PTX and shared memory. cuda_emulator.py rewrites them
// in its copy of the headers; everything else is compiled as it stands.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime.hpp"

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __CUDA_ARCH__ 900

#define threadIdx (emulate::thread_index())
#define blockIdx (emulate::block_index())
#define blockDim (emulate::block_size())
#define gridDim (emulate::grid_size())

using std::max;
using std::min;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { emulate::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  if (mask != 0xffffffffu) emulate::fail("__syncwarp of a part of a warp is not emulated");
  emulate::warp_barrier();
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Result byte i is byte selector[4i .. 4i+2] of the eight bytes y:x; bit 4i+3 replicates its sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 15;
    unsigned byte = bytes >> 8 * (choice & 7) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

// The low 32 bits of high:low shifted right by `shift` modulo 32.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t(high) << 32 | low) >> (shift & 31));
}

// A generic address becomes an offset; only addresses in shared memory have one.
inline std::size_t __cvta_generic_to_shared(const void* address) {
  return emulate::shared_offset(address);
}

#include "instructions.hpp"

// What lane `from` of the warp says.
struct Said {
  unsigned value, heard;
  int from;
};
INSTRUCTION void hear(void* const (&lanes)[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    Said& hears = *static_cast<Said*>(lanes[lane]);
    hears.heard = static_cast<const Said*>(lanes[hears.from & 31])->value;
  }
}
INSTRUCTION unsigned __shfl_sync(unsigned mask, unsigned value, int from) {
  if (mask != 0xffffffffu) emulate::fail("__shfl_sync of a part of a warp is not emulated");
  Said own = {value, 0, from};
  emulate::warp_collective("__shfl_sync", &own, hear);
  return own.heard;
}

// A bit of each lane: whether its predicate is true.
struct Vote {
  bool is_true;
  unsigned of_all;
};
INSTRUCTION void count_votes(void* const (&lanes)[32]) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= unsigned(static_cast<const Vote*>(lanes[lane])->is_true) << lane;
  for (int lane = 0; lane < 32; ++lane) static_cast<Vote*>(lanes[lane])->of_all = votes;
}
INSTRUCTION unsigned __ballot_sync(unsigned mask, int predicate) {
  if (mask != 0xffffffffu) emulate::fail("__ballot_sync of a part of a warp is not emulated");
  Vote own = {predicate != 0, 0};
  emulate::warp_collective("__ballot_sync", &own, count_votes);
  return own.of_all;
}

// Whether any thread of the block says so. Blocks outside clusters run one after another.
INSTRUCTION int __syncthreads_or(int predicate) {
  static bool is_any = false;
  if (predicate) is_any = true;
  emulate::block_barrier();
  const int result = is_any;
  emulate::block_barrier();
  is_any = false;
  emulate::block_barrier();
  return result;
}
