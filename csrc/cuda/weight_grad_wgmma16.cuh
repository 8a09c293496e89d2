// The gradient of a factor's weight, on Hopper's warpgroup tensor cores (16 bit, batch first, sm_90a):
//
//   dK[i,k,l,j] = sum over rows n of dY[n,i,k,j] X[n,i,l,j]
//
// For each i it is a part of the product of all (k, j) by all (l, j'): of what has j = j'. That is computed
// whole, D times the needed sums: memory has enough to do meanwhile, as long as D is small, and no operand is
// copied into another order. A block has a tile of the sums, of GROUPS * 64 features of dY by PANELS * 64 of X,
// for a share of the rows. Shares are fp32, and a second kernel adds them, always in the same order.
//
// WITH_BIAS: the blocks with the first features of X add up the rows of dY, too, which are in shared memory: the
// gradient of a bias behind the product.
#pragma once

#include "common/kernel_params.cuh"
#include "common/pdl.cuh"
#include "common/smem_layout.cuh"
#include "common/weight_grad_shares.cuh"
#include "common/wgmma_rows.cuh"

// GROUPS: warpgroups, each with 64 features of dY. PANELS: of 64 features of X. ROWS: of a stage.
template <typename P, int GROUPS_, int PANELS_, int ROWS_, int STAGES_, int BLOCKS_> struct WeightGradTile {
  static constexpr int GROUPS = GROUPS_, PANELS = PANELS_, ROWS = ROWS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int THREADS = 128 * GROUPS, M = 64 * GROUPS, N = 64 * PANELS;
  static constexpr int OUT = P::B * P::D, IN = P::C * P::D;  // features of dY and of X, for one i
  static constexpr int M_TILES = (OUT + M - 1) / M, N_TILES = (IN + N - 1) / N, TILES = P::A * M_TILES * N_TILES;
  static constexpr int PANEL_BYTES = ROWS * 128, STAGE_BYTES = (GROUPS + PANELS) * PANEL_BYTES;
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
  static_assert(OUT % 8 == 0 && IN % 8 == 0 && ROWS % 16 == 0 && STAGES >= 3, "");
};

// A block's tile: which i, and its first features of dY and of X among those of i.
template <typename P, typename Tile> struct WeightGradPlace {
  int i, m0, n0;
  int64 share;
  __device__ __forceinline__ WeightGradPlace() {
    int tile = static_cast<int>(blockIdx.x) % Tile::TILES;
    share = static_cast<int>(blockIdx.x) / Tile::TILES;
    n0 = tile % Tile::N_TILES * Tile::N, tile /= Tile::N_TILES;
    m0 = tile % Tile::M_TILES * Tile::M, i = tile / Tile::M_TILES;
  }
};

// Loads COUNT panels of 64 features, zeros where there are none: chunk c of row r lies at place c ^ (r % 8).
template <typename Tile, int COUNT, int FEATURES>
__device__ __forceinline__ void load_panels(unsigned char* to, const uint16* from, int64 stride, int first, int rows) {
  constexpr int PASS_ROWS = Tile::THREADS / 8;
  const int chunk = threadIdx.x % 8, row0 = threadIdx.x / 8;
#pragma unroll
  for (int panel = 0; panel < COUNT; ++panel) {
    const int feature = first + panel * 64 + chunk * 8;
#pragma unroll
    for (int step = 0; step < (Tile::ROWS + PASS_ROWS - 1) / PASS_ROWS; ++step) {
      const int row = row0 + step * PASS_ROWS;
      if (Tile::ROWS % PASS_ROWS != 0 && row >= Tile::ROWS) break;
      const bool inside = row < rows && (FEATURES % (64 * COUNT) == 0 || feature < FEATURES);
      cp_async_16(to + panel * Tile::PANEL_BYTES + row * 128 + (chunk ^ row % 8) * 16,
                  inside ? from + row * stride + feature : from, inside);
    }
  }
}

// Stores the sums with equal j, through `place(index of [A, B, C, D], sum)`.
template <typename P, typename Tile, typename Store>
__device__ __forceinline__ void store_sums(const float (&sums)[Tile::N / 2], const WeightGradPlace<P, Tile>& own,
                                           const Store& store) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int m = own.m0 + static_cast<int>(threadIdx.x) / 128 * 64 + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int out = m + half * 8, k = out / P::D, j = out % P::D;
    if (out >= Tile::OUT) continue;
    const int64 row = (int64(own.i) * P::B + k) * P::C;
#pragma unroll
    for (int e = 0; e < Tile::N / 4; ++e) {
      const int in = own.n0 + e / 2 * 8 + lane % 4 * 2 + e % 2;
      if (in < Tile::IN && in % P::D == j) store((row + in / P::D) * P::D + j, sums[e / 2 * 4 + half * 2 + e % 2]);
    }
  }
}

// Sums of the rows of dY. A thread has 8 features of its group's, and every 16th row.
template <typename T, typename Tile> struct RowSums {
  float own[8] = {};

  // Of the stage, in steps of 16 rows: step `first` and every `EVERY`th behind it.
  template <int EVERY = 1> __device__ __forceinline__ void add(const unsigned char* panel, int first = 0) {
    const int thread = threadIdx.x % 128, chunk = thread % 8;
#pragma unroll
    for (int step = 0; step < Tile::ROWS / 16; step += EVERY) {
      const int row = thread / 8 + (step + first) * 16;
      const uint4 eight = *reinterpret_cast<const uint4*>(panel + row * 128 + (chunk ^ row % 8) * 16);
      const T* const features = reinterpret_cast<const T*>(&eight);
#pragma unroll
      for (int e = 0; e < 8; ++e) own[e] += to_float(features[e]);
    }
  }

  // `place(feature of the block's tile, sum)`; `memory` is of 64 * 4 * 16 bytes for each group, and free.
  template <typename Place> __device__ __forceinline__ void store(float* memory, const Place& place) {
    const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
    float* const of_group = memory + group * 16 * 64;
#pragma unroll
    for (int e = 0; e < 8; ++e) of_group[thread / 8 * 64 + thread % 8 * 8 + e] = own[e];
    __syncthreads();
    if (thread >= 64) return;
    float sum = 0.0f;
#pragma unroll
    for (int row = 0; row < 16; ++row) sum += of_group[row * 64 + thread];
    place(group * 64 + thread, sum);
  }
};

template <typename T, typename P, typename Tile, bool WITH_BIAS>
__device__ __forceinline__ void weight_grad_wgmma16_kernel(const WeightGradArguments& arguments) {
  constexpr int64 ELEMENTS = int64(P::A) * P::B * P::C * P::D;
  constexpr int64 SHARE = ELEMENTS + (WITH_BIAS ? int64(P::A) * Tile::OUT : 0);
  static_assert(!WITH_BIAS || Tile::SHARED_BYTES >= Tile::GROUPS * 16 * 64 * 4, "");
  extern __shared__ __align__(1024) unsigned char stages[];
  const WeightGradPlace<P, Tile> own;
  const int64 begin = own.share * arguments.rows_per_share, last = begin + arguments.rows_per_share;
  const int64 end = last < arguments.batch ? last : arguments.batch;
  const int steps = static_cast<int>((end - begin + Tile::ROWS - 1) / Tile::ROWS);
  const uint16* const grad = static_cast<const uint16*>(arguments.grad) + own.i * Tile::OUT;
  const uint16* const x = static_cast<const uint16*>(arguments.x) + own.i * Tile::IN;
  const auto load = [&](int step) {
    unsigned char* const stage = stages + step % Tile::STAGES * Tile::STAGE_BYTES;
    const int64 row = begin + int64(step) * Tile::ROWS;
    const int rows = rows_inside<Tile::ROWS>(end - row);
    load_panels<Tile, Tile::GROUPS, Tile::OUT>(stage, grad + row * arguments.grad_stride, arguments.grad_stride, own.m0,
                                               rows);
    load_panels<Tile, Tile::PANELS, Tile::IN>(stage + Tile::GROUPS * Tile::PANEL_BYTES, x + row * arguments.x_stride,
                                              arguments.x_stride, own.n0, rows);
  };
  griddepcontrol_wait();
#pragma unroll 1
  for (int step = 0; step < Tile::STAGES - 2; ++step) {
    if (step < steps) load(step);
    cp_async_commit_group();
  }
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const uint32 first = __shfl_sync(~0u, shared_address(stages), 0);
  float sums[Tile::N / 2];
#pragma unroll
  for (int e = 0; e < Tile::N / 2; ++e) sums[e] = 0.0f;
  RowSums<T, Tile> of_bias;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group<Tile::STAGES - 3>();
    fence_view_async_shared();
    __syncthreads();  // the stage is full for all, and the one before the last is free
    const uint32 stage = first + step % Tile::STAGES * Tile::STAGE_BYTES;
    const uint64 a = make_swizzled_smem_desc(stage + group * Tile::PANEL_BYTES, Tile::PANEL_BYTES);
    const uint64 b = make_swizzled_smem_desc(stage + Tile::GROUPS * Tile::PANEL_BYTES, Tile::PANEL_BYTES);
    wgmma_fence_operand(sums);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < Tile::ROWS / 16; ++s) multiply_rows<T, Tile::N>(sums, a + s * 128, b + s * 128, 1);
    wgmma_commit_group();
    if (step + Tile::STAGES - 2 < steps) load(step + Tile::STAGES - 2);
    cp_async_commit_group();
    if (WITH_BIAS && own.n0 == 0) {
      of_bias.add(stages + step % Tile::STAGES * Tile::STAGE_BYTES + group * Tile::PANEL_BYTES);
    }
    wgmma_wait_group<1>();
  }
  wgmma_wait_group<0>();
  wgmma_fence_operand(sums);
  if (arguments.shares == 1) {
    store_sums(sums, own, [&](int64 at, float sum) {
      static_cast<uint16*>(arguments.to)[at] = static_cast<uint16>(pack_pair<T>(sum, 0.0f));
    });
  } else {
    float* const to = static_cast<float*>(arguments.to) + own.share * SHARE;
    store_sums(sums, own, [&](int64 at, float sum) { to[at] = sum; });
  }
  if (!WITH_BIAS || own.n0 != 0) return;
  cp_async_wait_group<0>();
  __syncthreads();  // the stages are free
  of_bias.store(reinterpret_cast<float*>(stages), [&](int feature, float sum) {
    if (own.m0 + feature >= Tile::OUT) return;
    const int64 at = own.i * Tile::OUT + own.m0 + feature;
    if (arguments.shares == 1) {
      static_cast<uint16*>(arguments.bias)[at] = static_cast<uint16>(pack_pair<T>(sum, 0.0f));
    } else {
      static_cast<float*>(arguments.to)[own.share * SHARE + ELEMENTS + at] = sum;
    }
  });
}
