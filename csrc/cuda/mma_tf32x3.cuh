// FP32 factors on tensor cores, with j riding in the vector lanes (batch first, sm_80 and up).
//
// As in mma16.cuh, a 16-byte load of a row of x, or of a row of the weight, holds several j at
// once (4 j of one l where 4 divides d; l x j = 2 x 2 for d = 2; ...). An element is a register, so
// such loads are the tensor cores' operands of all those j as they stand.
//
// Tensor cores multiply TF32 numbers, which have 10 bits of fraction instead of 23. Each factor is
// split in registers into its nearest TF32 number, `big`, and what is left, `small`:
// x w = big big + big small + small big, with an error below fp32's own rounding. Tensor cores also
// truncate their sums, always toward zero, which adds up; so they sum 8 values of l only, and
// ordinary additions, which round to nearest, do the rest. An infinity and a value beyond 2^114
// split into NaN: results that are not finite are computed once more by ordinary fp32 arithmetic.
// With one product instead of three (PRODUCTS = 1) this is plain TF32.
//
// A block computes tiles of BM rows x NB outputs k x JC values of j; x streams through a ring of
// stages whose loads run ahead across the ends of tiles. Weights are either RESIDENT, stored for a
// block that owns one column (i, j, k) and walks over rows, or streamed through the ring with x.
#pragma once

#include "common/factor_epilogue.cuh"
#include "common/pdl.cuh"
#include "common/ptx.cuh"
#include "common/smem_layout.cuh"
#include "common/tf32_split.cuh"

// How d consecutive j lie in 16-byte chunks: RUN chunks hold RUN_L values of l of J values of j.
template <int D> struct LaneLayout {
  static constexpr bool WIDE = D % 4 == 0;  // a chunk holds one l and 4 of its j
  static constexpr int J = WIDE ? 4 : D;
  static constexpr int RUN = D % 3 == 0 && !WIDE ? 3 : 1;
  static constexpr int RUN_L = RUN * 4 / J;
  static constexpr int L = RUN_L > 2 ? RUN_L : 2;  // l that a thread takes at a time
  static constexpr int RUNS = L / RUN_L;           // runs that a thread takes at a time
  static constexpr int CHUNKS = RUNS * RUN;
  static constexpr int STEPS = L / 2;              // tensor-core steps (8 l) in a unit
  static constexpr int UNIT = 4 * L;               // l that a warp takes at a time
  static_assert(RUN * 4 % J == 0, "d must be 1, 2, 3, 6 or a multiple of 4");
};

// Bytes of weights, split, that stay in the L2 cache beside the rows that pass through it.
constexpr int64 CACHED_WEIGHTS = 32 << 20;

template <typename P, int WARPS_J_, int WARPS_M_, int WARPS_N_, int MT_, int NT_, int KL_, int STAGES_,
          int BLOCKS_, bool RESIDENT_, int PRODUCTS_>
struct MmaTf32x3Tile {
  using Layout = LaneLayout<P::D>;
  static constexpr int WARPS_J = WARPS_J_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_;
  static constexpr int MT = MT_, NT = NT_;  // 16-row and 8-output tiles of a warp
  static constexpr int KL = KL_;            // l in a stage
  static constexpr int STAGES = STAGES_;
  static constexpr int BLOCKS = BLOCKS_;    // blocks that should fit on a multiprocessor
  static constexpr bool RESIDENT = RESIDENT_;
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr int WARPS = WARPS_J * WARPS_M * WARPS_N, THREADS = 32 * WARPS;
  static constexpr int LOADERS = THREADS;   // threads that copy to shared memory, the block's first
  static constexpr int JC = WARPS_J * Layout::J, BM = WARPS_M * MT * 16, NB = WARPS_N * NT * 8;
  static constexpr int UNITS = (P::C + Layout::UNIT - 1) / Layout::UNIT;
  static constexpr int STAGES_PER_TILE = (P::C + KL - 1) / KL;
  static constexpr int CHUNKS_OF_L = Layout::WIDE ? WARPS_J : 1;  // that hold one l, where 4 divides d
  static constexpr int SPREAD = Layout::WIDE ? WARPS_J : Layout::RUN;
  static constexpr int STAGE_CHUNKS = KL * JC / 4, PITCH = row_pitch(STAGE_CHUNKS, SPREAD);
  static constexpr int ODD_ROWS = 0;  // XORed to the place of a chunk of x in odd rows
  static constexpr int WEIGHT_CHUNKS = RESIDENT ? UNITS * Layout::UNIT * JC / 4 : STAGE_CHUNKS;
  static constexpr int WEIGHT_PITCH = row_pitch(WEIGHT_CHUNKS, SPREAD);
  static constexpr int WEIGHT_BYTES = NB * WEIGHT_PITCH * 16;
  static constexpr int STAGE_BYTES = BM * PITCH * 16 + (RESIDENT ? 0 : WEIGHT_BYTES);
  // Results leave in slices of 16 rows x SLICE_N output tiles, each through its warps' own buffer.
  static constexpr int SLICE_N = Layout::J == 1 && NT % 4 == 0 ? 4 : Layout::J < 4 && NT % 2 == 0 ? 2 : 1;
  static constexpr int SLICE_CHUNKS = SLICE_N * 2 * JC, SLICE_PITCH = row_pitch(SLICE_CHUNKS, SPREAD);
  static constexpr int SLICE_BYTES = 16 * SLICE_PITCH * 16;
  static constexpr int SHARED_BYTES =
      (RESIDENT ? WEIGHT_BYTES : 0) + STAGES * STAGE_BYTES + WARPS_M * WARPS_N * SLICE_BYTES;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB;
  static constexpr bool PADDED = P::B % NB != 0;  // the last tile has outputs that are none of the factor's
  static constexpr int COLUMNS = P::A * (P::D / JC) * OUTPUT_TILES;
  // Columns whose tiles take turns. Streamed: those of one i, or if the cache has no room for their weights,
  // those that share lines of memory (32 j, or all j where d is no multiple), with as many outputs as it has
  // room for.
  static constexpr int OF_J = P::D / JC;
  static constexpr bool IN_PARTS = !RESIDENT && int64(P::B) * P::C * P::D * 8 > CACHED_WEIGHTS;
  static constexpr int LINE_J = IN_PARTS && P::D % 32 == 0 ? largest_divisor(OF_J, 32 / JC) : OF_J;
  static constexpr int64 LINE_WEIGHTS = int64(NB) * P::C * LINE_J * JC * 8;  // with the outputs of a tile
  static constexpr int OUTPUTS_TOGETHER =
      IN_PARTS ? largest_divisor(OUTPUT_TILES, between(1, CACHED_WEIGHTS / LINE_WEIGHTS, OUTPUT_TILES))
               : OUTPUT_TILES;
  static constexpr int TOGETHER = RESIDENT ? COLUMNS : OUTPUTS_TOGETHER * LINE_J;
  static_assert(Layout::WIDE || WARPS_J == 1, "all j of a small d belong to one warp");
  static_assert(P::D % JC == 0 && KL % Layout::UNIT == 0 && P::C * P::D % 4 == 0, "");
  static_assert(WARPS_J <= 3 && (WARPS_J == 1 || WARPS_M * WARPS_N <= 14), "there are 16 barriers");
};

// What a block computes beside rows: group i, first j, first output k.
struct Column {
  int i, j0, n0;
};

// Neighbouring columns share bytes of x, or lines of memory at least.
template <typename P, typename Tile> __device__ __forceinline__ Column column_at(int index) {
  constexpr int LINES = Tile::OF_J / Tile::LINE_J;
  const int others = index / Tile::LINE_J, line = others / Tile::OUTPUT_TILES;
  return {line / LINES, (line % LINES * Tile::LINE_J + index % Tile::LINE_J) * Tile::JC,
          others % Tile::OUTPUT_TILES * Tile::NB};
}

// What a tile is of, and its first row. Tiles that follow each other are done at the same time: they have the
// same rows, and where weights are streamed, weights that all blocks need then, so that what several blocks
// read comes from memory once.
template <typename P, typename Tile> struct TilePlace {
  int index;
  int64 row0;
  Column column;

  __device__ __forceinline__ TilePlace(int64 tile, int64 batch) {
    const int64 turn = tile / Tile::TOGETHER;
    index = static_cast<int>(tile % Tile::TOGETHER), row0 = turn * Tile::BM;
    if constexpr (Tile::TOGETHER != Tile::COLUMNS) {
      const int64 row_tiles = (batch + Tile::BM - 1) / Tile::BM;
      index += static_cast<int>(turn / row_tiles) * Tile::TOGETHER, row0 = turn % row_tiles * Tile::BM;
    }
    column = column_at<P, Tile>(index);
  }
};

// The column of the tensor cores' operand that output k of a tile's 8 belongs to.
template <typename Layout> __device__ __forceinline__ int column_of_output(int k) {
  return Layout::WIDE ? k % 4 * 2 + k / 4 : k;
}

// Copies LENGTH values of l from l0 on, of ROWS rows that are `stride` elements apart, to shared
// memory; zeros instead of rows beyond the first `rows`. Rows of the weight, IN_COLUMNS, are kept in
// the order of the tensor cores' columns.
template <typename P, typename Tile, int ROWS, int LENGTH, int PITCH, bool IN_COLUMNS>
__device__ __forceinline__ void load_rows(unsigned char* shared, const float* from, int64 stride, int rows,
                                          int l0) {
  using Layout = typename Tile::Layout;
  using Walk = RowWalk<ROWS, LENGTH * Tile::JC / 4, Tile::LOADERS>;
  const int first_row = threadIdx.x / Walk::WIDTH, first_chunk = threadIdx.x % Walk::WIDTH;
#pragma unroll
  for (int pass = 0; pass < Walk::CHUNK_PASSES; ++pass) {
    const int chunk = first_chunk + pass * Walk::WIDTH;
    const int offset = l0 * P::D + (Layout::WIDE ? chunk / Tile::CHUNKS_OF_L * P::D + chunk % Tile::CHUNKS_OF_L * 4
                                               : chunk * 4);
    const bool inside = P::C % LENGTH == 0 || offset < P::C * P::D;
    const float* source = from + first_row * stride + (inside ? offset : 0);
#pragma unroll 8
    for (int m = first_row; m < Walk::end(first_row); m += Walk::PASS_ROWS) {
      const int place = IN_COLUMNS ? m - m % 8 + column_of_output<Layout>(m % 8) : m;
      const int put = IN_COLUMNS ? chunk : chunk ^ m % 2 * Tile::ODD_ROWS;
      cp_async_16(shared + (place * PITCH + put) * 16, source, inside && m < rows);
      source += Walk::PASS_ROWS * stride;
    }
  }
}

// Four consecutive results from `first` = k*d + j on, by fp32 arithmetic alone; those beyond the last output are 0.
// `weight_at` is called by k, l and j.
template <typename P, typename WeightAt>
__device__ __forceinline__ float4 plain_product(const float* x, WeightAt weight_at, int first) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int l = 0; l < P::C; ++l) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = (first + e) / P::D, j = (first + e) % P::D;
      if (P::B * P::D % 4 != 0 && k >= P::B) continue;
      sums[e] = fmaf(x[l * P::D + j], weight_at(k, l, j), sums[e]);
    }
  }
  return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

__device__ __forceinline__ bool all_finite(float4 v) {
  // A sum of magnitudes is finite only if all of them are; one that overflows does no harm.
  return fabsf(v.x) + fabsf(v.y) + fabsf(v.z) + fabsf(v.w) < __uint_as_float(0x7f800000u);
}

// A thread's share of one unit of one row, elements (l, j) in order. `permuted` is XORed to chunks.
template <typename Tile>
__device__ __forceinline__ void load_unit(float (&values)[Tile::Layout::CHUNKS * 4], const unsigned char* row,
                                          int unit, int quarter, int warp_j, int permuted = 0) {
  using Layout = typename Tile::Layout;
#pragma unroll
  for (int run = 0; run < Layout::RUNS; ++run)
#pragma unroll
    for (int c = 0; c < Layout::RUN; ++c) {
      const int q = (unit * Layout::RUNS + run) * 4 + quarter;
      const int chunk = Layout::WIDE ? q * Tile::CHUNKS_OF_L + warp_j : q * Layout::RUN + c;
      const float4 loaded = *reinterpret_cast<const float4*>(row + (chunk ^ permuted) * 16);
      const int at = (run * Layout::RUN + c) * 4;
      values[at] = loaded.x, values[at + 1] = loaded.y, values[at + 2] = loaded.z, values[at + 3] = loaded.w;
    }
}

// sums += x w over the unit's l, for MT x NT tiles of all J.
template <typename Tile>
__device__ __forceinline__ void multiply_unit(Sums<Tile>& sums, const unsigned char* x_row, int x_unit,
                                              const unsigned char* w_row, int w_unit, int quarter,
                                              int warp_j) {
  using Layout = typename Tile::Layout;
  constexpr int MT = Tile::MT, J = Layout::J;
  constexpr int GROUP = MT >= 4 ? 1 : J < 4 / MT ? J : 4 / MT;  // j at a time, to have some independent sums
  uint32 big[MT][J][Layout::STEPS][4];
  [[maybe_unused]] uint32 small[MT][J][Layout::STEPS][4];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[Layout::CHUNKS * 4];
      load_unit<Tile>(values, x_row + (m * 16 + half * 8) * Tile::PITCH * 16, x_unit, quarter, warp_j);
#pragma unroll
      for (int l = 0; l < Layout::L; ++l)
#pragma unroll
        for (int j = 0; j < J; ++j) {
          const Split<Tile::PRODUCTS> split(values[l * J + j]);
          big[m][j][l / 2][l % 2 * 2 + half] = split.big;
          small[m][j][l / 2][l % 2 * 2 + half] = split.small;
        }
    }
#pragma unroll
  for (int n = 0; n < Tile::NT; ++n) {
    float values[Layout::CHUNKS * 4];
    load_unit<Tile>(values, w_row + n * 8 * Tile::WEIGHT_PITCH * 16, w_unit, quarter, warp_j);
#pragma unroll
    for (int s = 0; s < Layout::STEPS; ++s)
#pragma unroll
      for (int j0 = 0; j0 < J; j0 += GROUP) {
        uint32 w_big[GROUP][2];
        [[maybe_unused]] uint32 w_small[GROUP][2];
        float part[GROUP][MT][4] = {};
#pragma unroll
        for (int g = 0; g < GROUP && j0 + g < J; ++g)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const Split<Tile::PRODUCTS> split(values[(2 * s + e) * J + j0 + g]);
            w_big[g][e] = split.big, w_small[g][e] = split.small;
          }
        // The smallest first.
#pragma unroll
        for (int product = Tile::PRODUCTS == 1 ? 2 : 0; product < 3; ++product)
#pragma unroll
          for (int g = 0; g < GROUP && j0 + g < J; ++g)
#pragma unroll
            for (int m = 0; m < MT; ++m) {
              float(&sum)[4] = Tile::PRODUCTS == 1 ? sums[m][n][j0 + g] : part[g][m];
              const uint32(&x)[4] = product == 0 ? small[m][j0 + g][s] : big[m][j0 + g][s];
              const uint32(&w)[2] = product == 1 ? w_small[g] : w_big[g];
              mma_m16n8k8_tf32(sum, x, w[0], w[1]);
            }
        if (Tile::PRODUCTS == 1) continue;
#pragma unroll
        for (int g = 0; g < GROUP && j0 + g < J; ++g)
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][n][j0 + g][e] += part[g][m][e];
      }
  }
}

// Writes a warp's (or, with several warps of j, their common) 16 rows x SLICE_N output tiles to its
// slice of shared memory, elements in the order of y.
template <typename Tile>
__device__ __forceinline__ void stage_slice(unsigned char* slice,
                                            const float (&sums)[Tile::NT][Tile::Layout::J][4], int n0,
                                            int lane, int warp_j) {
  using Layout = typename Tile::Layout;
  constexpr int J = Layout::J;
  const int quarter = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned char* const row = slice + (half * 8 + lane / 4) * Tile::SLICE_PITCH * 16;
#pragma unroll
    for (int n = 0; n < Tile::SLICE_N; ++n) {
      const float(&tile)[J][4] = sums[n0 + n];
      if constexpr (Layout::WIDE) {
        float4* const chunks = reinterpret_cast<float4*>(row);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int k = n * 8 + output_of_column<Layout>(2 * quarter + c), e = half * 2 + c;
          chunks[k * Tile::CHUNKS_OF_L + warp_j] =
              make_float4(tile[0][e], tile[1][e], tile[2][e], tile[3][e]);
        }
      } else {
        float2* const pairs = reinterpret_cast<float2*>(row + (n * 8 + 2 * quarter) * J * 4);
#pragma unroll
        for (int p = 0; p < J; ++p) {
          const int first = 2 * p, second = 2 * p + 1;  // of column 2q with its j, then 2q + 1
          pairs[p] = make_float2(tile[first % J][half * 2 + first / J],
                                 tile[second % J][half * 2 + second / J]);
        }
      }
    }
  }
}

// Writes a finished tile in whole rows of bytes, behind its epilogue. `slice` belongs to the warps that share its rows
// and outputs, which differ in their j; they wait for each other at `barrier`. `weights_of_column` gives, for a column,
// what `plain_product` asks for weights.
template <typename P, typename Tile, typename After, typename Weights>
__device__ __forceinline__ void write_tile(const typename After::Arguments& arguments, int64 tile,
                                           unsigned char* slice, const Sums<Tile>& sums, int warp_m, int warp_n,
                                           int warp_j, int barrier, Weights weights_of_column) {
  using Layout = typename Tile::Layout;
  constexpr int GROUP_IN = P::C * P::D, GROUP_OUT = P::B * P::D;  // features of one i
  constexpr int SHARERS = 32 * Tile::WARPS_J, ROUNDS = 16 * Tile::SLICE_CHUNKS / SHARERS;
  constexpr int SLICES_N = Tile::NT / Tile::SLICE_N, CHUNKS = Tile::MT * SLICES_N * ROUNDS;
  static_assert(CHUNKS <= 64, "a thread writes too many chunks for one mask");
  const int lane = threadIdx.x % 32, sharer = warp_j * 32 + lane;
  const TilePlace<P, Tile> place(tile, arguments.batch);
  const Column& column = place.column;
  const int64 row0 = place.row0;
  const auto wait_for_slice = [&] {
    if (Tile::WARPS_J == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(barrier, SHARERS);
    }
  };
  // Chunk e of the slice of tiles (m, n): its row, and k*d + j of its first element.
  const auto row_of = [&](int m, int e) { return row0 + (warp_m * Tile::MT + m) * 16 + e / Tile::SLICE_CHUNKS; };
  const auto first_of = [&](int n, int e) {
    const int chunk = e % Tile::SLICE_CHUNKS;
    return (column.n0 + (warp_n * Tile::NT + n) * 8) * P::D + column.j0 +
           (Layout::WIDE ? chunk / Tile::CHUNKS_OF_L * P::D + chunk % Tile::CHUNKS_OF_L * 4 : chunk * 4);
  };
  float* const y = static_cast<float*>(arguments.y) + column.i * GROUP_OUT;
  const auto store = [&](int64 row, int first, const float4& sums) {
    const int64 feature = column.i * GROUP_OUT + first, at = row * arguments.y_batch_stride + feature;
    const float4 result = four_with_epilogue<P, After>(sums, arguments, feature, at, GROUP_OUT - first);
    const uint4 bits = make_uint4(__float_as_uint(result.x), __float_as_uint(result.y), __float_as_uint(result.z),
                                  __float_as_uint(result.w));
    store_chunk<aligned_results<P, 4>()>(y + row * arguments.y_batch_stride + first, bits, (GROUP_OUT - first) * 4);
  };

  unsigned long long not_finite = 0;  // a bit for each chunk of this thread
#pragma unroll
  for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
    for (int s = 0; s < SLICES_N; ++s) {
      const int n = s * Tile::SLICE_N;
      stage_slice<Tile>(slice, sums[m], n, lane, warp_j);
      wait_for_slice();
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        const int e = sharer + round * SHARERS;
        const float4 result = *reinterpret_cast<const float4*>(
            slice + (e / Tile::SLICE_CHUNKS * Tile::SLICE_PITCH + e % Tile::SLICE_CHUNKS) * 16);
        if (row_of(m, e) >= arguments.batch || (Tile::PADDED && first_of(n, e) >= GROUP_OUT)) continue;
        if (Tile::PRODUCTS == 1 || all_finite(result)) {
          store(row_of(m, e), first_of(n, e), result);
        } else {
          not_finite |= 1ull << ((m * SLICES_N + s) * ROUNDS + round);
        }
      }
      wait_for_slice();
    }
  if (not_finite == 0) return;
  const float* const x = static_cast<const float*>(arguments.x) + column.i * GROUP_IN;
  const auto weight_at = weights_of_column(column);
#pragma unroll 1
  for (int at = 0; at < CHUNKS; ++at) {
    if ((not_finite >> at & 1) == 0) continue;
    const int e = sharer + at % ROUNDS * SHARERS;
    const int first = first_of(at / ROUNDS % SLICES_N * Tile::SLICE_N, e);
    const int64 row = row_of(at / ROUNDS / SLICES_N, e);
    store(row, first, plain_product<P>(x + row * arguments.x_batch_stride, weight_at, first));
  }
}

// Where the weights of a column begin; its outputs lie C * D elements apart.
template <typename P>
__device__ __forceinline__ const float* weights_of(const Arguments& arguments, const Column& column) {
  return static_cast<const float*>(arguments.weight) +
         int64(column.i * P::B + column.n0) * (P::C * P::D) + column.j0;
}

// How many outputs of a column are the factor's.
template <typename P, typename Tile> __device__ __forceinline__ int outputs_inside(const Column& column) {
  if constexpr (!Tile::PADDED) return Tile::NB;
  const int left = P::B - column.n0;
  return left < Tile::NB ? left : Tile::NB;
}

// Fills the ring's stages, tile after tile, ahead of the products.
//
// Tiles are numbered with columns running fastest: blocks that run together share rows of x. The
// grid is a multiple of the columns where weights are resident.
template <typename P, typename Tile> struct Loader {
  const Arguments& arguments;
  unsigned char* const ring;
  const int64 tiles;
  int64 tile = blockIdx.x, row0 = 0;
  int part = 0, slot = 0;
  Column column = {0, 0, 0};

  __device__ __forceinline__ Loader(const Arguments& arguments_, unsigned char* at)
      : arguments(arguments_), ring(at), tiles((arguments_.batch + Tile::BM - 1) / Tile::BM * Tile::COLUMNS) {
    locate();
  }

  __device__ __forceinline__ void locate() {
    const TilePlace<P, Tile> place(tile, arguments.batch);
    row0 = place.row0, column = place.column;
  }

  // Starts the copies of the next stage, if there is one.
  __device__ __forceinline__ void next() {
    if (tile < tiles) {
      unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
      const float* const group =
          static_cast<const float*>(arguments.x) + column.i * (P::C * P::D) + column.j0;
      load_rows<P, Tile, Tile::BM, Tile::KL, Tile::PITCH, false>(
          stage, group + row0 * arguments.x_batch_stride, arguments.x_batch_stride,
          rows_inside<Tile::BM>(arguments.batch - row0), part * Tile::KL);
      if (!Tile::RESIDENT) {
        load_rows<P, Tile, Tile::NB, Tile::KL, Tile::WEIGHT_PITCH, true>(
            stage + Tile::BM * Tile::PITCH * 16, weights_of<P>(arguments, column), P::C * P::D,
            outputs_inside<P, Tile>(column), part * Tile::KL);
      }
      if (++slot == Tile::STAGES) slot = 0;
      if (++part == Tile::STAGES_PER_TILE) {
        part = 0, tile += gridDim.x;
        locate();
      }
    }
    cp_async_commit_group();
  }
};

template <typename P, typename Tile, typename After = NoEpilogue>
__device__ __forceinline__ void mma_tf32x3_kernel(const typename After::Arguments& arguments) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  using Layout = typename Tile::Layout;
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const ring = shared + (Tile::RESIDENT ? Tile::WEIGHT_BYTES : 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_j = warp % Tile::WARPS_J;
  const int warp_n = warp / Tile::WARPS_J % Tile::WARPS_N;
  const int warp_m = warp / (Tile::WARPS_J * Tile::WARPS_N);
  const int quarter = lane % 4, row_in_eight = lane / 4;
  unsigned char* const slice =
      ring + Tile::STAGES * Tile::STAGE_BYTES + warp / Tile::WARPS_J * Tile::SLICE_BYTES;

  Loader<P, Tile> loader(arguments, ring);
  if (Tile::RESIDENT) {  // waited for together with the first stage
    load_rows<P, Tile, Tile::NB, Tile::UNITS * Layout::UNIT, Tile::WEIGHT_PITCH, true>(
        shared, weights_of<P>(arguments, loader.column), P::C * P::D, outputs_inside<P, Tile>(loader.column), 0);
  }
#pragma unroll
  for (int s = 0; s < Tile::STAGES - 1; ++s) loader.next();

  Sums<Tile> sums = {};
  int64 tile = blockIdx.x;
  int part = 0, slot = 0;
  while (tile < loader.tiles) {
    cp_async_wait_group<Tile::STAGES - 2>();
    __syncthreads();  // the stage is filled for all, and the one before it is free for all
    loader.next();

    const unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
    if (++slot == Tile::STAGES) slot = 0;
    const unsigned char* const weights = Tile::RESIDENT ? shared : stage + Tile::BM * Tile::PITCH * 16;
    const unsigned char* const x_row = stage + (warp_m * Tile::MT * 16 + row_in_eight) * Tile::PITCH * 16;
    const unsigned char* const w_row =
        weights + (warp_n * Tile::NT * 8 + row_in_eight) * Tile::WEIGHT_PITCH * 16;
    constexpr int STAGE_UNITS = Tile::KL / Layout::UNIT;
#pragma unroll 1
    for (int u = 0; u < STAGE_UNITS; ++u) {
      const int unit = part * STAGE_UNITS + u;
      if (Tile::UNITS % STAGE_UNITS != 0 && unit >= Tile::UNITS) break;
      multiply_unit<Tile>(sums, x_row, u, w_row, Tile::RESIDENT ? unit : u, quarter, warp_j);
    }
    if (++part < Tile::STAGES_PER_TILE) continue;

    const auto weights_of_column = [&](const Column& column) {
      const float* const group =
          static_cast<const float*>(arguments.weight) + int64(column.i) * (P::B * P::C * P::D);
      return [=](int k, int l, int j) { return group[(k * P::C + l) * P::D + j]; };
    };
    write_tile<P, Tile, After>(arguments, tile, slice, sums, warp_m, warp_n, warp_j, 1 + warp / Tile::WARPS_J,
                               weights_of_column);
    part = 0, tile += gridDim.x;
    clear<Tile>(sums);
  }
}
