// Products of short sums by ordinary multiply-adds, one j (or two neighbours) a thread.
//
// Neighbouring threads have neighbouring j, so x, the weights and y are read and written as they lie
// in memory: whole sectors, no shared memory, no permuting. A thread computes ROWS rows by OUTPUTS
// values of k at a time in registers: each weight serves ROWS rows, each value of x OUTPUTS outputs.
// Weights come again for the rows of other threads, from the L1 cache.
#pragma once

#include "common/kernel_params.cuh"
#include "common/pdl.cuh"
#include "common/ptx.cuh"

template <typename T_, typename P_, int THREADS_, int SLOTS_, int ROWS_, int OUTPUTS_, int WIDTH_>
struct LaneFmaTile {
  using T = T_;
  using P = P_;
  static constexpr int THREADS = THREADS_;
  static constexpr int SLOTS = SLOTS_;      // threads of a row: each has WIDTH neighbouring j
  static constexpr int ROWS = ROWS_;        // rows of a thread
  static constexpr int OUTPUTS = OUTPUTS_;  // values of k of a thread at a time
  static constexpr int WIDTH = WIDTH_;
  static constexpr int GROUPS = THREADS / SLOTS;
  static constexpr int TILE_ROWS = GROUPS * ROWS;
  static constexpr int WINDOWS = (P::D / WIDTH + SLOTS - 1) / SLOTS;
  static constexpr int TILES_PER_ROW_TILE = P::A * WINDOWS;
  static_assert(P::D % WIDTH == 0 && SLOTS <= THREADS);
};

// WIDTH elements at an address of WIDTH times their size.
template <typename T, int WIDTH>
__device__ __forceinline__ void load_neighbors(const T* from, float (&values)[WIDTH]) {
  if constexpr (WIDTH == 1) {
    values[0] = to_float(*from);
  } else if constexpr (sizeof(T) == 4) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    values[0] = pair.x;
    values[1] = pair.y;
  } else {
    const uint32 word = *reinterpret_cast<const uint32*>(from);
    values[0] = to_float(T{static_cast<uint16>(word)});
    values[1] = to_float(T{static_cast<uint16>(word >> 16)});
  }
}

template <typename T, int WIDTH>
__device__ __forceinline__ void store_neighbors(T* to, const float (&values)[WIDTH]) {
  if constexpr (WIDTH == 1) {
    *to = from_float<T>(values[0]);
  } else if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
  } else {
    *reinterpret_cast<uint32*>(to) = pack_pair<T>(values[0], values[1]);
  }
}

// Strides of operands, in elements. FAST: j lies side by side everywhere, the weight in order, and
// pairs at even places; the offsets of l and k are then known to the compiler.
template <typename Tile, bool FAST> struct LaneFmaStrides {
  using P = typename Tile::P;
  const Arguments& arguments;

  __device__ __forceinline__ int64 x_l() const {
    return FAST ? int64(P::D) : P::D * arguments.x_feature_stride;
  }
  __device__ __forceinline__ int64 y_k() const {
    return FAST ? int64(P::D) : P::D * arguments.y_feature_stride;
  }
  __device__ __forceinline__ int64 w_l() const {
    return FAST ? int64(P::D) : arguments.weight_stride_c;
  }
  __device__ __forceinline__ int64 w_k() const {
    return FAST ? int64(P::C) * P::D : arguments.weight_stride_b;
  }
  __device__ __forceinline__ int64 x_j() const { return FAST ? 1 : arguments.x_feature_stride; }
  __device__ __forceinline__ int64 y_j() const { return FAST ? 1 : arguments.y_feature_stride; }
  __device__ __forceinline__ int64 w_j() const { return FAST ? 1 : arguments.weight_stride_d; }
};

// WIDTH neighbours whose strides are known only now.
template <typename T, int WIDTH, bool FAST>
__device__ __forceinline__ void load_values(const T* from, int64 stride, float (&values)[WIDTH]) {
  if constexpr (FAST) {
    load_neighbors(from, values);
  } else {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) values[v] = to_float(from[v * stride]);
  }
}

// COUNT values of k for all rows of a thread.
template <typename Tile, bool FAST, int COUNT>
__device__ __forceinline__ void lane_fma_outputs(const LaneFmaStrides<Tile, FAST>& strides,
                                                 const typename Tile::T* const (&x)[Tile::ROWS],
                                                 const typename Tile::T* weight,
                                                 typename Tile::T* const (&y)[Tile::ROWS],
                                                 int64 y_offset, int rows) {
  using T = typename Tile::T;
  constexpr int ROWS = Tile::ROWS, WIDTH = Tile::WIDTH, C = Tile::P::C;
  // Of strides that are known only now, addresses of more l would take more registers than values.
  constexpr int UNROLL = !FAST ? 1 : C < 4 ? C : 4;
  float sums[ROWS][COUNT][WIDTH] = {};
#pragma unroll UNROLL
  for (int l = 0; l < C; ++l) {
    float xs[ROWS][WIDTH], ws[COUNT][WIDTH];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      load_values<T, WIDTH, FAST>(x[r] + l * strides.x_l(), strides.x_j(), xs[r]);
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
      load_values<T, WIDTH, FAST>(weight + l * strides.w_l() + k * strides.w_k(), strides.w_j(), ws[k]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) sums[r][k][v] = fmaf(xs[r][v], ws[k][v], sums[r][k][v]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r >= rows) break;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      T* const to = y[r] + y_offset + k * strides.y_k();
      if constexpr (FAST) {
        store_neighbors(to, sums[r][k]);
      } else {
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) to[v * strides.y_j()] = from_float<T>(sums[r][k][v]);
      }
    }
  }
}

template <typename Tile, bool FAST>
__device__ __forceinline__ void lane_fma_tiles(const Arguments& arguments) {
  using T = typename Tile::T;
  using P = typename Tile::P;
  constexpr int SLOTS = Tile::SLOTS, ROWS = Tile::ROWS, OUTPUTS = Tile::OUTPUTS, GROUPS = Tile::GROUPS;
  const int slot = threadIdx.x % SLOTS, group = threadIdx.x / SLOTS;
  if (group >= GROUPS) return;
  const LaneFmaStrides<Tile, FAST> strides{arguments};
  const int64 tiles = (arguments.batch + Tile::TILE_ROWS - 1) / Tile::TILE_ROWS * Tile::TILES_PER_ROW_TILE;
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int within = static_cast<int>(tile % Tile::TILES_PER_ROW_TILE);
    const int window = within % Tile::WINDOWS, i = within / Tile::WINDOWS;
    const int j = (window * SLOTS + slot) * Tile::WIDTH;
    const int64 row0 = tile / Tile::TILES_PER_ROW_TILE * Tile::TILE_ROWS + group;
    if (j >= P::D || row0 >= arguments.batch) continue;
    // Rows beyond the batch are computed from the last one, and not written.
    const int64 left = (arguments.batch - row0 + GROUPS - 1) / GROUPS;
    const int rows = left < ROWS ? static_cast<int>(left) : ROWS;
    const T* x[ROWS];
    T* y[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64 row = row0 + (r < rows ? r : 0) * GROUPS;
      x[r] = static_cast<const T*>(arguments.x) + row * arguments.x_batch_stride +
             i * (P::C * strides.x_l()) + j * strides.x_j();
      y[r] = static_cast<T*>(arguments.y) + row * arguments.y_batch_stride +
             i * (P::B * strides.y_k()) + j * strides.y_j();
    }
    const int64 w_i = FAST ? int64(P::B) * P::C * P::D : arguments.weight_stride_a;
    const T* const weight = static_cast<const T*>(arguments.weight) + i * w_i + j * strides.w_j();
    constexpr int WHOLE = P::B / OUTPUTS * OUTPUTS;
#pragma unroll 1
    for (int k = 0; k < WHOLE; k += OUTPUTS)
      lane_fma_outputs<Tile, FAST, OUTPUTS>(strides, x, weight + k * strides.w_k(), y,
                                            k * strides.y_k(), rows);
    if constexpr (WHOLE < P::B)
      lane_fma_outputs<Tile, FAST, P::B - WHOLE>(strides, x, weight + WHOLE * strides.w_k(), y,
                                                 WHOLE * strides.y_k(), rows);
  }
}

template <typename Tile> __device__ __forceinline__ void lane_fma_kernel(const Arguments& arguments) {
  using P = typename Tile::P;
  constexpr int64 BYTES = Tile::WIDTH * sizeof(typename Tile::T);
  const uint64 addresses = reinterpret_cast<uint64>(arguments.x) | reinterpret_cast<uint64>(arguments.y) |
                           reinterpret_cast<uint64>(arguments.weight);
  const int64 row_strides = arguments.x_batch_stride | arguments.y_batch_stride;
  const bool fast = arguments.x_feature_stride == 1 && arguments.y_feature_stride == 1 &&
                    arguments.weight_stride_d == 1 && arguments.weight_stride_c == P::D &&
                    arguments.weight_stride_b == int64(P::C) * P::D &&
                    arguments.weight_stride_a == int64(P::B) * P::C * P::D &&
                    addresses % BYTES == 0 && row_strides % Tile::WIDTH == 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (fast) {
    lane_fma_tiles<Tile, true>(arguments);
  } else {
    lane_fma_tiles<Tile, false>(arguments);
  }
}
