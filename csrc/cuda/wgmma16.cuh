// 16-bit factors on Hopper's warpgroup tensor cores, with j in the vector lanes (batch first, sm_90a).
//
// The products of mma16.cuh for blocks b x c whose weights are too many for its trips through
// registers: x passes through registers as there, but 64 rows at a time, and the tensor cores read
// the weights from shared memory themselves. For each j, 8 l of all outputs are one matrix, 16 bytes
// an output.
//
// The first warpgroup of a block copies x into a ring of stages; the others multiply and store. A
// warpgroup that multiplies has 64 rows and NT * 8 outputs of as many j as a chunk holds; several
// divide a block's j, outputs or rows between them. Blocks that read the same x cooperate (tile_scheduler.cuh).
#pragma once

#include "common/factor_epilogue.cuh"
#include "common/mbarrier.cuh"
#include "mma16.cuh"
#include "common/pdl.cuh"
#include "common/tile_scheduler.cuh"
#include "common/weight_order.cuh"
#include "common/wgmma_16bit.cuh"

template <typename P, int GROUPS_J_, int GROUPS_N_, int GROUPS_M_, int NT_, int KL_, int STAGES_, int BLOCKS_,
          int TEAM_J_>
struct Wgmma16Tile {
  using Layout = LaneLayout<P::D>;
  static constexpr int GROUPS_J = GROUPS_J_, GROUPS_N = GROUPS_N_, GROUPS_M = GROUPS_M_;  // warpgroups
  static constexpr int GROUPS = GROUPS_J * GROUPS_N * GROUPS_M;
  static constexpr int NT = NT_, N = NT * 8;  // outputs of a warpgroup
  static constexpr int KL = KL_;              // l in a stage
  static constexpr int STAGES = STAGES_;
  static constexpr int BLOCKS = BLOCKS_;      // blocks that should fit on a multiprocessor
  static constexpr int MULTIPLIERS = 128 * GROUPS, LOADERS = 128, THREADS = LOADERS + MULTIPLIERS;
  static constexpr int JC = GROUPS_J * Layout::J, BM = GROUPS_M * 64, NB = GROUPS_N * N;  // of a block
  // Registers a thread: a block starts with the most that all threads can have alike. To take more
  // than were given up would wait for ever.
  static constexpr int AT_START = 65536 / (THREADS * BLOCKS) / 8 * 8;
  static constexpr int LOADER_REGISTERS = 24;
  static constexpr int TAKEN = (AT_START * (GROUPS + 1) - LOADER_REGISTERS) / GROUPS / 8 * 8;
  static constexpr int MULTIPLIER_REGISTERS = TAKEN < 240 ? TAKEN : 240;
  // Whether registers allow to load a unit while the tensor cores work on the one before it.
  static constexpr int OPERANDS = Layout::CHUNKS * 8 + Layout::J * Layout::STEPS * 4;
  static constexpr bool AHEAD = N / 2 * Layout::J + OPERANDS + 20 <= MULTIPLIER_REGISTERS;
  static constexpr int UNITS = smallest_multiple(P::C, Layout::UNIT) / Layout::UNIT;
  static constexpr int STAGE_UNITS = KL / Layout::UNIT;
  static constexpr int STAGES_PER_TILE = (UNITS + STAGE_UNITS - 1) / STAGE_UNITS;
  static constexpr int CHUNKS_OF_L = Layout::WIDE ? GROUPS_J : 1;  // that hold one l, where 8 divides d
  static constexpr int SPREAD = Layout::WIDE ? GROUPS_J : Layout::RUN;
  // Eight threads that load at a time must meet eight different groups of banks: chunks of odd rows
  // swap places with those that are so far away.
  static constexpr int STAGE_CHUNKS = KL * JC / 8;  // of one row
  static constexpr int SWAP = STAGE_CHUNKS % 8 == 0 ? (SPREAD == 2 ? 1 : 4) : 0;
  static constexpr int ROW_BYTES = STAGE_CHUNKS * 16, STAGE_BYTES = BM * ROW_BYTES;
  // Weights: for each unit, step and j, two matrices of 8 l and NB outputs.
  static constexpr int HALF_BYTES = NB * 16, MATRIX_BYTES = 2 * HALF_BYTES;
  static constexpr int UNIT_BYTES = Layout::STEPS * JC * MATRIX_BYTES, WEIGHT_BYTES = UNITS * UNIT_BYTES;
  // Results leave a few 8-output tiles at a time, through a slice of shared memory for 16 rows.
  static constexpr int SLICE_TILES = largest_divisor(NT, JC < 16 ? 16 / JC : 1);
  static constexpr int SLICE_CHUNKS = SLICE_TILES * JC;  // of one row
  static constexpr int SLICE_PITCH = row_pitch(SLICE_CHUNKS, SPREAD);
  static constexpr int SLICE_BYTES = 16 * SLICE_PITCH * 16;
  static constexpr int SLICES = 4 * GROUPS_M * GROUPS_N, SLICE_THREADS = 32 * GROUPS_J;
  static constexpr int BARRIER_BYTES = 128;
  static constexpr int RING_AT = BARRIER_BYTES + WEIGHT_BYTES, SLICES_AT = RING_AT + STAGES * STAGE_BYTES;
  static constexpr int SHARED_BYTES = SLICES_AT + SLICES * SLICE_BYTES;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB;
  static constexpr bool PADDED = P::B % NB != 0;  // the last tile has outputs that are none of the factor's
  static constexpr int TEAM_J = TEAM_J_, TEAM = OUTPUT_TILES * TEAM_J;
  static constexpr int COLUMN_GROUPS = P::A * (P::D / (JC * TEAM_J));
  static constexpr int ALL_MULTIPLIERS = 15;  // a barrier's number; those of slices begin with 1
  static constexpr bool STREAMED = false;     // weights stay, for all rows of a group of columns
  static_assert(Layout::WIDE || GROUPS_J == 1, "all j of a small d belong to one warpgroup");
  static_assert(P::D % (JC * TEAM_J) == 0 && KL % Layout::UNIT == 0 && P::C * P::D % 8 == 0, "");
  static_assert(SPREAD <= 3 && (SWAP != 0 || (STAGE_CHUNKS % 8 == 4 && SPREAD != 2)), "rows meet in banks");
  static_assert(STAGES >= 2 && STAGES * 16 <= BARRIER_BYTES && SLICES < ALL_MULTIPLIERS, "");
};

// How threads iterate over the rows of a tile: as in RowWalk, in a number of steps known at compile time.
template <int ROWS, int CHUNKS, int THREADS> struct Steps : RowWalk<ROWS, CHUNKS, THREADS> {
  using Walk = RowWalk<ROWS, CHUNKS, THREADS>;
  static constexpr int COUNT = (ROWS + Walk::PASS_ROWS - 1) / Walk::PASS_ROWS;
  static constexpr bool EXACT = ROWS % Walk::PASS_ROWS == 0 && THREADS % Walk::WIDTH == 0;
  __device__ static __forceinline__ bool inside(int m0, int step) {
    return EXACT || m0 + step * Walk::PASS_ROWS < Walk::end(m0);
  }
};

// The code of the first warpgroup. `full` and `empty` have a barrier for each stage of the ring. Whatever
// else a stage holds is loaded by `also(walk, part, slot)`; the walk is the scheduler's iterator.
template <typename P, typename Tile, typename Walk, typename Also>
__device__ __forceinline__ void load_rows(const Arguments& arguments, unsigned char* ring, Mbarrier* full,
                                          Mbarrier* empty, Also also) {
  using Layout = typename Tile::Layout;
  using Rows = Steps<Tile::BM, Tile::STAGE_CHUNKS, Tile::LOADERS>;
  static_assert(Tile::SWAP == 0 || Rows::PASS_ROWS % 2 == 0, "a thread keeps to even or odd rows");
  const int m0 = threadIdx.x / Rows::WIDTH, first_chunk = threadIdx.x % Rows::WIDTH;
  const int64 pass_stride = Rows::PASS_ROWS * arguments.x_batch_stride;
  int slot = 0, parity = 1;
  for (Walk walk(arguments); walk.inside(); walk.next()) {
    const int64 row0 = walk.tile * Tile::BM;
    const int rows = rows_inside<Tile::BM>(arguments.batch - row0) - m0;
    const uint16* const x = static_cast<const uint16*>(arguments.x) + (row0 + m0) * arguments.x_batch_stride +
                            int64(walk.i()) * P::C * P::D + walk.j0();
    for (int part = 0; part < Tile::STAGES_PER_TILE; ++part) {
      unsigned char* const stage = ring + slot * Tile::STAGE_BYTES + m0 * Tile::ROW_BYTES;
      empty[slot].wait(parity);
      also(walk, part, slot);
#pragma unroll
      for (int pass = 0; pass < Rows::CHUNK_PASSES; ++pass) {
        const int chunk = first_chunk + pass * Rows::WIDTH;
        const int offset = part * Tile::KL * P::D + (Layout::WIDE ? chunk / Tile::CHUNKS_OF_L * P::D +
                                                                      chunk % Tile::CHUNKS_OF_L * 8
                                                                : chunk * 8);
        const bool inside = P::C % Tile::KL == 0 || offset < P::C * P::D;
        const uint16* from = x + offset;
        unsigned char* const to = stage + (chunk ^ m0 % 2 * Tile::SWAP) * 16;
#pragma unroll
        for (int step = 0; step < Rows::COUNT; ++step) {
          if (Rows::inside(m0, step)) {
            cp_async_16(to + step * Rows::PASS_ROWS * Tile::ROW_BYTES, from,
                        inside && step * Rows::PASS_ROWS < rows);
          }
          from += pass_stride;
        }
      }
      full[slot].cp_async_arrive();
      if (++slot == Tile::STAGES) slot = 0, parity ^= 1;
    }
  }
}

// One of the pieces that the threads that multiply divide a block's weights into.
template <typename Tile> struct WeightTask {
  int quarter, group_j, n, unit;
  __device__ __forceinline__ explicit WeightTask(int task) {
    quarter = task % 4, group_j = task / 4 % Tile::GROUPS_J;
    n = task / (4 * Tile::GROUPS_J) % Tile::NB, unit = task / (4 * Tile::GROUPS_J * Tile::NB);
  }
};

// Regroups the weights of a block's outputs as the tensor cores read them. `w` is the weight at
// (i, n0, 0, j0), `order` its order in memory (weight_order.cuh), `left` the factor's outputs from n0 on;
// output n of each tile of eight is `output_of_column(n)`. A thread takes what one of the four that share
// a row of x does, so that neighbours read neighbouring chunks and write neighbouring words, and asks for
// as much as its registers hold before it uses any. Of a transposed weight the eight outputs that a warp
// reads at a time are neighbours: 16 bytes each where 8 divides d, else all j of an l. Of several blocks
// each does its share.
template <typename P, typename Tile, typename Order>
__device__ __forceinline__ void write_weights(unsigned char* weights, const uint16* w, const Order& order, int left,
                                              int thread, int share = 0, int shares = 1) {
  using Layout = typename Tile::Layout;
  constexpr int PIECE = Order::PIECE;  // elements that are loaded at a time
  constexpr int TASKS = 4 * Tile::GROUPS_J * Tile::NB * Tile::UNITS;
  constexpr int NEEDED = (TASKS + Tile::MULTIPLIERS - 1) / Tile::MULTIPLIERS;
  // The sums' registers are taken: to the compiler they hold those of the tile before.
  constexpr int FREE = (Tile::MULTIPLIER_REGISTERS - Tile::N / 2 * Layout::J - 40) / (Layout::CHUNKS * 4);
  constexpr int MOST = Order::STRIDED ? 8 / Layout::CHUNKS : 8;  // addresses by strides take registers, too
  constexpr int FIT = FREE < 1 ? 1 : FREE < MOST ? FREE : MOST;
  constexpr int AT_ONCE = FIT < NEEDED ? FIT : NEEDED;
  constexpr int TURN = AT_ONCE * Tile::MULTIPLIERS;
  for (int first = thread + share * TURN; first < TASKS; first += shares * TURN) {
    uint32 words[AT_ONCE][Layout::CHUNKS * 4];
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t) {
      const WeightTask<Tile> task(first + t * Tile::MULTIPLIERS);
      const int output = task.n - task.n % 8 + output_of_column<Layout>(task.n % 8);
      const uint16* const from = w + order.at(0, output, 0, 0);
#pragma unroll
      for (int run = 0; run < Layout::RUNS; ++run)
#pragma unroll
        for (int e = 0; e < Layout::RUN * 8; e += PIECE) {
          const int first_l = ((task.unit * Layout::RUNS + run) * 4 + task.quarter) * Layout::RUN_L;
          const int l = first_l + e / Layout::J, j = task.group_j * Layout::J + e % Layout::J;
          const bool inside = task.unit < Tile::UNITS && (P::C % Layout::UNIT == 0 || l < P::C) &&
                              (!Tile::PADDED || output < left);
          load_piece<PIECE>(words[t], run * Layout::RUN * 8 + e, from + order.at(0, 0, l, j), inside);
        }
    }
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t) {
      const WeightTask<Tile> task(first + t * Tile::MULTIPLIERS);
      if (task.unit >= Tile::UNITS) break;
      unsigned char* const to = weights + task.unit * Tile::UNIT_BYTES +
                                task.group_j * Layout::J * Tile::MATRIX_BYTES + task.n * 16 + task.quarter * 4;
#pragma unroll
      for (int s = 0; s < Layout::STEPS; ++s)
#pragma unroll
        for (int j = 0; j < Layout::J; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = (s * Tile::JC + j) * Tile::MATRIX_BYTES + half * Tile::HALF_BYTES;
            *reinterpret_cast<uint32*>(to + at) = pair_of<Layout>(words[t], j, 2 * s + half);
          }
    }
  }
}

// Tells the compiler that registers have their values here, and are in use until here: products read
// them behind its back, and where regrouping changes nothing they are those that are loaded next.
template <int J, int STEPS> __device__ __forceinline__ void keep(uint32 (&a)[J][STEPS][4]) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        asm volatile("" : "+r"(a[j][s][e])::"memory");
      }
}

// A thread's place among those that multiply.
template <typename Tile> struct GroupPlace {
  int lane, warp, group_j, group_n, group_m, quarter, row_in_eight;
  __device__ __forceinline__ explicit GroupPlace(int thread) {
    lane = thread % 32, warp = thread / 32 % 4, quarter = lane % 4, row_in_eight = lane / 4;
    const int warpgroup = thread / 128;
    group_j = warpgroup % Tile::GROUPS_J;
    group_n = warpgroup / Tile::GROUPS_J % Tile::GROUPS_N;
    group_m = warpgroup / (Tile::GROUPS_J * Tile::GROUPS_N);
  }
};

// A warpgroup's sums: for each j, of 8-output tile n a lane has elements 4 n to 4 n + 3, two
// neighbouring columns of two rows.
template <typename Tile> using GroupSums = float[Tile::Layout::J][Tile::N / 2];

// Rounds tiles n0 to n0 + SLICE_TILES of a warp's 16 rows into their slice, behind their epilogue. Results in float32 go
// to y.
template <typename T, typename P, typename Tile, typename After>
__device__ __forceinline__ void fill_slice(unsigned char* slice, const GroupSums<Tile>& sums, int n0,
                                           const GroupPlace<Tile>& place,
                                           const typename After::Arguments& arguments,
                                           const ResultsPlace& results) {
  using Layout = typename Tile::Layout;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned char* const row = slice + (half * 8 + place.row_in_eight) * Tile::SLICE_PITCH * 16;
#pragma unroll
    for (int n = 0; n < Tile::SLICE_TILES; ++n) {
      const int k = n * 8 + output_of_column<Layout>(2 * place.quarter);
      // Words in the order of memory: column 2q with j = 0.., then column 2q + 1.
      const auto result = [&](int e) {
        const int column = e / Layout::J, output = k + column * (Layout::WIDE ? 4 : 1);
        const int offset = output * P::D + (Layout::WIDE ? place.group_j * 8 : 0) + e % Layout::J;
        const float sum = sums[e % Layout::J][(n0 + n) * 4 + half * 2 + column];
        return result_in_tile<T, After>(sum, arguments, results, half * 8 + place.row_in_eight, output, offset);
      };
      if constexpr (After::IN_FLOAT32) {
        store_in_float32<P, Layout>(arguments, results, half * 8 + place.row_in_eight, k,
                                    Layout::WIDE ? place.group_j * 8 : 0, result);
      } else {
        uint32 words[Layout::J];
#pragma unroll
        for (int w = 0; w < Layout::J; ++w) words[w] = pack_pair<T>(result(2 * w), result(2 * w + 1));
        if constexpr (Layout::WIDE) {
          uint4* const chunks = reinterpret_cast<uint4*>(row);
          chunks[k * Tile::CHUNKS_OF_L + place.group_j] = make_uint4(words[0], words[1], words[2], words[3]);
          chunks[(k + 4) * Tile::CHUNKS_OF_L + place.group_j] = make_uint4(words[4], words[5], words[6], words[7]);
        } else {
          store_words<Layout::J>(row + k * P::D * 2, words);
        }
      }
    }
  }
}

// Writes a slice to y, whole sectors at a time. `y` is y at its first row, (i, k, j0), `left` the factor's outputs
// from k on.
template <typename P, typename Tile>
__device__ __forceinline__ void write_slice(const unsigned char* slice, uint16* y, int rows, int left, int thread,
                                            const Arguments& arguments) {
  using Walk = Steps<16, Tile::SLICE_CHUNKS, Tile::SLICE_THREADS>;
  const int m0 = thread / Walk::WIDTH;
#pragma unroll
  for (int pass = 0; pass < Walk::CHUNK_PASSES; ++pass) {
    const int chunk = thread % Walk::WIDTH + pass * Walk::WIDTH;
    const int offset = Tile::Layout::WIDE ? chunk / Tile::CHUNKS_OF_L * P::D + chunk % Tile::CHUNKS_OF_L * 8
                                        : chunk * 8;
    if (Tile::PADDED && offset >= left * P::D) continue;
    const unsigned char* const from = slice + (m0 * Tile::SLICE_PITCH + chunk) * 16;
    uint16* to = y + m0 * arguments.y_batch_stride + offset;
#pragma unroll
    for (int step = 0; step < Walk::COUNT; ++step) {
      const int m = step * Walk::PASS_ROWS;
      if (Walk::inside(m0, step) && m0 + m < rows) {
        store_chunk<aligned_results<P, 2>()>(
            to, *reinterpret_cast<const uint4*>(from + m * Tile::SLICE_PITCH * 16), (left * P::D - offset) * 2);
      }
      to += Walk::PASS_ROWS * arguments.y_batch_stride;
    }
  }
}

// Stores what a warpgroup has of a complete tile. `y` is y at the block's first row, (i, n0, j0), `left` the factor's
// outputs from n0 on, `feature` the feature at (i, n0, j0).
template <typename T, typename P, typename Tile, typename After>
__device__ __forceinline__ void store_group(const typename After::Arguments& arguments, uint16* y, int64 feature,
                                            int rows, int left, unsigned char* slices, GroupSums<Tile>& sums,
                                            const GroupPlace<Tile>& place) {
  const int own = (place.group_m * Tile::GROUPS_N + place.group_n) * 4 + place.warp;
  unsigned char* const slice = slices + own * Tile::SLICE_BYTES;
  const int first_row = place.group_m * 64 + place.warp * 16;
  const auto meet = [&] {
    if constexpr (Tile::GROUPS_J == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + own, Tile::SLICE_THREADS);
    }
  };
  uint16* const first = y + first_row * arguments.y_batch_stride + place.group_n * Tile::N * P::D;
#pragma unroll
  for (int n0 = 0; n0 < Tile::NT; n0 += Tile::SLICE_TILES) {
    uint16* const to = first + n0 * 8 * P::D;
    const int rows_left = rows - first_row, outputs_left = left - place.group_n * Tile::N - n0 * 8;
    fill_slice<T, P, Tile, After>(slice, sums, n0, place, arguments,
                                  {to - static_cast<uint16*>(arguments.y),
                                   feature + (place.group_n * Tile::N + n0 * 8) * P::D, rows_left, outputs_left});
    if constexpr (!After::IN_FLOAT32) {
      meet();
      write_slice<P, Tile>(slice, to, rows_left, outputs_left, place.group_j * 32 + place.lane, arguments);
      meet();
    }
  }
}

template <typename T, typename P, typename Tile, typename Walk, typename After>
__device__ __forceinline__ void multiply_and_store_rows(const typename After::Arguments& arguments,
                                                        unsigned char* weights, unsigned char* ring,
                                                        unsigned char* slices, Mbarrier* full, Mbarrier* empty) {
  using Layout = typename Tile::Layout;
  const int thread = threadIdx.x - Tile::LOADERS;
  const GroupPlace<Tile> place(thread);
  const int row = place.group_m * 64 + place.warp * 16 + place.row_in_eight;
  const int swap = row % 2 * Tile::SWAP;
  // The description of the warpgroup's first matrix, the same for all its threads. Others by addition:
  // its address, in 16 bytes, has room for all of the shared memory.
  const uint32 first_matrix = shared_address(weights) + place.group_j * Layout::J * Tile::MATRIX_BYTES +
                              place.group_n * Tile::N * 16;
  const uint64 first_matrices = make_smem_desc(__shfl_sync(~0u, first_matrix, 0), Tile::HALF_BYTES, 128);
  int slot = 0, parity = 0, group = -1;
  [[maybe_unused]] int multiplied_slot = 0;
  for (Walk walk(arguments); walk.inside(); walk.next()) {
    const int64 weight_group = int64(walk.i()) * P::B * P::D;
    if (!Tile::STREAMED && walk.group != group) {
      group = walk.group;
      named_barrier_sync(Tile::ALL_MULTIPLIERS, Tile::MULTIPLIERS);  // the weights before are no longer in use
      write_weights<P, Tile>(weights,
                             static_cast<const uint16*>(arguments.weight) +
                                 (weight_group + int64(walk.n0()) * P::D) * P::C + walk.j0(),
                             InOrder<P, 8>(), P::B - walk.n0(), thread);
      fence_view_async_shared();
      named_barrier_sync(Tile::ALL_MULTIPLIERS, Tile::MULTIPLIERS);
    }

    GroupSums<Tile> sums;
    uint32 words[2][Layout::CHUNKS * 4];
    // Loads what a thread has of unit `u` of the stage, for its two rows, and may give the stage back.
    const auto load_unit = [&](int u, bool last) {
      const unsigned char* const stage = ring + slot * Tile::STAGE_BYTES + row * Tile::ROW_BYTES;
      if (u == 0) full[slot].wait(parity);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int run = 0; run < Layout::RUNS; ++run)
#pragma unroll
          for (int c = 0; c < Layout::RUN; ++c) {
            const int q = (u * Layout::RUNS + run) * 4 + place.quarter;  // run within the stage
            const int chunk = Layout::WIDE ? q * Tile::CHUNKS_OF_L + place.group_j : q * Layout::RUN + c;
            put_chunk(words[half] + (run * Layout::RUN + c) * 4,
                      *reinterpret_cast<const uint4*>(stage + half * 8 * Tile::ROW_BYTES + (chunk ^ swap) * 16));
          }
      if (last) {
        if (!Tile::STREAMED) empty[slot].arrive();
        if (++slot == Tile::STAGES) slot = 0, parity ^= 1;
      }
    };
    const auto ends_stage = [](int unit) { return (unit + 1) % Tile::STAGE_UNITS == 0 || unit + 1 == Tile::UNITS; };
    if (Tile::AHEAD) load_unit(0, ends_stage(0));
#pragma unroll 1
    for (int unit = 0; unit < Tile::UNITS; ++unit) {
      if (!Tile::AHEAD) load_unit(unit % Tile::STAGE_UNITS, ends_stage(unit));
      uint32 a[Layout::J][Layout::STEPS][4];
#pragma unroll
      for (int j = 0; j < Layout::J; ++j)
#pragma unroll
        for (int s = 0; s < Layout::STEPS; ++s)
#pragma unroll
          for (int e = 0; e < 4; ++e) a[j][s][e] = pair_of<Layout>(words[e % 2], j, 2 * s + e / 2);
      keep(a);  // before the first product: products between which registers change wait for each other
      const int unit_at =
          Tile::STREAMED ? multiplied_slot * Tile::STAGE_BYTES + unit % Tile::STAGE_UNITS * Tile::UNIT_BYTES
                         : unit * Tile::UNIT_BYTES;
      const uint64 unit_matrices = first_matrices + unit_at / 16;
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < Layout::STEPS; ++s)
#pragma unroll
        for (int j = 0; j < Layout::J; ++j) {
          const uint64 b = unit_matrices + (s * Tile::JC + j) * (Tile::MATRIX_BYTES / 16);
          wgmma_mma_async_16<T, Tile::N>(sums[j], a[j][s], b, unit + s);
        }
      wgmma_commit_group();
      if (Tile::AHEAD && unit + 1 < Tile::UNITS) load_unit((unit + 1) % Tile::STAGE_UNITS, ends_stage(unit + 1));
      wgmma_wait_group<0>();
      keep(a);
      if (Tile::STREAMED && ends_stage(unit)) {  // the products have read its weights
        empty[multiplied_slot].arrive();
        if (++multiplied_slot == Tile::STAGES) multiplied_slot = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < Layout::J; ++j) wgmma_fence_operand(sums[j]);
    const int64 row0 = walk.tile * Tile::BM;
    const int64 feature = weight_group + walk.n0() * P::D + walk.j0();
    uint16* const y = static_cast<uint16*>(arguments.y) + row0 * arguments.y_batch_stride + feature;
    store_group<T, P, Tile, After>(arguments, y, feature, rows_inside<Tile::BM>(arguments.batch - row0),
                                   P::B - walk.n0(), slices, sums, place);
  }
}

// Asks the L2 cache for the bias, which is read at the end.
template <typename P, typename Tile, typename After>
__device__ __forceinline__ void prefetch_bias(const typename After::Arguments& arguments) {
  if constexpr (After::BIAS) {
    constexpr int64 BYTES = int64(P::A) * P::B * P::D * 2 / 16 * 16;  // in whole chunks
    prefetch_share<Tile::THREADS>(arguments.bias, BYTES, blockIdx.x, gridDim.x);
  }
}

template <typename T, typename P, typename Tile, typename After = NoEpilogue>
__device__ __forceinline__ void wgmma16_kernel(const typename After::Arguments& arguments) {
  using Walk = TileScheduler<P, Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  Mbarrier* const empty = full + Tile::STAGES;
  unsigned char* const weights = shared + Tile::BARRIER_BYTES;
  unsigned char* const ring = shared + Tile::RING_AT;
  unsigned char* const slices = shared + Tile::SLICES_AT;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) {
      full[s].init(Tile::LOADERS);
      empty[s].init(Tile::MULTIPLIERS);
    }
  }
  prefetch_bias<P, Tile, After>(arguments);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __syncthreads();
  if (threadIdx.x < Tile::LOADERS) {
    setmaxnreg_dec<Tile::LOADER_REGISTERS>();
    load_rows<P, Tile, Walk>(arguments, ring, full, empty, [](const Walk&, int, int) {});
  } else {
    setmaxnreg_inc<Tile::MULTIPLIER_REGISTERS>();
    multiply_and_store_rows<T, P, Tile, Walk, After>(arguments, weights, ring, slices, full, empty);
  }
}
