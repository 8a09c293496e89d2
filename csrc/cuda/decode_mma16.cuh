// 16-bit factors for a few rows of x, as in decoding (batch first, sm_80 and up).
//
// With 1 to 64 rows the time is that of reading the weight once, so all of it has to be requested at
// the same time. A block computes a tile: group i, JC values of j, NB outputs k, and a share of
// the sum over l. Its threads load the tile's weights straight into the tensor cores' fragments, from
// the canonical layout (a thread's 16 bytes hold several j of one l, or several l; see mma16.cuh),
// so nothing is packed and a weight may change between any two calls. x is brought to shared memory
// meanwhile. Few outputs and a long sum would leave multiprocessors idle: warps share the sum over l
// and add up in shared memory, and so do the blocks of a cluster (sm_90 and up), each of which reads
// an equal part of the others' sums. A tile always adds in the same order.
#pragma once

#include "common/cluster.cuh"
#include "common/factor_epilogue.cuh"
#include "common/pdl.cuh"
#include "mma16.cuh"

template <typename P, int WARPS_J_, int WARPS_M_, int WARPS_N_, int WARPS_L_, int MT_, int NT_, int UNITS_,
          int CLUSTER_, int BLOCKS_>
struct DecodeMma16Tile {
  using Layout = LaneLayout<P::D>;
  static constexpr int WARPS_J = WARPS_J_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, WARPS_L = WARPS_L_;
  static constexpr int MT = MT_, NT = NT_;    // 16-row and 8-output tiles of a warp
  static constexpr int UNITS = UNITS_;        // units of l whose weights a warp loads at a time
  static constexpr int CLUSTER = CLUSTER_;    // blocks that share the sum over l
  static constexpr int BLOCKS = BLOCKS_;      // blocks that should fit on a multiprocessor
  static constexpr int WARPS = WARPS_J * WARPS_M * WARPS_N * WARPS_L, THREADS = 32 * WARPS;
  static constexpr int JC = WARPS_J * Layout::J, BM = WARPS_M * MT * 16, NB = WARPS_N * NT * 8;
  static constexpr int ALL_UNITS = (P::C + Layout::UNIT - 1) / Layout::UNIT;
  static constexpr int BLOCK_UNITS = (ALL_UNITS + CLUSTER - 1) / CLUSTER;
  static constexpr int CHUNKS_OF_L = Layout::WIDE ? WARPS_J : 1;  // that hold one l, where 8 divides d
  static constexpr int X_CHUNKS = BLOCK_UNITS * Layout::UNIT * JC / 8;  // of one row
  static constexpr int X_PITCH = row_pitch(X_CHUNKS, Layout::WIDE ? WARPS_J : Layout::RUN);
  static constexpr int X_BYTES = BM * X_PITCH * 16;
  static constexpr int FEATURES = NB * JC;  // outputs of a row
  static constexpr int SUM_PITCH = FEATURES + (Layout::WIDE ? 4 : 8);
  static constexpr int SUM_BYTES = WARPS_L * BM * SUM_PITCH * 4;
  static constexpr int SHARED_BYTES = X_BYTES > SUM_BYTES ? X_BYTES : SUM_BYTES;  // one after the other
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB;
  static constexpr int COLUMNS = P::A * (P::D / JC) * OUTPUT_TILES;
  static_assert(Layout::WIDE || WARPS_J == 1, "all j of a small d belong to one warp");
  static_assert(P::D % JC == 0 && P::C * P::D % 8 == 0, "");
};

__device__ __forceinline__ void add(float4& sum, const float4& value) {
  sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

// The place of a block's feature f behind its first.
template <typename P, typename Tile> __device__ __forceinline__ int feature_at(int f) {
  return Tile::Layout::WIDE ? f / Tile::JC * P::D + f % Tile::JC : f;
}

// Whether a block's results can be read and written four at a time.
template <typename P, typename Tile> constexpr bool in_fours() {
  return Tile::Layout::WIDE || P::B * P::D % 4 == 0;
}

// Four neighbours in memory. `from` is at the block's first feature, `outputs` how many k are left there.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ float4 load_four(const uint16* from, int f, int outputs) {
  if (in_fours<P, Tile>()) {
    uint2 words = make_uint2(0, 0);
    if (f / Tile::JC < outputs) words = *reinterpret_cast<const uint2*>(from + feature_at<P, Tile>(f));
    const auto value = [](uint32 word, int shift) { return to_float(T{static_cast<uint16>(word >> shift)}); };
    return make_float4(value(words.x, 0), value(words.x, 16), value(words.y, 0), value(words.y, 16));
  }
  float values[4] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (f + e < outputs * P::D) values[e] = to_float(T{from[f + e]});
  }
  return make_float4(values[0], values[1], values[2], values[3]);
}

// Stores four sums of one row. `y` is y at (row, i, k0, j0), or as far behind `first`, whose elements may be of float32;
// `outputs` is how many k are left there.
template <typename T, typename P, typename Tile, typename After>
__device__ __forceinline__ void store_four(void* first, uint16* y, int f, const float4& sum, int outputs) {
  if constexpr (After::IN_FLOAT32) {
    float* const row = static_cast<float*>(first) + (y - static_cast<uint16*>(first));
    if constexpr (in_fours<P, Tile>()) {
      if (f / Tile::JC < outputs) store_four_floats(row + feature_at<P, Tile>(f), sum);
    } else {
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (f + e < outputs * P::D) row[f + e] = values[e];
      }
    }
  } else if (in_fours<P, Tile>()) {
    if (f / Tile::JC < outputs) {  // the first: the last one is inside if it is
      uint16* const to = y + feature_at<P, Tile>(f);
      *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
    }
  } else {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (f + e < outputs * P::D) y[f + e] = from_float<T>(values[e]).bits;
    }
  }
}

// The epilogue of a block's results, four at a time. Where all of a thread's results have the same biases,
// these are read ahead of the products. `first` is the block's first feature.
template <typename T, typename P, typename Tile, typename After> struct FourEpilogue {
  static constexpr bool SAME = Tile::THREADS % (Tile::FEATURES / 4) == 0;  // f, of all of a thread's results
  const typename After::Arguments& arguments;
  const int outputs;
  const int64 first;
  float4 bias;

  __device__ __forceinline__ FourEpilogue(const typename After::Arguments& arguments, int64 first, int outputs, int f)
      : arguments(arguments), outputs(outputs), first(first), bias(bias_at(f)) {}

  __device__ __forceinline__ float4 bias_at(int f) const {
    if constexpr (After::BIAS) {
      return load_four<T, P, Tile>(static_cast<const uint16*>(arguments.bias) + first, f, outputs);
    }
    return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // `y`: the row of y at `first`. The residual lies in memory as y does.
  __device__ __forceinline__ float4 operator()(const float4& sum, int f, const uint16* y) const {
    const float4 summand = SAME ? bias : bias_at(f);
    float4 residual = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (After::RESIDUAL) {
      const int64 at = y - static_cast<const uint16*>(arguments.y);
      residual = load_four<T, P, Tile>(static_cast<const uint16*>(arguments.residual) + at, f, outputs);
    }
    return with_summands<After>(sum, summand, residual);
  }
};

// A warp's share of the block's tile.
template <typename Tile> struct DecodeMma16Place {
  int lane, quarter, row_in_eight, warp_j, warp_n, warp_m, warp_l;
  __device__ __forceinline__ explicit DecodeMma16Place(int thread) {
    const int warp = thread / 32;
    lane = thread % 32, quarter = lane % 4, row_in_eight = lane / 4;
    // Warps that read the same or neighbouring bytes of the weight come next to each other.
    warp_j = warp % Tile::WARPS_J;
    warp_m = warp / Tile::WARPS_J % Tile::WARPS_M;
    warp_l = warp / (Tile::WARPS_J * Tile::WARPS_M) % Tile::WARPS_L;
    warp_n = warp / (Tile::WARPS_J * Tile::WARPS_M * Tile::WARPS_L);
  }
};

// Brings the block's part of x, from l0 on, to shared memory. `x` is x at (row0, i, 0, j0).
template <typename P, typename Tile>
__device__ __forceinline__ void copy_rows(unsigned char* shared, const uint16* x, int64 stride, int l0,
                                          int rows, int thread) {
  using Walk = RowWalk<Tile::BM, Tile::X_CHUNKS, Tile::THREADS>;
  const int m0 = thread / Walk::WIDTH;
  const int end = rows < Walk::end(m0) ? rows : Walk::end(m0);
#pragma unroll 4
  for (int pass = 0; pass < Walk::CHUNK_PASSES; ++pass) {
    const int chunk = thread % Walk::WIDTH + pass * Walk::WIDTH;
    const int offset = Tile::Layout::WIDE
                           ? (l0 + chunk / Tile::CHUNKS_OF_L) * P::D + chunk % Tile::CHUNKS_OF_L * 8
                           : l0 * P::D + chunk * 8;
    const bool inside = offset < P::C * P::D;
    const uint16* from = x + m0 * stride + offset;
    unsigned char* to = shared + (m0 * Tile::X_PITCH + chunk) * 16;
#pragma unroll 4
    for (int m = m0; m < end; m += Walk::PASS_ROWS) {
      cp_async_16(to, from, inside);
      from += Walk::PASS_ROWS * stride;
      to += Walk::PASS_ROWS * Tile::X_PITCH * 16;
    }
  }
  cp_async_commit_group();
}

// A lane's weights for UNITS units of l and NT tiles of outputs, as loaded.
template <typename Tile> using LaneWeights = uint32[Tile::UNITS][Tile::NT][Tile::Layout::CHUNKS * 4];

// Loads the units [first, first + UNITS) that are below `end`. `w` is the weight at (i, k0, 0, j0),
// `outputs` how many k are left there.
template <typename P, typename Tile>
__device__ __forceinline__ void load_units(LaneWeights<Tile>& words, const uint16* w, int first, int end,
                                           int outputs, const DecodeMma16Place<Tile>& place) {
  using Layout = typename Tile::Layout;
#pragma unroll
  for (int u = 0; u < Tile::UNITS; ++u)
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n) {
      const int k = (place.warp_n * Tile::NT + n) * 8 + output_of_column<Layout>(place.row_in_eight);
#pragma unroll
      for (int run = 0; run < Layout::RUNS; ++run) {
        const int l = (((first + u) * Layout::RUNS + run) * 4 + place.quarter) * Layout::RUN_L;
#pragma unroll
        for (int c = 0; c < Layout::RUN; ++c) {
          const int offset = l * P::D + (Layout::WIDE ? place.warp_j * 8 : c * 8);
          uint4 loaded = make_uint4(0, 0, 0, 0);
          if (first + u < end && k < outputs && offset < P::C * P::D) {
            loaded = *reinterpret_cast<const uint4*>(w + int64(k) * P::C * P::D + offset);
          }
          put_chunk(words[u][n] + (run * Layout::RUN + c) * 4, loaded);
        }
      }
    }
}

// Adds the units that were loaded. `x` is the block's x in shared memory at the first of them.
template <typename T, typename Tile>
__device__ __forceinline__ void multiply_units(Sums<Tile>& sums, const LaneWeights<Tile>& words,
                                               const unsigned char* x, int units, int rows,
                                               const DecodeMma16Place<Tile>& place) {
  using Layout = typename Tile::Layout;
#pragma unroll
  for (int u = 0; u < Tile::UNITS; ++u) {
    if (u >= units) break;
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m) {
      uint32 a[Layout::J][Layout::STEPS][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (place.warp_m * Tile::MT + m) * 16 + half * 8 + place.row_in_eight;
        uint32 loaded[Layout::CHUNKS * 4];
#pragma unroll
        for (int run = 0; run < Layout::RUNS; ++run) {
          const int q = (u * Layout::RUNS + run) * 4 + place.quarter;
#pragma unroll
          for (int c = 0; c < Layout::RUN; ++c) {
            const int chunk = Layout::WIDE ? q * Tile::CHUNKS_OF_L + place.warp_j : q * Layout::RUN + c;
            uint4 values = make_uint4(0, 0, 0, 0);
            if (row < rows) values = *reinterpret_cast<const uint4*>(x + (row * Tile::X_PITCH + chunk) * 16);
            put_chunk(loaded + (run * Layout::RUN + c) * 4, values);
          }
        }
#pragma unroll
        for (int j = 0; j < Layout::J; ++j)
#pragma unroll
          for (int s = 0; s < Layout::STEPS; ++s) {
            a[j][s][half] = pair_of<Layout>(loaded, j, 2 * s);
            a[j][s][half + 2] = pair_of<Layout>(loaded, j, 2 * s + 1);
          }
      }
#pragma unroll
      for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
        for (int j = 0; j < Layout::J; ++j)
#pragma unroll
          for (int s = 0; s < Layout::STEPS; ++s) {
            mma_m16n8k16<T>(sums[m][n][j], a[j][s], pair_of<Layout>(words[u][n], j, 2 * s),
                            pair_of<Layout>(words[u][n], j, 2 * s + 1));
          }
    }
  }
}

// Writes a warp's sums beside those of the other warps that share the sum over l.
template <typename Tile>
__device__ __forceinline__ void gather_sums(float* shared, const Sums<Tile>& sums, int rows,
                                            const DecodeMma16Place<Tile>& place) {
  using Layout = typename Tile::Layout;
#pragma unroll
  for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (place.warp_m * Tile::MT + m) * 16 + half * 8 + place.row_in_eight;
      if (row >= rows) continue;
      float* const to = shared + (place.warp_l * Tile::BM + row) * Tile::SUM_PITCH;
#pragma unroll
      for (int n = 0; n < Tile::NT; ++n) {
        const int k = (place.warp_n * Tile::NT + n) * 8 + output_of_column<Layout>(2 * place.quarter);
        if (Layout::WIDE) {
#pragma unroll
          for (int column = 0; column < 2; ++column)
#pragma unroll
            for (int j = 0; j < Layout::J; j += 4) {
              const int e = half * 2 + column;
              *reinterpret_cast<float4*>(to + (k + 4 * column) * Tile::JC + place.warp_j * 8 + j) =
                  make_float4(sums[m][n][j][e], sums[m][n][(j + 1) % Layout::J][e],
                              sums[m][n][(j + 2) % Layout::J][e], sums[m][n][(j + 3) % Layout::J][e]);
            }
        } else {
          // In the order of memory: output k with j = 0.., then output k + 1.
#pragma unroll
          for (int e = 0; e < 2 * Layout::J; e += 2) {
            *reinterpret_cast<float2*>(to + k * Tile::JC + e) =
                make_float2(sums[m][n][e % Layout::J][half * 2 + e / Layout::J],
                            sums[m][n][(e + 1) % Layout::J][half * 2 + (e + 1) / Layout::J]);
          }
        }
      }
    }
}

template <typename T, typename P, typename Tile, typename After = NoEpilogue>
__device__ __forceinline__ void decode_mma16_kernel(const typename After::Arguments& arguments) {
  using Layout = typename Tile::Layout;
  constexpr int CLUSTER = Tile::CLUSTER, THREADS = Tile::THREADS;
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = threadIdx.x;
  const DecodeMma16Place<Tile> place(thread);

  // The blocks of a cluster are neighbours in the grid.
  const int rank = CLUSTER == 1 ? 0 : static_cast<int>(blockIdx.x % CLUSTER);
  const int64 tile = blockIdx.x / CLUSTER;
  const int column = static_cast<int>(tile % Tile::COLUMNS);
  const int64 row0 = tile / Tile::COLUMNS * Tile::BM;
  // Blocks that run at the same time read neighbouring j, whose weights share lines.
  constexpr int J_TILES = P::D / Tile::JC;
  const int j0 = column % J_TILES * Tile::JC;
  const int k0 = column / J_TILES % Tile::OUTPUT_TILES * Tile::NB;
  const int i = column / J_TILES / Tile::OUTPUT_TILES;
  const int rows = rows_inside<Tile::BM>(arguments.batch - row0), outputs = P::B - k0;
  const uint16* const w = static_cast<const uint16*>(arguments.weight) +
                          (int64(i) * P::B + k0) * P::C * P::D + j0;

  // Weights that are read at once before the wait need no request ahead.
  constexpr bool AT_ONCE = Tile::BLOCK_UNITS <= Tile::WARPS_L * Tile::UNITS;
  const bool settled = arguments.weight_is_settled;
  if (row0 == 0 && !(AT_ONCE && settled)) {
    prefetch_share<THREADS>(arguments.weight, int64(P::A) * P::B * P::C * P::D * 2,
                            column * CLUSTER + rank, Tile::COLUMNS * CLUSTER);
  }
  if (!settled) follow_kernel_ahead();

  const int first_unit = rank * Tile::BLOCK_UNITS;
  const int end = first_unit + Tile::BLOCK_UNITS < Tile::ALL_UNITS ? first_unit + Tile::BLOCK_UNITS
                                                                   : Tile::ALL_UNITS;
  int unit = first_unit + place.warp_l * Tile::UNITS;
  LaneWeights<Tile> words;
  load_units<P, Tile>(words, w, unit, end, outputs, place);
  if (settled) follow_kernel_ahead();
  constexpr int FOURS = Tile::FEATURES / 4;
  const FourEpilogue<T, P, Tile, After> after(arguments, (int64(i) * P::B + k0) * P::D + j0, outputs,
                                              (rank * THREADS + thread) % FOURS * 4);
  copy_rows<P, Tile>(shared,
                     static_cast<const uint16*>(arguments.x) + row0 * arguments.x_batch_stride +
                         int64(i) * P::C * P::D + j0,
                     arguments.x_batch_stride, first_unit * Layout::UNIT, rows, thread);
  cp_async_wait_group<0>();
  __syncthreads();

  Sums<Tile> sums;
  clear<Tile>(sums);
  while (unit < end) {
    const unsigned char* const x_units =
        shared + (unit - first_unit) * (Layout::UNIT * Tile::JC / 8) * 16;
    multiply_units<T, Tile>(sums, words, x_units, end - unit, rows, place);
    unit += Tile::WARPS_L * Tile::UNITS;
    if (unit < end) load_units<P, Tile>(words, w, unit, end, outputs, place);
  }

  __syncthreads();  // all have read x, whose place the sums take
  float* const parts = reinterpret_cast<float*>(shared);
  gather_sums<Tile>(parts, sums, rows, place);
  __syncthreads();

  constexpr int PART = Tile::BM * Tile::SUM_PITCH;
  uint16* const y = static_cast<uint16*>(arguments.y) + row0 * arguments.y_batch_stride +
                    (int64(i) * P::B + k0) * P::D + j0;
  const auto sum_of_warps = [&](int m, int f) {
    float4 sum = *reinterpret_cast<const float4*>(parts + m * Tile::SUM_PITCH + f);
#pragma unroll
    for (int part = 1; part < Tile::WARPS_L; ++part) {
      add(sum, *reinterpret_cast<const float4*>(parts + part * PART + m * Tile::SUM_PITCH + f));
    }
    return sum;
  };
  if constexpr (CLUSTER == 1) {
    for (int e = thread; e < rows * FOURS; e += THREADS) {
      const int m = e / FOURS, f = e % FOURS * 4;
      float4 sum = sum_of_warps(m, f);
      if constexpr (!After::IS_EMPTY) sum = after(sum, f, y + m * arguments.y_batch_stride);
      store_four<T, P, Tile, After>(arguments.y, y + m * arguments.y_batch_stride, f, sum, outputs);
    }
  } else {
    if (Tile::WARPS_L > 1) {
      for (int e = thread; e < rows * FOURS; e += THREADS) {
        const int m = e / FOURS, f = e % FOURS * 4;
        *reinterpret_cast<float4*>(parts + m * Tile::SUM_PITCH + f) = sum_of_warps(m, f);
      }
    }
    cluster_barrier();
    for (int e = rank * THREADS + thread; e < rows * FOURS; e += CLUSTER * THREADS) {
      const int m = e / FOURS, f = e % FOURS * 4;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) {
        add(sum, load_from_block(reinterpret_cast<const float4*>(parts + m * Tile::SUM_PITCH + f), other));
      }
      if constexpr (!After::IS_EMPTY) sum = after(sum, f, y + m * arguments.y_batch_stride);
      store_four<T, P, Tile, After>(arguments.y, y + m * arguments.y_batch_stride, f, sum, outputs);
    }
    cluster_barrier();  // none may end while others read its sums
  }
}
