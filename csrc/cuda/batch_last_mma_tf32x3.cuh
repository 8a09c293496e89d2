// FP32 factors on tensor cores, batch last (sm_80 and up); batch_last.cuh says how.
//
// Tensor cores multiply TF32 numbers, which have 10 bits of fraction instead of 23. Each factor is
// split in registers into its nearest TF32 number, `big`, and what is left, `small`:
// x w = big big + big small + small big, with an error below fp32's own rounding. Tensor cores also
// truncate their sums, always toward zero, which adds up; so they sum 8 values of l only, and
// ordinary additions, which round to nearest, do the rest. With one product instead of three
// (PRODUCTS = 1) this is plain TF32.
//
// An infinity, and a value beyond 2^114, split into NaN: results that are not finite are computed
// once more by ordinary fp32 arithmetic.
#pragma once

#include "common/batch_last.cuh"
#include "common/tf32_split.cuh"

template <typename P, int WARPS_K_, int WARPS_M_, int MT_, int NT_, int KL_, int STAGES_, int BLOCKS_,
          int PRODUCTS_, bool SHIFTED_>
struct BatchLastMmaTf32x3Tile {
  static constexpr int WARPS_K = WARPS_K_, WARPS_M = WARPS_M_;
  static constexpr int MT = MT_, NT = NT_;  // 16-output and 8-column tiles of a warp
  static constexpr int KL = KL_;            // l in a stage
  static constexpr int BLOCKS = BLOCKS_;    // blocks that should fit on a multiprocessor
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr bool SHIFTED = SHIFTED_;
  static constexpr int STAGES = SHIFTED ? STAGES_ - 1 : STAGES_;  // one buffer holds shifted rows
  static constexpr int WARPS = WARPS_K * WARPS_M, THREADS = 32 * WARPS;
  static constexpr int NB = WARPS_K * MT * 16, BM = WARPS_M * NT * 8;
  static constexpr int STEPS = (P::C + 7) / 8;  // tensor-core steps over l
  static constexpr int STEPS_PER_STAGE = KL / 8, STAGES_PER_TILE = STEPS / STEPS_PER_STAGE;
  static constexpr int CHUNKS = BM / 4;         // 16-byte chunks of a row of a stage
  static constexpr int PITCH = CHUNKS + 2;      // 2 more than a multiple of 8: 4 rows meet all banks
  static constexpr int WEIGHT_BYTES = NB / 16 * STEPS * 512;
  static constexpr int STAGE_BYTES = KL * PITCH * 16;
  static constexpr int OUT_CHUNKS = NT * 2, OUT_PITCH = NT * 2 + 1;  // of a row of a warp's results
  static constexpr int OUT_BYTES = 16 * OUT_PITCH * 16;
  static constexpr int SHARED_BYTES = WEIGHT_BYTES + STAGES_ * STAGE_BYTES + WARPS * OUT_BYTES;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB, COLUMNS = P::A * P::D;
  static_assert(KL % 8 == 0 && STEPS % STEPS_PER_STAGE == 0, "a tile is a number of whole stages");
  static_assert(NT % 4 == 0, "a load gives columns of four tiles");
  static_assert(STAGES >= 2, "one stage fills while another is used");
};

struct Math32 {
  using Element = uint32;

  template <typename P, typename Tile>
  static __device__ __forceinline__ void load_weights(const Arguments& arguments, unsigned char* weights,
                                                      int column, int n0) {
    const uint32* const w = column_of_weight<P, uint32>(arguments, column);
    const auto at = [&](int k, int l) { return k < P::B && l < P::C ? w[k * P::C + l] : 0; };
    const int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int f = threadIdx.x / 32; f < Tile::NB / 16 * Tile::STEPS; f += Tile::WARPS) {
      const int k = n0 + f / Tile::STEPS * 16 + lane / 4, l = f % Tile::STEPS * 8 + lane % 4;
      reinterpret_cast<uint4*>(weights)[f * 32 + lane] =
          make_uint4(at(k, l), at(k + 8, l), at(k, l + 4), at(k + 8, l + 4));
    }
  }

  template <typename Tile>
  static __device__ __forceinline__ void multiply(float (&sums)[Tile::MT][Tile::NT][4],
                                                  const unsigned char* stage, const unsigned char* weights,
                                                  int part, int warp_k, int warp_m) {
    using SplitValue = Split<Tile::PRODUCTS>;
    constexpr int MT = Tile::MT, NT = Tile::NT, PRODUCTS = Tile::PRODUCTS;
    // Lane (r, q) reads row q (and q + 4), columns 4 r to 4 r + 3 of 32: column r of four tiles.
    const int lane = threadIdx.x % 32;
    const float4* const rows =
        reinterpret_cast<const float4*>(stage) + lane % 4 * Tile::PITCH + warp_m * NT * 2 + lane / 4;
    const float4* const fragments = reinterpret_cast<const float4*>(weights) +
                                    (warp_k * MT * Tile::STEPS + part * Tile::STEPS_PER_STAGE) * 32 + lane;
#pragma unroll 1
    for (int step = 0; step < Tile::STEPS_PER_STAGE; ++step) {
      uint32 big[NT][2];
      [[maybe_unused]] uint32 small[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n += 4)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 loaded = rows[(step * 8 + half * 4) * Tile::PITCH + n * 2];
          const float values[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const SplitValue split(values[t]);
            big[n + t][half] = split.big, small[n + t][half] = split.small;
          }
        }
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const float4 loaded = fragments[(mt * Tile::STEPS + step) * 32];
        const SplitValue splits[4] = {SplitValue(loaded.x), SplitValue(loaded.y), SplitValue(loaded.z), SplitValue(loaded.w)};
        const uint32 a_big[4] = {splits[0].big, splits[1].big, splits[2].big, splits[3].big};
        const uint32 a_small[4] = {splits[0].small, splits[1].small, splits[2].small, splits[3].small};
        if constexpr (PRODUCTS == 1) {
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_m16n8k8_tf32(sums[mt][n], a_big, big[n][0], big[n][1]);
        }
        // Four tiles at a time are independent sums; the smallest products come first.
#pragma unroll
        for (int n = 0; n < (PRODUCTS == 1 ? 0 : NT); n += 4) {
          float parts[4][4] = {};
#pragma unroll
          for (int t = 0; t < 4; ++t) mma_m16n8k8_tf32(parts[t], a_small, big[n + t][0], big[n + t][1]);
#pragma unroll
          for (int t = 0; t < 4; ++t) mma_m16n8k8_tf32(parts[t], a_big, small[n + t][0], small[n + t][1]);
#pragma unroll
          for (int t = 0; t < 4; ++t) mma_m16n8k8_tf32(parts[t], a_big, big[n + t][0], big[n + t][1]);
#pragma unroll
          for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[mt][n + t][e] += parts[t][e];
        }
      }
    }
  }

  template <typename Tile>
  static __device__ __forceinline__ void stage_rows(unsigned char* out, const float (&sums)[Tile::NT][4]) {
    // Columns 2q and 2q + 1 of four tiles are columns 8 q to 8 q + 7 of 32.
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4* const chunks =
          reinterpret_cast<float4*>(out) + (half * 8 + lane / 4) * Tile::OUT_PITCH + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Tile::NT; n += 4)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int e = half * 2 + odd;
          chunks[n * 2 + odd] = make_float4(sums[n][e], sums[n + 1][e], sums[n + 2][e], sums[n + 3][e]);
        }
    }
  }

  template <typename P, typename Tile>
  static __device__ __forceinline__ void repair(const Arguments& arguments, unsigned char* out, int column,
                                                int k0, int64 m0) {
    if (Tile::PRODUCTS == 1) return;
    const float* const x = reinterpret_cast<const float*>(column_of_x<P, uint32>(arguments, column));
    const float* const w = reinterpret_cast<const float*>(column_of_weight<P, uint32>(arguments, column));
#pragma unroll 1
    for (int e = threadIdx.x % 32; e < 16 * Tile::OUT_CHUNKS; e += 32) {
      const int row = e / Tile::OUT_CHUNKS, chunk = e % Tile::OUT_CHUNKS;
      uint32* const results = reinterpret_cast<uint32*>(out) + (row * Tile::OUT_PITCH + chunk) * 4;
      const uint4 four = *reinterpret_cast<const uint4*>(results);
      if (is_finite(four.x) && is_finite(four.y) && is_finite(four.z) && is_finite(four.w)) continue;
#pragma unroll 1
      for (int t = 0; t < 4; ++t) {
        const int64 m = m0 + chunk * 4 + t;
        if (is_finite(results[t]) || k0 + row >= P::B || m >= arguments.batch) continue;
        float sum = 0.0f;
        for (int l = 0; l < P::C; ++l) {
          sum = fmaf(w[(k0 + row) * P::C + l],
                     x[l * P::D * arguments.x_feature_stride + m * arguments.x_batch_stride], sum);
        }
        results[t] = __float_as_uint(sum);
      }
    }
    __syncwarp();
  }

  static __device__ __forceinline__ bool is_finite(uint32 bits) {
    return (bits & 0x7f800000u) != 0x7f800000u;
  }
};

template <typename P, typename Tile>
__device__ __forceinline__ void batch_last_mma_tf32x3_kernel(const Arguments& arguments) {
  batch_last_kernel<P, Tile, Math32>(arguments);
}
