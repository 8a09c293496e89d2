// The general kernel: right for every pattern, batch, layout, stride and alignment.
//
// For each (i, j) the product is an ordinary matrix product, y[m, k] = sum_l x[m, l] w[k, l], whose
// operands lie d elements apart. A block computes a ROWS x OUTPUTS tile of one (i, j), stepping
// through l with both operands staged in shared memory as fp32. Each step is summed on its own and
// then added to the total: two short fp32 sums round less than one long one. Nothing is assumed of
// addresses beyond the element's own alignment.
#pragma once

#include "common/kernel_params.cuh"

template <int ROWS_, int OUTPUTS_, int STEP_> struct GeneralTile {
  static constexpr int ROWS = ROWS_, OUTPUTS = OUTPUTS_, STEP = STEP_;
  static constexpr int PER_THREAD = 4;  // a thread's square of outputs
  static constexpr int THREADS = ROWS / PER_THREAD * (OUTPUTS / PER_THREAD);
};

template <typename T, typename P, typename Tile, bool BATCH_LAST>
__device__ __forceinline__ void naive_kernel(const Arguments& arguments) {
  constexpr int ROWS = Tile::ROWS, OUTPUTS = Tile::OUTPUTS, STEP = Tile::STEP;
  constexpr int R = Tile::PER_THREAD;
  // One column of padding keeps the transposing stores of a warp in different banks.
  __shared__ float x_tile[STEP][ROWS + 1];
  __shared__ float w_tile[STEP][OUTPUTS + 1];

  const T* x = static_cast<const T*>(arguments.x);
  const T* weight = static_cast<const T*>(arguments.weight);
  T* y = static_cast<T*>(arguments.y);
  const int thread = threadIdx.x;
  // Neighbouring threads compute what lies closest together in y: rows if the batch comes last.
  constexpr int ROW_THREADS = ROWS / R, OUTPUT_THREADS = OUTPUTS / R;
  const int first_row = BATCH_LAST ? thread % ROW_THREADS : thread / OUTPUT_THREADS;
  const int first_output = BATCH_LAST ? thread / ROW_THREADS : thread % OUTPUT_THREADS;

  constexpr int OUTPUT_TILES = (P::B + OUTPUTS - 1) / OUTPUTS;
  constexpr int64 TILES_PER_ROW_TILE = int64(P::A) * OUTPUT_TILES * P::D;
  const int64 tiles = (arguments.batch + ROWS - 1) / ROWS * TILES_PER_ROW_TILE;

  // Neighbouring blocks take neighbouring j, whose inputs share sectors in the L2 cache.
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int within = static_cast<int>(tile % TILES_PER_ROW_TILE);
    const int64 row0 = tile / TILES_PER_ROW_TILE * ROWS;
    const int j = within % P::D;
    const int output0 = within / P::D % OUTPUT_TILES * OUTPUTS;
    const int i = within / P::D / OUTPUT_TILES;

    const T* x_group = x + (int64(i) * P::C * P::D + j) * arguments.x_feature_stride;
    const T* w_group = weight + i * arguments.weight_stride_a + j * arguments.weight_stride_d;

    float sums[R][R] = {};
    for (int l0 = 0; l0 < P::C; l0 += STEP) {
      for (int e = thread; e < ROWS * STEP; e += Tile::THREADS) {
        // Threads run along whichever of batch and feature is closer together in memory.
        const int m = BATCH_LAST ? e % ROWS : e / STEP;
        const int l = BATCH_LAST ? e / ROWS : e % STEP;
        const bool inside = row0 + m < arguments.batch && l0 + l < P::C;
        x_tile[l][m] = inside ? to_float(x_group[(row0 + m) * arguments.x_batch_stride +
                                                 int64(l0 + l) * P::D * arguments.x_feature_stride])
                              : 0.0f;
      }
      for (int e = thread; e < OUTPUTS * STEP; e += Tile::THREADS) {
        const int k = e / STEP, l = e % STEP;
        const bool inside = output0 + k < P::B && l0 + l < P::C;
        w_tile[l][k] = inside ? to_float(w_group[(output0 + k) * arguments.weight_stride_b +
                                                 (l0 + l) * arguments.weight_stride_c])
                              : 0.0f;
      }
      __syncthreads();
      float step_sums[R][R] = {};
#pragma unroll
      for (int l = 0; l < STEP; ++l) {
        float xs[R], ws[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          xs[r] = x_tile[l][first_row + r * ROW_THREADS];
          ws[r] = w_tile[l][first_output + r * OUTPUT_THREADS];
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int s = 0; s < R; ++s) step_sums[r][s] = fmaf(xs[r], ws[s], step_sums[r][s]);
      }
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < R; ++s) sums[r][s] += step_sums[r][s];
      __syncthreads();
    }

#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int s = 0; s < R; ++s) {
        const int64 m = row0 + first_row + r * ROW_THREADS;
        const int k = output0 + first_output + s * OUTPUT_THREADS;
        if (m < arguments.batch && k < P::B) {
          const int64 feature = (int64(i) * P::B + k) * P::D + j;
          y[m * arguments.y_batch_stride + feature * arguments.y_feature_stride] =
              from_float<T>(sums[r][s]);
        }
      }
  }
}
