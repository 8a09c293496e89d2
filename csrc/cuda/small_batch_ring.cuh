// 16-bit factors for a few rows of x, whose weights come through the copy engine (batch first, sm_90).
//
// The same products as small_batch.cuh, and another way to bring what they need. There a thread asks
// for weights with loads into its registers, so registers limit how much is under way. Here a block
// owns a group i, or a share of its outputs, and walks over tiles of NB outputs with all their j:
// a row of such a tile is one run of memory, c * d weights, and so is a row of the group's x. One
// warp copies them in bulk: x once, then the weights into a ring of tiles, as far ahead as the ring
// is long. The others multiply. Blocks of a cluster (SHARE of them) own tiles of the same group;
// each asks for a part of x's rows and the copy engine hands them to all, so that x leaves the L2
// cache once a cluster.
#pragma once

#include "pipeline.cuh"
#include "small_batch.cuh"

template <typename P, int WARPS_J_, int WARPS_M_, int WARPS_N_, int WARPS_L_, int MT_, int NT_, int UNITS_,
          int STAGES_, int SHARE_, int GROUP_BLOCKS_, int BLOCKS_>
struct SmallBatchRingTile : SmallBatchTile<P, WARPS_J_, WARPS_M_, WARPS_N_, WARPS_L_, MT_, NT_, UNITS_, 1, BLOCKS_> {
  using Products = SmallBatchTile<P, WARPS_J_, WARPS_M_, WARPS_N_, WARPS_L_, MT_, NT_, UNITS_, 1, BLOCKS_>;
  using typename Products::Fold;
  static constexpr int STAGES = STAGES_;              // tiles of weights in the ring
  static constexpr int SHARE = SHARE_;                // blocks of a cluster
  static constexpr int GROUP_BLOCKS = GROUP_BLOCKS_;  // blocks that share a group's outputs
  static constexpr int MULTIPLIERS = Products::THREADS, THREADS = MULTIPLIERS + 32;
  static constexpr int ROW_BYTES = P::C * P::D * 2;   // of x and of the weight
  // As X_PITCH; but where 8 divides d, rows that are read at the same time lie four apart.
  static constexpr int W_PITCH =
      Fold::WIDE ? Products::X_CHUNKS + (9 - Products::X_CHUNKS % 8) % 8 : Products::X_PITCH;
  static constexpr int STAGE_BYTES = Products::NB * W_PITCH * 16;
  static constexpr int PASSES = (Products::OUTPUT_TILES + GROUP_BLOCKS - 1) / GROUP_BLOCKS;
  static constexpr int BARRIER_BYTES = 128, X_AT = BARRIER_BYTES, RING_AT = X_AT + Products::X_BYTES;
  static constexpr int RING_END = RING_AT + STAGES * STAGE_BYTES;
  // The sums take the place of x and weights where no others follow.
  static constexpr bool REUSE = PASSES == 1;
  static constexpr int SUMS_AT = REUSE ? X_AT : RING_END;
  static constexpr int SUMS_END = SUMS_AT + Products::SUM_BYTES;
  static constexpr int SHARED_BYTES = RING_END > SUMS_END ? RING_END : SUMS_END;
  // Named barriers: of each stage of the ring, and of those who multiply.
  static constexpr int FIRST_EMPTY = 1, SUMS_BARRIER = FIRST_EMPTY + STAGES;
  static_assert(P::D == Products::JC && P::C % Fold::UNIT == 0, "a row is a run of whole units");
  static_assert(ROW_BYTES % 16 == 0 && (STAGES + 1) * 8 <= BARRIER_BYTES && SUMS_BARRIER < 16, "");
  static_assert(GROUP_BLOCKS % SHARE == 0 && GROUP_BLOCKS <= Products::OUTPUT_TILES, "");
};

// A block's place: group i, its first tile of outputs (every GROUP_BLOCKS-th from there on is its
// own too), and its rows of x.
struct RingPlace {
  int i, first, rows;
  int64 row0;
};

template <typename P, typename Tile>
__device__ __forceinline__ RingPlace ring_place(const Arguments& arguments) {
  const int64 block = blockIdx.x;
  const int64 row0 = block / Tile::GROUP_BLOCKS / P::A * Tile::BM;
  return {static_cast<int>(block / Tile::GROUP_BLOCKS % P::A), static_cast<int>(block % Tile::GROUP_BLOCKS),
          rows_inside<Tile::BM>(arguments.batch - row0), row0};
}

// The job of one warp. `full` has a barrier for each stage of the ring, and one for x after them.
template <typename P, typename Tile>
__device__ __forceinline__ void copy_rows_in_bulk(const Arguments& arguments, const RingPlace& place,
                                                  unsigned char* shared, PhaseBarrier* full) {
  const int lane = threadIdx.x % 32;
  PhaseBarrier& x_barrier = full[Tile::STAGES];
  const uint16* const x = static_cast<const uint16*>(arguments.x) + place.row0 * arguments.x_batch_stride +
                          int64(place.i) * P::C * P::D;
  if (lane == 0) x_barrier.arrive_and_expect(place.rows * Tile::ROW_BYTES);
  const int rank = Tile::SHARE == 1 ? 0 : static_cast<int>(blockIdx.x % Tile::SHARE);
  for (int m = rank + lane * Tile::SHARE; m < place.rows; m += 32 * Tile::SHARE) {
    unsigned char* const to = shared + Tile::X_AT + m * Tile::X_PITCH * 16;
    const uint16* const from = x + m * arguments.x_batch_stride;
    if constexpr (Tile::SHARE == 1) {
      x_barrier.copy_in_bulk(to, from, Tile::ROW_BYTES);
    } else {
      x_barrier.copy_in_bulk_to_all(to, from, Tile::ROW_BYTES, (1 << Tile::SHARE) - 1);
    }
  }

  const uint16* const w = static_cast<const uint16*>(arguments.weight) + int64(place.i) * P::B * P::C * P::D;
  int loaded = 0;
  for (int tile = place.first; tile < Tile::OUTPUT_TILES; tile += Tile::GROUP_BLOCKS, ++loaded) {
    const int stage = loaded % Tile::STAGES, k0 = tile * Tile::NB;
    if (loaded >= Tile::STAGES) wait_at(Tile::FIRST_EMPTY + stage, Tile::THREADS);
    const int outputs = P::B - k0 < Tile::NB ? P::B - k0 : Tile::NB;
    if (lane == 0) full[stage].arrive_and_expect(outputs * Tile::ROW_BYTES);
    unsigned char* const to = shared + Tile::RING_AT + stage * Tile::STAGE_BYTES;
    for (int k = lane; k < outputs; k += 32) {
      full[stage].copy_in_bulk(to + k * Tile::W_PITCH * 16, w + int64(k0 + k) * P::C * P::D, Tile::ROW_BYTES);
    }
  }
  // Nobody may arrive at a barrier without end: the last stages are waited for too.
  for (int last = loaded < Tile::STAGES ? 0 : loaded - Tile::STAGES; last < loaded; ++last) {
    wait_at(Tile::FIRST_EMPTY + last % Tile::STAGES, Tile::THREADS);
  }
}

// As load_units, from a tile of `outputs` rows of weights in shared memory.
template <typename P, typename Tile>
__device__ __forceinline__ void take_units(LaneWeights<Tile>& words, const unsigned char* weights, int first,
                                           int outputs, const SmallBatchPlace<Tile>& place) {
  using Fold = typename Tile::Fold;
#pragma unroll
  for (int u = 0; u < Tile::UNITS; ++u)
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n) {
      const int k = (place.warp_n * Tile::NT + n) * 8 + output_of_column<Fold>(place.row_in_eight);
#pragma unroll
      for (int run = 0; run < Fold::RUNS; ++run) {
        const int q = ((first + u) * Fold::RUNS + run) * 4 + place.quarter;
#pragma unroll
        for (int c = 0; c < Fold::RUN; ++c) {
          const int chunk = Fold::WIDE ? q * Tile::CHUNKS_OF_L + place.warp_j : q * Fold::RUN + c;
          uint4 values = make_uint4(0, 0, 0, 0);
          if ((Tile::ALL_UNITS % Tile::UNITS == 0 || first + u < Tile::ALL_UNITS) &&
              (P::B % Tile::NB == 0 || k < outputs)) {
            values = *reinterpret_cast<const uint4*>(weights + (k * Tile::W_PITCH + chunk) * 16);
          }
          put_chunk(words[u][n] + (run * Fold::RUN + c) * 4, values);
        }
      }
    }
}

// The job of all other warps.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void multiply_tiles(const Arguments& arguments, const RingPlace& place,
                                               unsigned char* shared, PhaseBarrier* full) {
  using Fold = typename Tile::Fold;
  const int thread = threadIdx.x;
  const SmallBatchPlace<Tile> at(thread);
  float* const parts = reinterpret_cast<float*>(shared + Tile::SUMS_AT);
  full[Tile::STAGES].wait(0);
  int done = 0;
  for (int tile = place.first; tile < Tile::OUTPUT_TILES; tile += Tile::GROUP_BLOCKS, ++done) {
    const int stage = done % Tile::STAGES, k0 = tile * Tile::NB, outputs = P::B - k0;
    const unsigned char* const weights = shared + Tile::RING_AT + stage * Tile::STAGE_BYTES;
    full[stage].wait(done / Tile::STAGES % 2);
    Sums<Tile> sums;
    clear<Tile>(sums);
    for (int unit = at.warp_l * Tile::UNITS; unit < Tile::ALL_UNITS; unit += Tile::WARPS_L * Tile::UNITS) {
      LaneWeights<Tile> words;
      take_units<P, Tile>(words, weights, unit, outputs, at);
      multiply_units<T, Tile>(sums, words, shared + Tile::X_AT + unit * (Fold::UNIT * Tile::JC / 8) * 16,
                              Tile::ALL_UNITS - unit, place.rows, at);
    }
    arrive_at(Tile::FIRST_EMPTY + stage, Tile::THREADS);
    // All have read what the sums replace: x and the weights, or the sums of the tile before.
    if (Tile::REUSE || done > 0) wait_at(Tile::SUMS_BARRIER, Tile::MULTIPLIERS);
    gather_sums<Tile>(parts, sums, place.rows, at);
    wait_at(Tile::SUMS_BARRIER, Tile::MULTIPLIERS);

    constexpr int FOURS = Tile::FEATURES / 4;
    uint16* const y = static_cast<uint16*>(arguments.y) + place.row0 * arguments.y_batch_stride +
                      (int64(place.i) * P::B + k0) * P::D;
    for (int e = thread; e < place.rows * FOURS; e += Tile::MULTIPLIERS) {
      const int m = e / FOURS, f = e % FOURS * 4;
      store_four<T, P, Tile>(y + m * arguments.y_batch_stride, f, sum_of_warps<Tile>(parts, m, f), outputs);
    }
  }
}

template <typename T, typename P, typename Tile>
__device__ __forceinline__ void small_batch_ring_kernel(const Arguments& arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  PhaseBarrier* const full = reinterpret_cast<PhaseBarrier*>(shared);
  const RingPlace place = ring_place<P, Tile>(arguments);
  if (threadIdx.x == 0) {
    for (int barrier = 0; barrier <= Tile::STAGES; ++barrier) full[barrier].init(1);
    let_copies_see_barriers();
  }
  if (place.row0 == 0) {
    prefetch_share<Tile::THREADS>(arguments.weight, int64(P::A) * P::B * P::C * P::D * 2,
                                  static_cast<int>(blockIdx.x), P::A * Tile::GROUP_BLOCKS);
  }
  if constexpr (Tile::SHARE == 1) {
    __syncthreads();
  } else {
    cluster_barrier();  // no block copies to one whose barriers are not set up
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (threadIdx.x >= Tile::MULTIPLIERS) {
    copy_rows_in_bulk<P, Tile>(arguments, place, shared, full);
  } else {
    multiply_tiles<T, P, Tile>(arguments, place, shared, full);
  }
}
