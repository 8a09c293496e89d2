// 16-bit factors with large b c, batch first, in one pass (sm_90a).
//
// Sectors of x and y hold 16 j. Operands and sums of so many j, for tiles of rows and outputs that
// are worth their traffic, exceed a multiprocessor: so the blocks of a cluster share them. All have
// the same rows and outputs, and each has two neighbours of j.
//
// A block loads whole sectors of its share of the rows, puts l side by side, and gives every block
// the values of its two j, in that block's shared memory: what a transpose of x in memory would have
// done. Then it multiplies as any large product does, both operands from shared memory. It rounds
// its sums to pairs of j and shows them to the others, and each collects all j of its share of the
// rows: whole sectors again, which go to y.
//
// One warpgroup loads and hands out, the others multiply. Weights are packed in the order of a stage
// and come in one piece.
#pragma once

#include "cluster.cuh"
#include "problem.cuh"
#include "transpose.cuh"
#include "wgmma16_rows.cuh"

template <typename P, int CLUSTER_, int GROUPS_, int MT_, int NT_, int KL_, int STAGES_, int RAW_, int SLICE_>
struct Exchange16Tile {
  static constexpr int CLUSTER = CLUSTER_;  // blocks
  static constexpr int GROUPS = GROUPS_;    // warpgroups that multiply, side by side along the rows
  static constexpr int MT = MT_, NT = NT_;  // tiles of 64 rows and of 8 outputs of each
  static constexpr int KL = KL_;            // l in a stage
  static constexpr int STAGES = STAGES_;    // of operands
  static constexpr int RAW = RAW_;          // stages of x as it lies in memory, of a share of the rows
  static constexpr int SLICE = SLICE_;      // outputs that blocks show to each other at a time
  static constexpr int J = 2, JC = J * CLUSTER;  // of a block, whose pairs are words of y; of a cluster
  static constexpr int N = NT * 8, BM = GROUPS * MT * 64, OWN_ROWS = BM / CLUSTER;
  static constexpr int MULTIPLIERS = 128 * GROUPS, LOADERS = 128, THREADS = LOADERS + MULTIPLIERS;
  // Registers a thread: a block starts with the most that all threads can have alike.
  static constexpr int REGISTERS = 65536 / THREADS / 8 * 8, LOADER_REGISTERS = 56;
  static constexpr int AT_START = REGISTERS < 248 ? REGISTERS : 248;
  static constexpr int SHARED_OUT = (AT_START * THREADS - LOADER_REGISTERS * LOADERS) / MULTIPLIERS / 8 * 8;
  static constexpr int MULTIPLIER_REGISTERS = SHARED_OUT < 240 ? SHARED_OUT : 240;
  static constexpr int ROW_BYTES = KL * 2, X_BYTES = BM * ROW_BYTES, WEIGHT_BYTES = N * ROW_BYTES;  // of a j
  static constexpr int WEIGHTS_AT = J * X_BYTES, STAGE_BYTES = J * (X_BYTES + WEIGHT_BYTES);
  static constexpr int STEPS = KL / 16, PARTS = (P::C + KL - 1) / KL;  // of a stage; of a tile
  static constexpr int OUTPUT_TILES = (P::B + N - 1) / N, J_TILES = P::D / JC;
  static constexpr int RAW_CHUNKS = KL * JC / 8;  // of a row
  // After each 8 l a gap, so that the threads which turn neighbours along l meet different banks.
  static constexpr int RAW_EIGHT = 8 * JC * 2 + (JC * 2 < 16 ? 16 : JC * 2), RAW_PITCH = KL / 8 * RAW_EIGHT;
  static constexpr int RAW_BYTES = OWN_ROWS * RAW_PITCH;
  static constexpr int PITCH = SLICE * 4 + 32;  // four rows of 32 bytes meet all banks
  static constexpr int SLICE_BYTES = BM * PITCH;
  static constexpr int RAW_AT = STAGES * STAGE_BYTES, SLICE_AT = RAW_AT + RAW * RAW_BYTES;
  static constexpr int BARRIERS_AT = SLICE_AT + SLICE_BYTES;
  static constexpr int SHARED_BYTES = BARRIERS_AT + (2 * STAGES + 2) * 8;
  static constexpr int ALL_LOADERS = 1, ALL_MULTIPLIERS = 2;  // named barriers
  static_assert(STAGES >= 2 && RAW >= 2 && X_BYTES % 1024 == 0 && WEIGHT_BYTES % 1024 == 0, "");
  static_assert(N % SLICE == 0 && SLICE % 32 == 0 && BM % CLUSTER == 0 && RAW_BYTES % 16 == 0, "");
  static_assert(P::D % JC == 0 && P::B % 8 == 0 && P::C % 8 == 0, "");
  static_assert(CLUSTER == 8 || CLUSTER == 4 || (CLUSTER == 2 && P::D == 4), "stores of 16 bytes");
};

// The barriers of a block, in the order in which they lie.
template <typename Tile> struct ExchangeBarriers {
  // Warps of all blocks arrive at each of them, and at `full` the block's own weights.
  PhaseBarrier full[Tile::STAGES], empty[Tile::STAGES], shown, taken;
};

// What a cluster does one after the other: tiles of rows x outputs x j, j fastest, so that what is
// next in x and in y follows soon, and rows slowest, so that the weights stay in the L2 cache.
template <typename P, typename Tile> struct TilesOfCluster {
  int64 tile, tiles, step;
  int rank;

  __device__ __forceinline__ explicit TilesOfCluster(const Arguments& arguments)
      : tile(blockIdx.x / Tile::CLUSTER),
        tiles((arguments.batch + Tile::BM - 1) / Tile::BM * (P::A * Tile::OUTPUT_TILES * Tile::J_TILES)),
        step(gridDim.x / Tile::CLUSTER), rank(blockIdx.x % Tile::CLUSTER) {}

  __device__ __forceinline__ bool inside() const { return tile < tiles; }
  __device__ __forceinline__ void next() { tile += step; }
  __device__ __forceinline__ int first_j() const {  // of the cluster
    return static_cast<int>(tile % Tile::J_TILES) * Tile::JC;
  }
  __device__ __forceinline__ int output_tile() const {
    return static_cast<int>(tile / Tile::J_TILES % Tile::OUTPUT_TILES);
  }
  __device__ __forceinline__ int i() const {
    return static_cast<int>(tile / (Tile::J_TILES * Tile::OUTPUT_TILES) % P::A);
  }
  __device__ __forceinline__ int64 row0() const {
    return tile / (Tile::J_TILES * Tile::OUTPUT_TILES * P::A) * Tile::BM;
  }
};

// Begins to copy this block's share of a stage's rows, as they lie in x. `x` is x at the share's first
// row and the stage's first l; `rows` and `length` say how many rows and l exist from there on.
template <typename P, typename Tile>
__device__ __forceinline__ void load_raw(const Arguments& arguments, unsigned char* raw, const uint16* x,
                                         int64 rows, int length) {
#pragma unroll 4
  for (int task = threadIdx.x; task < Tile::OWN_ROWS * Tile::RAW_CHUNKS; task += Tile::LOADERS) {
    const int row = task / Tile::RAW_CHUNKS, chunk = task % Tile::RAW_CHUNKS;
    const int l = chunk * 8 / Tile::JC, j = chunk * 8 % Tile::JC;
    unsigned char* const to = raw + row * Tile::RAW_PITCH + l / 8 * Tile::RAW_EIGHT + (l % 8 * Tile::JC + j) * 2;
    copy_async_16(to, x + row * arguments.x_batch_stride + l * P::D + j, row < rows && l < length);
  }
  commit_copies();
}

// Gives every block the values of its two j of this block's rows, l side by side. A thread turns 8 l
// of 4 j at a time, neighbours first along j and then along l: what a warp writes to a block at a time
// are whole rows.
template <typename Tile>
__device__ __forceinline__ void hand_out(unsigned char* stage, const unsigned char* raw, int rank) {
  constexpr int QUARTERS = Tile::JC / 4, EIGHTS = Tile::KL / 8;
#pragma unroll 1
  for (int unit = threadIdx.x; unit < Tile::OWN_ROWS * EIGHTS * QUARTERS; unit += Tile::LOADERS) {
    const int quarter = unit % QUARTERS, eight = unit / QUARTERS % EIGHTS, row = unit / (QUARTERS * EIGHTS);
    const unsigned char* const from = raw + row * Tile::RAW_PITCH + eight * Tile::RAW_EIGHT + quarter * 8;
    uint32 in[16], out[16];
#pragma unroll
    for (int l = 0; l < 8; ++l) {
      const uint2 words = *reinterpret_cast<const uint2*>(from + l * Tile::JC * 2);
      in[2 * l] = words.x, in[2 * l + 1] = words.y;
    }
    transpose<2, 8, 4>(in, out);
    const int place = rank * Tile::OWN_ROWS + row;
    unsigned char* const mine =
        stage + place * Tile::ROW_BYTES + swizzled_chunk<Tile::ROW_BYTES>(eight, place) * 16;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint32 to = address_in_block(mine, quarter * 2 + block);
#pragma unroll
      for (int j = 0; j < Tile::J; ++j) {
        const uint32* const words = out + (block * Tile::J + j) * 4;
        store_chunk(to + j * Tile::X_BYTES, words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Where the loads are: the tile, and the stage of it.
template <typename P, typename Tile> struct StagesOfCluster {
  TilesOfCluster<P, Tile> at;
  int part = 0;

  __device__ __forceinline__ explicit StagesOfCluster(const Arguments& arguments) : at(arguments) {}
  __device__ __forceinline__ bool inside() const { return at.inside(); }
  __device__ __forceinline__ void next() {
    if (++part == Tile::PARTS) part = 0, at.next();
  }
};

// The job of the first warpgroup.
template <typename P, typename Tile>
__device__ __forceinline__ void load_stages(const Arguments& arguments, unsigned char* ring, unsigned char* raw,
                                            ExchangeBarriers<Tile>& barriers) {
  StagesOfCluster<P, Tile> ahead(arguments), now(arguments);
  int raw_ahead = 0, raw_now = 0, slot = 0, parity = 1;
  const auto load_next = [&] {
    if (ahead.inside()) {
      const int64 row0 = ahead.at.row0() + ahead.at.rank * Tile::OWN_ROWS;
      const uint16* const x = static_cast<const uint16*>(arguments.x) + row0 * arguments.x_batch_stride +
                              (int64(ahead.at.i()) * P::C + ahead.part * Tile::KL) * P::D + ahead.at.first_j();
      load_raw<P, Tile>(arguments, raw + raw_ahead * Tile::RAW_BYTES, x, arguments.batch - row0,
                        P::C - ahead.part * Tile::KL);
      ahead.next();
      if (++raw_ahead == Tile::RAW) raw_ahead = 0;
    } else {
      commit_copies();  // none: so that the waits count alike
    }
  };
#pragma unroll 1
  for (int s = 0; s < Tile::RAW - 1; ++s) load_next();
#pragma unroll 1
  for (; now.inside(); now.next()) {
    wait_for_copies<Tile::RAW - 2>();
    wait_at(Tile::ALL_LOADERS, Tile::LOADERS);  // all of the stage has landed, and the one before is read
    load_next();
    unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
    wait_for_cluster(barriers.empty[slot], parity);
    if (threadIdx.x == 0) {
      const int64 pair = (int64(now.at.i()) * P::D + now.at.first_j()) / Tile::J + now.at.rank;
      const int64 piece = (pair * Tile::OUTPUT_TILES + now.at.output_tile()) * Tile::PARTS + now.part;
      barriers.full[slot].arrive_and_expect(Tile::J * Tile::WEIGHT_BYTES);
      barriers.full[slot].copy_in_bulk(
          stage + Tile::WEIGHTS_AT,
          static_cast<const unsigned char*>(arguments.weight) + piece * (Tile::J * Tile::WEIGHT_BYTES),
          Tile::J * Tile::WEIGHT_BYTES);
    }
    hand_out<Tile>(stage, raw + raw_now * Tile::RAW_BYTES, now.at.rank);
    fence_for_tensor_cores_of_cluster();
    __syncwarp();
    if (threadIdx.x % 32 < Tile::CLUSTER) arrive_in_block(&barriers.full[slot], threadIdx.x % 32);
    if (++raw_now == Tile::RAW) raw_now = 0;
    if (++slot == Tile::STAGES) slot = 0, parity ^= 1;
  }
  wait_for_copies<0>();
}

// A warpgroup's sums of both j: of 8-output tile n a lane has elements 4 n to 4 n + 3, two neighbouring
// outputs of two rows, eight apart.
template <typename Tile> using PairSums = float[Tile::J][Tile::MT][Tile::N / 2];

// Multiplies all stages of a tile. `first_row`: of this warpgroup in a stage's rows.
template <typename T, typename Tile>
__device__ __forceinline__ void multiply_stages(PairSums<Tile>& sums, const unsigned char* ring, int first_row,
                                                ExchangeBarriers<Tile>& barriers, int& slot, int& parity) {
  const auto give_back = [&](int stage) {
    __syncwarp();
    if (threadIdx.x % 32 < Tile::CLUSTER) arrive_in_block(&barriers.empty[stage], threadIdx.x % 32);
  };
  int before = slot;
#pragma unroll 1
  for (int part = 0; part < Tile::PARTS; ++part) {
    const uint32 stage = shared_address(ring + slot * Tile::STAGE_BYTES);
    wait_for_cluster(barriers.full[slot], parity);
    begin_products();
#pragma unroll
    for (int step = 0; step < Tile::STEPS; ++step)
#pragma unroll
      for (int j = 0; j < Tile::J; ++j) {
        const uint32 weights = stage + Tile::WEIGHTS_AT + j * Tile::WEIGHT_BYTES + step * 32;
        const uint64 b = describe_rows_of_sums<Tile::ROW_BYTES>(weights);
#pragma unroll
        for (int mt = 0; mt < Tile::MT; ++mt) {
          const uint32 rows = stage + j * Tile::X_BYTES + (first_row + mt * 64) * Tile::ROW_BYTES + step * 32;
          multiply_warpgroup_rows<T, Tile::N>(sums[j][mt], describe_rows_of_sums<Tile::ROW_BYTES>(rows), b,
                                              part + step);
        }
      }
    commit_products();
    wait_for_products<1>();  // of the stage before, which may then be filled anew
    if (part > 0) give_back(before);
    before = slot;
    if (++slot == Tile::STAGES) slot = 0, parity ^= 1;
  }
  wait_for_products<0>();
  give_back(before);
#pragma unroll
  for (int j = 0; j < Tile::J; ++j)
#pragma unroll
    for (int mt = 0; mt < Tile::MT; ++mt) appear(sums[j][mt]);
}

// Writes a lane's part of a slice: words of two neighbouring j, rounded, outputs side by side.
template <typename T, typename Tile>
__device__ __forceinline__ void show_slice(unsigned char* slice, const PairSums<Tile>& sums, int n0, int row0) {
  const int lane = threadIdx.x % 32;
  unsigned char* const to = slice + (row0 + lane / 4) * Tile::PITCH + lane % 4 * 8;
#pragma unroll
  for (int mt = 0; mt < Tile::MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < Tile::SLICE / 8; ++n) {
        const int e = (n0 / 8 + n) * 4 + half * 2;
        *reinterpret_cast<uint2*>(to + (mt * 64 + half * 8) * Tile::PITCH + n * 32) =
            make_uint2(pack_pair<T>(sums[0][mt][e], sums[1][mt][e]),
                       pack_pair<T>(sums[0][mt][e + 1], sums[1][mt][e + 1]));
      }
}

// Collects all j of this block's share of a slice's rows, and stores them. `y` is y at the tile's
// first row, the slice's first output and the cluster's first j.
template <typename P, typename Tile>
__device__ __forceinline__ void take_slice(const Arguments& arguments, const unsigned char* slice, uint16* y, int rows,
                                           int outputs, int rank) {
  constexpr int CLUSTER = Tile::CLUSTER;
  // A lane takes OUTPUTS outputs from PEERS blocks; neighbouring lanes complete each other's sectors.
  constexpr int PEERS = CLUSTER < 4 ? CLUSTER : 4, SHARES = CLUSTER / PEERS;
  constexpr int OUTPUTS = CLUSTER == 8 ? 4 : 4 / CLUSTER;
  constexpr int ROW_UNITS = Tile::SLICE / OUTPUTS * SHARES;
#pragma unroll 2
  for (int unit = threadIdx.x - Tile::LOADERS; unit < Tile::OWN_ROWS * ROW_UNITS; unit += Tile::MULTIPLIERS) {
    const int share = unit % SHARES, k = unit % ROW_UNITS / SHARES * OUTPUTS;
    const int row = rank * Tile::OWN_ROWS + unit / ROW_UNITS;
    if (row >= rows || k >= outputs) continue;
    uint32 words[PEERS][OUTPUTS];
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) {
      load_words<OUTPUTS>(words[peer], address_in_block(slice + row * Tile::PITCH + k * 4, share * PEERS + peer));
    }
    uint16* const to = y + row * arguments.y_batch_stride + k * P::D + share * (PEERS * Tile::J);
    if constexpr (PEERS == 4) {
#pragma unroll
      for (int output = 0; output < OUTPUTS; ++output) {
        *reinterpret_cast<uint4*>(to + output * P::D) =
            make_uint4(words[0][output], words[1][output], words[2][output], words[3][output]);
      }
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0][0], words[1][0], words[0][1], words[1][1]);
    }
  }
}

// The job of the other warpgroups.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void multiply_and_store(const Arguments& arguments, const unsigned char* ring,
                                                   unsigned char* slice, ExchangeBarriers<Tile>& barriers) {
  const int thread = threadIdx.x - Tile::LOADERS;
  const int first_row = thread / 128 * (Tile::MT * 64), warp_row = first_row + thread / 32 % 4 * 16;
  int slot = 0, parity = 0, phase = 0;  // of the stages; of slices
  for (TilesOfCluster<P, Tile> at(arguments); at.inside(); at.next()) {
    PairSums<Tile> sums;
    multiply_stages<T, Tile>(sums, ring, first_row, barriers, slot, parity);
    const int64 left = arguments.batch - at.row0();
    const int rows = left < Tile::BM ? static_cast<int>(left) : Tile::BM;
    const int k0 = at.output_tile() * Tile::N;
    uint16* const y = static_cast<uint16*>(arguments.y) + at.row0() * arguments.y_batch_stride +
                      (int64(at.i()) * P::B + k0) * P::D + at.first_j();
#pragma unroll
    for (int n0 = 0; n0 < Tile::N; n0 += Tile::SLICE) {
      wait_for_cluster(barriers.taken, phase ^ 1);
      show_slice<T, Tile>(slice, sums, n0, warp_row);
      __syncwarp();
      if (thread % 32 < Tile::CLUSTER) arrive_in_block(&barriers.shown, thread % 32);
      wait_for_cluster(barriers.shown, phase);
      take_slice<P, Tile>(arguments, slice, y + n0 * P::D, rows, P::B - k0 - n0, at.rank);
      __syncwarp();
      if (thread % 32 < Tile::CLUSTER) arrive_in_block(&barriers.taken, thread % 32);
      phase ^= 1;
    }
  }
}

template <typename T, typename P, typename Tile>
__device__ __forceinline__ void exchange16_kernel(const Arguments& arguments) {
  extern __shared__ __align__(1024) unsigned char shared[];  // swizzling goes by address
  auto& barriers = *reinterpret_cast<ExchangeBarriers<Tile>*>(shared + Tile::BARRIERS_AT);
  if (threadIdx.x == 0) {
    constexpr int LOADING_WARPS = Tile::CLUSTER * Tile::LOADERS / 32;
    constexpr int MULTIPLYING_WARPS = Tile::CLUSTER * Tile::MULTIPLIERS / 32;
    for (int s = 0; s < Tile::STAGES; ++s) {
      barriers.full[s].init(LOADING_WARPS + 1);
      barriers.empty[s].init(MULTIPLYING_WARPS);
    }
    barriers.shown.init(MULTIPLYING_WARPS);
    barriers.taken.init(MULTIPLYING_WARPS);
    fence_for_tensor_cores();  // and for the copy engine
    show_barriers_to_cluster();
  }
  cluster_barrier();
  if (threadIdx.x < Tile::LOADERS) {
    give_up_registers<Tile::LOADER_REGISTERS>();
    load_stages<P, Tile>(arguments, shared, shared + Tile::RAW_AT, barriers);
  } else {
    take_registers<Tile::MULTIPLIER_REGISTERS>();
    multiply_and_store<T, P, Tile>(arguments, shared, shared + Tile::SLICE_AT, barriers);
  }
  __syncwarp();
  cluster_barrier();  // none may end while others reach its shared memory
}
