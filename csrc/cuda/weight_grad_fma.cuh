// The gradient of a factor's weight for few rows, by ordinary multiply-adds (any type and any d, batch first):
//
//   dK[i,k,l,j] = sum over rows n of dY[n,i,k,j] X[n,i,l,j]
//
// Neighbouring lanes have neighbouring features of x, in the order (i, l, j): x and dK are read and written as they lie
// in memory, and of dY neighbouring lanes read at most D neighbouring values. A lane adds up some k by some features in
// registers. The warps of a block have different rows; at the end they add up through shared memory, in a fixed order.
//
// WITH_BIAS: dY is added up, too; lanes with l = 0 have each of its features once.
#pragma once

#include "common/kernel_params.cuh"
#include "common/pdl.cuh"
#include "common/weight_grad_shares.cuh"

// KS: k of a block. RUNS: runs of 32 features of a block.
template <typename P, int KS_, int RUNS_, int WARPS_, int BLOCKS_>
struct WeightGradFmaTile {
  static constexpr int KS = KS_, RUNS = RUNS_, WARPS = WARPS_, BLOCKS = BLOCKS_;
  static constexpr int THREADS = 32 * WARPS, FEATURES = 32 * RUNS;
  static constexpr int OF_BLOCK = P::C * P::D, INPUTS = P::A * OF_BLOCK;  // features of x, of an i and in all
  static constexpr int K_TILES = (P::B + KS - 1) / KS, FEATURE_TILES = (INPUTS + FEATURES - 1) / FEATURES;
  static constexpr int TILES = K_TILES * FEATURE_TILES;
  static constexpr int SHARED_BYTES = WARPS * KS * FEATURES * 4;
  // All runs of a lane have the same i and j: they share the values of dY.
  static constexpr int DISTINCT = OF_BLOCK % FEATURES == 0 && 32 % P::D == 0 ? 1 : RUNS;
};

// Adds the values of all warps up, and calls store(k of the block, feature of the block, sum) for each.
template <typename Tile, int COUNT, typename Store>
__device__ __forceinline__ void add_warps(float* shared, const float (&own)[Tile::KS][COUNT], Store store) {
  constexpr int PLACES = Tile::KS * Tile::FEATURES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Tile::KS; ++k)
#pragma unroll
    for (int run = 0; run < Tile::RUNS; ++run)
      shared[warp * PLACES + k * Tile::FEATURES + run * 32 + lane] = own[k][run % COUNT];
  __syncthreads();
#pragma unroll 1
  for (int place = threadIdx.x; place < PLACES; place += Tile::THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int of = 0; of < Tile::WARPS; ++of) sum += shared[of * PLACES + place];
    store(place / Tile::FEATURES, place % Tile::FEATURES, sum);
  }
}

template <typename T, typename P, typename Tile, bool WITH_BIAS>
__device__ __forceinline__ void weight_grad_fma_kernel(const WeightGradArguments& arguments) {
  constexpr int KS = Tile::KS, RUNS = Tile::RUNS, DISTINCT = Tile::DISTINCT, OF_BLOCK = Tile::OF_BLOCK;
  extern __shared__ __align__(16) float of_warps[];
  const int k0 = static_cast<int>(blockIdx.x) % Tile::K_TILES * KS;
  const int feature0 = static_cast<int>(blockIdx.x) / Tile::K_TILES * Tile::FEATURES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Lanes beyond the features, and k beyond the block's, read the last ones, and are not written.
  int x_at[RUNS], grad_at[DISTINCT];
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
    const int feature = feature0 + run * 32 + lane;
    x_at[run] = feature < Tile::INPUTS ? feature : Tile::INPUTS - 1;
    if (run < DISTINCT) grad_at[run] = (x_at[run] / OF_BLOCK * P::B + k0) * P::D + x_at[run] % P::D;
  }
  int k_at[KS];
#pragma unroll
  for (int k = 0; k < KS; ++k) k_at[k] = (k0 + k < P::B ? k : P::B - 1 - k0) * P::D;
  float sums[KS][RUNS] = {}, of_bias[KS][DISTINCT] = {};
  griddepcontrol_wait();
#pragma unroll 4
  for (int64 row = warp; row < arguments.batch; row += Tile::WARPS) {
    const T* const x = static_cast<const T*>(arguments.x) + row * arguments.x_stride;
    const T* const grad = static_cast<const T*>(arguments.grad) + row * arguments.grad_stride;
    float xs[RUNS], grads[KS][DISTINCT];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) xs[run] = to_float(x[x_at[run]]);
#pragma unroll
    for (int k = 0; k < KS; ++k)
#pragma unroll
      for (int run = 0; run < DISTINCT; ++run) grads[k][run] = to_float(grad[grad_at[run] + k_at[k]]);
#pragma unroll
    for (int k = 0; k < KS; ++k)
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        sums[k][run] = fmaf(grads[k][run % DISTINCT], xs[run], sums[k][run]);
        if (WITH_BIAS && run < DISTINCT) of_bias[k][run] += grads[k][run];
      }
  }
  add_warps<Tile>(of_warps, sums, [&](int k, int place, float sum) {
    const int feature = feature0 + place;
    if (k0 + k >= P::B || feature >= Tile::INPUTS) return;
    const int64 row = int64(feature / OF_BLOCK) * P::B + k0 + k;
    static_cast<T*>(arguments.to)[row * OF_BLOCK + feature % OF_BLOCK] = from_float<T>(sum);
  });
  const int first = feature0 % OF_BLOCK;
  if (!WITH_BIAS || (first >= P::D && first + Tile::FEATURES <= OF_BLOCK)) return;  // no l = 0 here
  __syncthreads();
  add_warps<Tile>(of_warps, of_bias, [&](int k, int place, float sum) {
    const int feature = feature0 + place, j = feature % OF_BLOCK;
    if (k0 + k >= P::B || feature >= Tile::INPUTS || j >= P::D) return;
    const int64 row = int64(feature / OF_BLOCK) * P::B + k0 + k;
    static_cast<T*>(arguments.bias)[row * P::D + j] = from_float<T>(sum);
  });
}
