// 16-bit factors on tensor cores, with j riding in the vector lanes (batch first, sm_80 and up).
//
// For fixed (i, j) the product is a matrix product whose operands lie d elements apart; gathering
// them is what costs PyTorch two passes over memory. Here a 16-byte load of a row of x holds
// several j at once (8 values of j for one l where 8 divides d; l x j = 2 x 4 for d = 4; ...), and
// so does the same load of a row of the weight. Loads of a few l, regrouped by byte permutes, are
// the tensor cores' operand fragments of all those j: no data is moved for the permutation.
//
// The order of summation inside a fragment is free as long as both operands agree, so each thread
// takes whichever l are convenient: thread q of a group of four takes runs q, q + 4, ...
//
// A block owns one column: group i, JC values of j, NB outputs k. It keeps the column's weights in
// shared memory, in fragment order, and walks over tiles of rows; x streams through a ring of
// stages whose loads run ahead across the ends of tiles, so that storing one tile overlaps with
// loading the next. Results leave through shared memory: stored from registers they would reach
// the L2 cache as half sectors, twice the traffic.
#pragma once

#include "common/factor_epilogue.cuh"
#include "common/pdl.cuh"
#include "common/ptx.cuh"
#include "common/smem_layout.cuh"

constexpr int smallest_multiple(int value, int of) { return (value + of - 1) / of * of; }

// How d consecutive j lie in 16-byte chunks: RUN chunks hold RUN_L values of l of J values of j.
template <int D> struct LaneLayout {
  static constexpr bool WIDE = D % 8 == 0;  // a chunk holds one l and 8 of its j
  static constexpr int J = WIDE ? 8 : D;
  static constexpr int RUN = WIDE ? 1 : (D % 3 == 0 ? 3 : 1);
  static constexpr int RUN_L = RUN * 8 / J;
  static constexpr int L = RUN_L > 4 ? RUN_L : 4;  // l that a thread takes at a time
  static constexpr int RUNS = L / RUN_L;           // runs that a thread takes at a time
  static constexpr int CHUNKS = RUNS * RUN;
  static constexpr int STEPS = L / 4;              // tensor-core steps (16 l) in a unit
  static constexpr int UNIT = 4 * L;               // l that a warp takes at a time
  static_assert(RUN * 8 % J == 0, "d must be 1, 2, 3, 4, 6, 12 or a multiple of 8");
};

// Stores COUNT 4-byte words at an address that is a multiple of their common width.
template <int COUNT>
__device__ __forceinline__ void store_words(unsigned char* address, const uint32 (&words)[COUNT]) {
#pragma unroll
  for (int w = 0; w < COUNT; w += COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1) {
    if (COUNT % 4 == 0) {
      *reinterpret_cast<uint4*>(address + 4 * w) =
          make_uint4(words[w], words[(w + 1) % COUNT], words[(w + 2) % COUNT], words[(w + 3) % COUNT]);
    } else if (COUNT % 2 == 0) {
      *reinterpret_cast<uint2*>(address + 4 * w) = make_uint2(words[w], words[(w + 1) % COUNT]);
    } else {
      *reinterpret_cast<uint32*>(address + 4 * w) = words[w];
    }
  }
}

template <typename P, int WARPS_J_, int WARPS_M_, int WARPS_N_, int MT_, int NT_, int KL_, int STAGES_,
          int BLOCKS_>
struct Mma16Tile {
  using Layout = LaneLayout<P::D>;
  static constexpr int WARPS_J = WARPS_J_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_;
  static constexpr int MT = MT_, NT = NT_;  // 16-row and 8-output tiles of a warp
  static constexpr int KL = KL_;            // l in a stage
  static constexpr int STAGES = STAGES_;
  static constexpr int BLOCKS = BLOCKS_;    // blocks that should fit on a multiprocessor
  static constexpr int WARPS = WARPS_J * WARPS_M * WARPS_N, THREADS = 32 * WARPS;
  static constexpr int JC = WARPS_J * Layout::J, BM = WARPS_M * MT * 16, NB = WARPS_N * NT * 8;
  static constexpr int UNITS = smallest_multiple(P::C, Layout::UNIT) / Layout::UNIT;
  static constexpr int STAGES_PER_TILE = (UNITS * Layout::UNIT + KL - 1) / KL;
  static constexpr int STAGE_CHUNKS = KL * JC / 8;  // of one row
  // Eight threads that load at a time must meet eight different groups of banks: two rows of four
  // chunks that are 1, 2 or 3 chunks apart.
  static constexpr int SPREAD = Layout::WIDE ? WARPS_J : Layout::RUN;
  static constexpr int CHUNKS_OF_L = Layout::WIDE ? WARPS_J : 1;  // that hold one l, where 8 divides d
  static constexpr int PITCH = STAGE_CHUNKS + ((SPREAD == 2 ? 1 : 4) - STAGE_CHUNKS % 8 + 8) % 8;
  static constexpr int WEIGHT_VECTORS = Layout::J * Layout::STEPS / 2;  // 16-byte vectors a fragment
  static constexpr int WEIGHT_BYTES = WARPS_J * UNITS * (NB / 8) * WEIGHT_VECTORS * 512;
  static constexpr int STAGE_BYTES = BM * PITCH * 16;
  static constexpr int OUT_CHUNKS = NB * JC / 8;  // of one row
  static constexpr int OUT_PITCH = OUT_CHUNKS + ((SPREAD == 2 ? 1 : 4) - OUT_CHUNKS % 8 + 8) % 8;
  static constexpr int OUT_BYTES = BM * OUT_PITCH * 16;
  static constexpr int SHARED_BYTES = WEIGHT_BYTES + STAGES * STAGE_BYTES + OUT_BYTES;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB;
  static constexpr int COLUMNS = P::A * (P::D / JC) * OUTPUT_TILES;
  // Two units at a time hide the latency of shared memory, if registers allow.
  static constexpr int UNROLL = MT * NT * Layout::J * 4 <= 64 ? 2 : 1;
  static_assert(Layout::WIDE || WARPS_J == 1, "all j of a small d belong to one warp");
  static_assert(P::D % JC == 0 && KL % Layout::UNIT == 0 && P::C * P::D % 8 == 0, "");
  static_assert(SPREAD <= 3 && Layout::J * Layout::STEPS % 2 == 0, "");
};

// Regroups what a thread loaded, elements (l, j) in order, into pairs of l for each j.
template <typename Layout>
__device__ __forceinline__ uint32 pair_of(const uint32 (&words)[Layout::CHUNKS * 4], int j, int pair) {
  if (Layout::J == 1) return words[pair];  // they are pairs already
  const int first = 2 * pair * Layout::J + j, second = first + Layout::J;
  return __byte_perm(words[first / 2], words[second / 2],
                     (first % 2 ? 0x32 : 0x10) | (second % 2 ? 0x7600 : 0x5400));
}

// A warp's place in its block, and a lane's in the tensor cores' operands.
template <typename Tile> struct Place {
  int lane, warp_j, warp_n, warp_m, quarter, row_in_eight;
  __device__ __forceinline__ explicit Place(int thread) {
    const int warp = thread / 32;
    lane = thread % 32, quarter = lane % 4, row_in_eight = lane / 4;
    warp_j = warp % Tile::WARPS_J;
    warp_n = warp / Tile::WARPS_J % Tile::WARPS_N;
    warp_m = warp / (Tile::WARPS_J * Tile::WARPS_N);
  }
};

__device__ __forceinline__ void put_chunk(uint32* words, const uint4& chunk) {
  words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
}

// Regroups a column's weights into shared memory, in fragment order. `w` is the weight at (i, 0, 0, j0).
template <typename P, typename Tile>
__device__ __forceinline__ void load_weights(uint4* weights, const uint16* w, int n0, int thread) {
  using Layout = typename Tile::Layout;
  constexpr int OUTPUTS = Tile::NB / 8;
  const int lane = thread % 32, quarter = lane % 4, row_in_eight = lane / 4;
  for (int f = thread / 32; f < Tile::WARPS_J * Tile::UNITS * OUTPUTS; f += Tile::WARPS) {
    const int k = n0 + f % OUTPUTS * 8 + output_of_column<Layout>(row_in_eight);
    const int unit = f / OUTPUTS % Tile::UNITS, group = f / OUTPUTS / Tile::UNITS;
    uint32 words[Layout::CHUNKS * 4];
#pragma unroll
    for (int run = 0; run < Layout::RUNS; ++run) {
      const int l = ((unit * Layout::RUNS + run) * 4 + quarter) * Layout::RUN_L;
#pragma unroll
      for (int c = 0; c < Layout::RUN; ++c) {
        const int offset = l * P::D + (Layout::WIDE ? group * 8 : c * 8);
        uint4 loaded = make_uint4(0, 0, 0, 0);
        if (k < P::B && offset < P::C * P::D) {
          loaded = *reinterpret_cast<const uint4*>(w + int64(k) * P::C * P::D + offset);
        }
        put_chunk(words + (run * Layout::RUN + c) * 4, loaded);
      }
    }
#pragma unroll
    for (int v = 0; v < Tile::WEIGHT_VECTORS; ++v) {
      // A vector holds two (j, step): the fragment's two registers of each.
      uint32 packed[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = (2 * v + h) / Layout::STEPS, step = (2 * v + h) % Layout::STEPS;
        packed[2 * h] = pair_of<Layout>(words, j, 2 * step);
        packed[2 * h + 1] = pair_of<Layout>(words, j, 2 * step + 1);
      }
      weights[(f * Tile::WEIGHT_VECTORS + v) * 32 + lane] =
          make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

// Adds one unit of l to the sums. `chunk_at(row, run, c)` is where chunk c of the lane's run lies.
template <typename T, typename Tile, typename ChunkAt>
__device__ __forceinline__ void multiply_unit(Sums<Tile>& sums, const uint4* weights, int unit,
                                              const Place<Tile>& place, const ChunkAt& chunk_at) {
  using Layout = typename Tile::Layout;
  uint32 a[Tile::MT][Layout::J][Layout::STEPS][4];
#pragma unroll
  for (int m = 0; m < Tile::MT; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (place.warp_m * Tile::MT + m) * 16 + half * 8 + place.row_in_eight;
      uint32 words[Layout::CHUNKS * 4];
#pragma unroll
      for (int run = 0; run < Layout::RUNS; ++run) {
#pragma unroll
        for (int c = 0; c < Layout::RUN; ++c) {
          put_chunk(words + (run * Layout::RUN + c) * 4,
                    *reinterpret_cast<const uint4*>(chunk_at(row, run, c)));
        }
      }
#pragma unroll
      for (int j = 0; j < Layout::J; ++j)
#pragma unroll
        for (int s = 0; s < Layout::STEPS; ++s) {
          a[m][j][s][half] = pair_of<Layout>(words, j, 2 * s);
          a[m][j][s][half + 2] = pair_of<Layout>(words, j, 2 * s + 1);
        }
    }
  }
#pragma unroll
  for (int n = 0; n < Tile::NT; ++n) {
    const int f = (place.warp_j * Tile::UNITS + unit) * (Tile::NB / 8) + place.warp_n * Tile::NT + n;
#pragma unroll
    for (int v = 0; v < Tile::WEIGHT_VECTORS; ++v) {
      const uint4 b = weights[(f * Tile::WEIGHT_VECTORS + v) * 32 + place.lane];
#pragma unroll
      for (int m = 0; m < Tile::MT; ++m) {
        mma_m16n8k16<T>(sums[m][n][2 * v / Layout::STEPS], a[m][2 * v / Layout::STEPS][2 * v % Layout::STEPS],
                        b.x, b.y);
        mma_m16n8k16<T>(sums[m][n][(2 * v + 1) / Layout::STEPS],
                        a[m][(2 * v + 1) / Layout::STEPS][(2 * v + 1) % Layout::STEPS], b.z, b.w);
      }
    }
  }
}

// A thread's results of two columns, `result(e)` in the order of memory, straight into a y of float32: of row `row` and
// of outputs from k on. The first has j = `j0` of a tile's. All threads call it.
template <typename P, typename Layout, typename Result>
__device__ __forceinline__ void store_in_float32(const Arguments& arguments, const ResultsPlace& results, int row, int k,
                                                 int j0, const Result& result) {
  constexpr int J = Layout::J;
  float* const y = static_cast<float*>(arguments.y) + results.at + row * arguments.y_batch_stride + j0;
  const bool is_row = row < results.rows;
  if constexpr (Layout::WIDE) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int output = k + column * 4;
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = result(column * 8 + j);
      store_eight_floats(y + output * P::D, values, is_row && output < results.outputs);
    }
  } else if constexpr (P::B % 2 == 0) {  // both outputs are the factor's, or none
    float values[2 * J];
#pragma unroll
    for (int e = 0; e < 2 * J; ++e) values[e] = result(e);
    const bool inside = is_row && k < results.outputs;
    if constexpr (J == 4) {
      store_eight_floats(y + k * P::D, values, inside);
    } else if (inside) {
      store_floats(y + k * P::D, values);
    }
  } else {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float values[J];
#pragma unroll
      for (int j = 0; j < J; ++j) values[j] = result(column * J + j);
      if (is_row && k + column < results.outputs) store_floats(y + (k + column) * P::D, values);
    }
  }
}

// Rounds a warp's sums into the block's tile of results in shared memory, behind their epilogue, and clears them. Results
// in float32 go to y.
template <typename T, typename P, typename Tile, typename After>
__device__ __forceinline__ void gather_results(unsigned char* out, Sums<Tile>& sums, const Place<Tile>& place,
                                               const typename After::Arguments& arguments,
                                               const ResultsPlace& results) {
  using Layout = typename Tile::Layout;
#pragma unroll
  for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (place.warp_m * Tile::MT + m) * 16 + half * 8 + place.row_in_eight;
      unsigned char* const out_row = out + row * Tile::OUT_PITCH * 16;
#pragma unroll
      for (int n = 0; n < Tile::NT; ++n) {
        const int k = (place.warp_n * Tile::NT + n) * 8 + output_of_column<Layout>(2 * place.quarter);
        // Words in the order of memory: column 2q with j = 0.., then column 2q + 1.
        const auto result = [&](int e) {
          const int column = e / Layout::J, output = k + column * (Layout::WIDE ? 4 : 1);
          const int offset = output * P::D + (Layout::WIDE ? place.warp_j * 8 : 0) + e % Layout::J;
          const float sum = sums[m][n][e % Layout::J][half * 2 + column];
          return result_in_tile<T, After>(sum, arguments, results, row, output, offset);
        };
        if constexpr (After::IN_FLOAT32) {
          store_in_float32<P, Layout>(arguments, results, row, k, Layout::WIDE ? place.warp_j * 8 : 0, result);
        } else {
          uint32 words[Layout::J];
#pragma unroll
          for (int w = 0; w < Layout::J; ++w) words[w] = pack_pair<T>(result(2 * w), result(2 * w + 1));
          if constexpr (Layout::WIDE) {
            uint4* const chunks = reinterpret_cast<uint4*>(out_row);
            chunks[k * Tile::CHUNKS_OF_L + place.warp_j] = make_uint4(words[0], words[1], words[2], words[3]);
            chunks[(k + 4) * Tile::CHUNKS_OF_L + place.warp_j] = make_uint4(words[4], words[5], words[6], words[7]);
          } else {
            store_words<Layout::J>(out_row + k * P::D * 2, words);
          }
        }
#pragma unroll
        for (int j = 0; j < Layout::J; ++j) sums[m][n][j][half * 2] = sums[m][n][j][half * 2 + 1] = 0.0f;
      }
    }
}

// Writes the gathered tile to y, whole rows of bytes at a time. `y` is y at (0, i, n0, j0).
template <typename P, typename Tile>
__device__ __forceinline__ void write_results(const unsigned char* out, uint16* y, int64 row0, int n0,
                                              int thread, const Arguments& arguments) {
  using Walk = RowWalk<Tile::BM, Tile::OUT_CHUNKS, Tile::THREADS>;
  const int rows = rows_inside<Tile::BM>(arguments.batch - row0);
  const int m0 = thread / Walk::WIDTH;
#pragma unroll
  for (int pass = 0; pass < Walk::CHUNK_PASSES; ++pass) {
    const int chunk = thread % Walk::WIDTH + pass * Walk::WIDTH;
    const int offset = Tile::Layout::WIDE
                           ? chunk / Tile::CHUNKS_OF_L * P::D + chunk % Tile::CHUNKS_OF_L * 8
                           : chunk * 8;
    const bool inside = n0 * P::D + offset < P::B * P::D;
    const unsigned char* from = out + (m0 * Tile::OUT_PITCH + chunk) * 16;
    uint16* to = y + (row0 + m0) * arguments.y_batch_stride + offset;
#pragma unroll
    for (int m = m0; m < Walk::end(m0); m += Walk::PASS_ROWS) {
      if (inside && m < rows) {
        store_chunk<aligned_results<P, 2>()>(to, *reinterpret_cast<const uint4*>(from),
                                             ((P::B - n0) * P::D - offset) * 2);
      }
      from += Walk::PASS_ROWS * Tile::OUT_PITCH * 16;
      to += Walk::PASS_ROWS * arguments.y_batch_stride;
    }
  }
}

template <typename T, typename P, typename Tile, typename After = NoEpilogue>
__device__ __forceinline__ void mma16_kernel(const typename After::Arguments& arguments) {
  using Layout = typename Tile::Layout;
  constexpr int BM = Tile::BM, KL = Tile::KL, JC = Tile::JC;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(128) unsigned char shared[];
  uint4* const weights = reinterpret_cast<uint4*>(shared);
  unsigned char* const ring = shared + Tile::WEIGHT_BYTES;
  unsigned char* const out = ring + Tile::STAGES * Tile::STAGE_BYTES;
  const int thread = threadIdx.x;
  const Place<Tile> place(thread);

  // Neighbouring blocks own columns that share bytes of x, and meet the same rows at one time.
  const int column = blockIdx.x % Tile::COLUMNS;
  const int j0 = column % (P::D / JC) * JC;
  const int n0 = column / (P::D / JC) % Tile::OUTPUT_TILES * Tile::NB;
  const int i = column / (P::D / JC) / Tile::OUTPUT_TILES;
  const int64 persistent_ctas = gridDim.x / Tile::COLUMNS, persistent_cta = blockIdx.x / Tile::COLUMNS;
  const int64 row_tiles = (arguments.batch + BM - 1) / BM;

  const uint16* const x = static_cast<const uint16*>(arguments.x) + int64(i) * P::C * P::D + j0;
  // Where the next load and the next product are: tile, stage of the tile, slot of the ring.
  int64 load_tile = persistent_cta, tile = persistent_cta;
  int load_part = 0, part = 0, load_slot = 0, slot = 0;
  const auto load_next_stage = [&] {
    const int64 row0 = load_tile * BM;
    const int l0 = load_part * KL;
    unsigned char* const stage = ring + load_slot * Tile::STAGE_BYTES;
    if (++load_slot == Tile::STAGES) load_slot = 0;
    if (++load_part == Tile::STAGES_PER_TILE) load_part = 0, load_tile += persistent_ctas;
    const int rows = rows_inside<BM>(arguments.batch - row0);
    using Walk = RowWalk<BM, Tile::STAGE_CHUNKS, Tile::THREADS>;
    const int m0 = thread / Walk::WIDTH;
#pragma unroll
    for (int pass = 0; pass < Walk::CHUNK_PASSES; ++pass) {
      const int chunk = thread % Walk::WIDTH + pass * Walk::WIDTH;
      const int l = chunk / Tile::CHUNKS_OF_L;  // where a chunk holds one l
      const int offset = Layout::WIDE ? l * P::D + chunk % Tile::CHUNKS_OF_L * 8 : chunk * 8;
      const bool inside = Layout::WIDE ? l0 + l < P::C : l0 * P::D + offset < P::C * P::D;
      const uint16* from = x + (row0 + m0) * arguments.x_batch_stride + (l0 * P::D + offset);
      unsigned char* to = stage + (m0 * Tile::PITCH + chunk) * 16;
#pragma unroll
      for (int m = m0; m < Walk::end(m0); m += Walk::PASS_ROWS) {
        cp_async_16(to, from, inside && m < rows);
        from += Walk::PASS_ROWS * arguments.x_batch_stride;
        to += Walk::PASS_ROWS * Tile::PITCH * 16;
      }
    }
  };

#pragma unroll
  for (int s = 0; s < Tile::STAGES - 1; ++s) {
    if (load_tile < row_tiles) load_next_stage();
    cp_async_commit_group();
  }

  const int64 group = int64(i) * P::B * P::D;
  load_weights<P, Tile>(weights, static_cast<const uint16*>(arguments.weight) + group * P::C + j0, n0,
                        thread);
  uint16* const y = static_cast<uint16*>(arguments.y) + group + n0 * P::D + j0;
  Sums<Tile> sums;
  clear<Tile>(sums);

  while (tile < row_tiles) {
    cp_async_wait_group<Tile::STAGES - 2>();
    __syncthreads();  // the stage is filled for all, and the one before it is free for all
    if (load_tile < row_tiles) load_next_stage();
    cp_async_commit_group();

    const unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
    if (++slot == Tile::STAGES) slot = 0;
#pragma unroll Tile::UNROLL
    for (int u = 0; u < KL / Layout::UNIT; ++u) {
      const int unit = part * (KL / Layout::UNIT) + u;
      if (Tile::UNITS % (KL / Layout::UNIT) != 0 && unit >= Tile::UNITS) break;
      multiply_unit<T, Tile>(sums, weights, unit, place, [&](int row, int run, int c) {
        const int q = (u * Layout::RUNS + run) * 4 + place.quarter;  // run within the stage
        const int chunk = Layout::WIDE ? q * Tile::CHUNKS_OF_L + place.warp_j : q * Layout::RUN + c;
        return stage + (row * Tile::PITCH + chunk) * 16;
      });
    }

    if (++part < Tile::STAGES_PER_TILE) continue;
    // The tile is complete: gather it in shared memory, then write whole rows of bytes.
    const int64 row0 = tile * BM, feature = group + n0 * P::D + j0;
    gather_results<T, P, Tile, After>(out, sums, place, arguments,
                                      {row0 * arguments.y_batch_stride + feature, feature,
                                       rows_inside<BM>(arguments.batch - row0), P::B - n0});
    if constexpr (!After::IN_FLOAT32) {
      __syncthreads();
      write_results<P, Tile>(out, y, row0, n0, thread, arguments);
    }
    part = 0, tile += persistent_ctas;
  }
}
