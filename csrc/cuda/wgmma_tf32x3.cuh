// FP32 factors on Hopper's warpgroup tensor cores, with j in the vector lanes (batch first, sm_90a).
//
// The products of mma_tf32x3.cuh, twice as fast: x is split in registers as there, and the weights lie
// in shared memory already split, so that the tensor cores read them there themselves. For each j
// and half of the split, four l of all NB outputs are one matrix, 16 bytes an output.
//
// `mma_tf32x3_pack_kernel` splits the weights and lays them out in that order once; what a stage, or a
// column, needs of them is then one run of bytes, which one thread asks for with one instruction.
//
// The first warpgroup of a block copies to shared memory; the others do nothing but multiply and
// store, two or three of them, so that the tensor cores always have somebody's products to work on.
// They are one team that shares the rows of a tile, or teams of one that take tiles in turns: then
// one stores while another multiplies.
#pragma once

#include "common/mbarrier.cuh"
#include "mma_tf32x3.cuh"
#include "common/pdl.cuh"
#include "common/weight_order.cuh"
#include "common/wgmma_tf32.cuh"

template <typename P, int WARPGROUPS_J_, int WARPGROUPS_M_, int TEAMS_, int NT_, int KL_, int STAGES_,
          bool RESIDENT_, int CHAIN_, int PENDING_, int PRODUCTS_>
struct WgmmaTf32x3Tile
    : MmaTf32x3Tile<P, WARPGROUPS_J_, 4 * WARPGROUPS_M_, 1, 1, NT_, KL_, STAGES_, 1, RESIDENT_, PRODUCTS_> {
  using Base = MmaTf32x3Tile<P, WARPGROUPS_J_, 4 * WARPGROUPS_M_, 1, 1, NT_, KL_, STAGES_, 1, RESIDENT_, PRODUCTS_>;
  using Layout = typename Base::Layout;
  static constexpr int TEAMS = TEAMS_, TEAM = 128 * WARPGROUPS_J_ * WARPGROUPS_M_;  // threads
  static constexpr int MULTIPLIERS = TEAMS * TEAM, LOADERS = 128;
  static constexpr int THREADS = LOADERS + MULTIPLIERS;
  // Registers a thread, added up over the warpgroups: a block starts with the most that all threads
  // can have alike. To take more than were given up would wait for ever.
  static constexpr int REGISTERS = MULTIPLIERS == 384 ? 4 * 128 : 3 * 168;
  static constexpr int LOADER_REGISTERS = MULTIPLIERS == 384 && WARPGROUPS_J_ == 1 ? 32 : 56;
  static constexpr int MULTIPLIER_REGISTERS = (REGISTERS - LOADER_REGISTERS) / (MULTIPLIERS / 128);
  static_assert(MULTIPLIER_REGISTERS % 8 == 0, "");
  static_assert(LOADER_REGISTERS + MULTIPLIERS / 128 * MULTIPLIER_REGISTERS <= REGISTERS, "");
  static constexpr int CHAIN = CHAIN_;  // steps of 8 l that the tensor cores add up by themselves
  static constexpr int PENDING = PENDING_;  // chains under way while the next is started: 0 or 1
  static constexpr int HALVES = PRODUCTS_ == 1 ? 1 : 2;  // of a split
  static constexpr int MATRIX_BYTES = Base::NB * 16;
  static constexpr int LAYER_BYTES = Base::JC * HALVES * MATRIX_BYTES;  // 4 l
  static constexpr int STAGE_UNITS = KL_ / Layout::UNIT;
  static constexpr int TURN_UNITS = CHAIN > Layout::STEPS ? CHAIN / Layout::STEPS : 1;  // multiplied at a time
  // Rows of x lie side by side, and two neighbours meet all groups of banks, because the chunks of odd
  // rows are permuted; rows of runs of 3 chunks have a pitch instead.
  static constexpr bool PERMUTED = Base::STAGE_CHUNKS % 8 == 0 && Layout::RUN == 1;
  static constexpr int ODD_ROWS = PERMUTED ? (Base::WARPS_J == 2 ? 1 : 4) : 0;
  static constexpr int PITCH = PERMUTED ? Base::STAGE_CHUNKS : Base::PITCH;
  // Results of four j of an output are as wide as a chunk: warps that have no others store directly.
  static constexpr bool DIRECT = Layout::WIDE && WARPGROUPS_J_ == 1;
  static constexpr int SLICES_BYTES = DIRECT ? 0 : TEAMS * Base::WARPS_M * Base::SLICE_BYTES;
  // Layers of a column of the weights, with zeros after the last l, and those in shared memory.
  static constexpr int TURNS = (Base::UNITS + TURN_UNITS - 1) / TURN_UNITS;
  static constexpr int COLUMN_LAYERS =
      RESIDENT_ ? TURNS * TURN_UNITS * Layout::L : Base::STAGES_PER_TILE * KL_ / 4;
  static constexpr int LAYERS = RESIDENT_ ? COLUMN_LAYERS : KL_ / 4;
  static constexpr int64 COLUMN_BYTES = int64(COLUMN_LAYERS) * LAYER_BYTES;
  // A stage: rows of x, and if streamed, layers of the weights.
  static constexpr int LAYERS_AT = Base::BM * PITCH * 16;
  static constexpr int STAGE_BYTES = LAYERS_AT + (RESIDENT_ ? 0 : LAYERS * LAYER_BYTES);
  static constexpr int FULLS = TEAMS * STAGES_;  // barriers: of each team and stage of the ring
  static constexpr int BARRIER_BYTES = 256;
  static constexpr int RING_AT = BARRIER_BYTES + (RESIDENT_ ? LAYERS * LAYER_BYTES : 0);
  static constexpr int SHARED_BYTES = RING_AT + STAGES_ * STAGE_BYTES + SLICES_BYTES;
  // Named barriers: 1 to 4 are those of slices that two warpgroups share.
  static constexpr int FIRST_EMPTY = 5;
  static_assert(STAGES_ >= 2 && (FULLS + 1) * 8 <= BARRIER_BYTES && FIRST_EMPTY + STAGES_ <= 16, "");
  static_assert(MULTIPLIERS == 256 || MULTIPLIERS == 384, "");
  static_assert(WARPGROUPS_J_ == 1 || WARPGROUPS_M_ * TEAMS == 1, "only four warps' slices have barriers");
  static_assert(STAGE_UNITS % TURN_UNITS == 0 && Layout::STEPS * TURN_UNITS % CHAIN == 0, "");
};

// sums += x w over the l of TURN_UNITS units, for 64 rows and all NB outputs. `layers`: address of
// their weights.
template <typename Tile>
__device__ __forceinline__ void multiply_by_warpgroup(Sums<Tile>& sums, const unsigned char* x_row, int unit,
                                                      uint32 layers, int quarter, int warp_j,
                                                      int permuted) {
  using Layout = typename Tile::Layout;
  constexpr int J = Layout::J, CHAIN = Tile::CHAIN;
  constexpr int CHAINS = Layout::STEPS * Tile::TURN_UNITS / CHAIN, GROUPS = J * CHAINS;
  float values[Tile::TURN_UNITS][2][Layout::CHUNKS * 4];
#pragma unroll
  for (int u = 0; u < Tile::TURN_UNITS; ++u) {
    load_unit<Tile>(values[u][0], x_row, unit + u, quarter, warp_j, permuted);
    load_unit<Tile>(values[u][1], x_row + 8 * Tile::PITCH * 16, unit + u, quarter, warp_j, permuted);
  }
  float parts[Tile::PENDING + 1][Tile::NT * 4];
  const auto add = [&](int group) {
    float(&part)[Tile::NT * 4] = parts[group % (Tile::PENDING + 1)];
    wgmma_fence_operand(part);
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[0][n][group / CHAINS][e] += part[n * 4 + e];
  };
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int j = group / CHAINS;
    uint32 big[CHAIN][4], small[CHAIN][4];
    uint64 w_big[CHAIN];
#pragma unroll
    for (int i = 0; i < CHAIN; ++i) {
      const int step = group % CHAINS * CHAIN + i, u = step / Layout::STEPS, s = step % Layout::STEPS;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Split<Tile::PRODUCTS> split(values[u][e % 2][(2 * s + e / 2) * J + j]);
        big[i][e] = split.big, small[i][e] = split.small;
      }
      w_big[i] = make_smem_desc(layers + (u * Layout::L + 2 * s) * Tile::LAYER_BYTES +
                                    j * Tile::HALVES * Tile::MATRIX_BYTES,
                                Tile::LAYER_BYTES, 128);
    }
    float(&part)[Tile::NT * 4] = parts[group % (Tile::PENDING + 1)];
    wgmma_fence();
    if (Tile::PRODUCTS > 1) {  // the smallest first
#pragma unroll
      for (int i = 0; i < CHAIN; ++i) {
        wgmma_mma_async_tf32<Tile::NB>(part, small[i], w_big[i], i > 0);
        wgmma_mma_async_tf32<Tile::NB>(part, big[i], w_big[i] + Tile::MATRIX_BYTES / 16, 1);
      }
    }
#pragma unroll
    for (int i = 0; i < CHAIN; ++i) {
      wgmma_mma_async_tf32<Tile::NB>(part, big[i], w_big[i], Tile::PRODUCTS > 1 || i > 0);
    }
    wgmma_commit_group();
    if (group < Tile::PENDING) continue;
    wgmma_wait_group<Tile::PENDING>();
    add(group - Tile::PENDING);
  }
  if (Tile::PENDING > 0) {
    wgmma_wait_group<0>();
    add(GROUPS - 1);
  }
}

// Where the packed weights of a column begin.
template <typename P, typename Tile>
__device__ __forceinline__ const unsigned char* packed_column(const Arguments& arguments, int column) {
  return static_cast<const unsigned char*>(arguments.weight) + column * Tile::COLUMN_BYTES;
}

// The job of the first warpgroup. `full` has a barrier for each team and stage of the ring, so that a
// team misses no phase of its own, and one after them for resident weights.
template <typename P, typename Tile>
__device__ __forceinline__ void load_stages(const Arguments& arguments, unsigned char* layers,
                                            unsigned char* ring, Mbarrier* full) {
  const int64 tiles = (arguments.batch + Tile::BM - 1) / Tile::BM * Tile::COLUMNS;
  const bool asks = threadIdx.x == 0;  // for weights
  const auto wait_for_empty = [](int stage) {
    named_barrier_sync(Tile::FIRST_EMPTY + stage % Tile::STAGES, Tile::LOADERS + Tile::TEAM);
  };
  if (Tile::RESIDENT && asks) {
    full[Tile::FULLS].arrive_and_expect_tx(uint32(Tile::COLUMN_BYTES));
    full[Tile::FULLS].cp_async_bulk(layers, packed_column<P, Tile>(arguments, blockIdx.x % Tile::COLUMNS),
                                    uint32(Tile::COLUMN_BYTES));
  }
  int loaded = 0, team = 0;  // stages; whose tile
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TilePlace<P, Tile> place(tile, arguments.batch);
    const float* const x = static_cast<const float*>(arguments.x) + place.column.i * (P::C * P::D) +
                           place.column.j0 + place.row0 * arguments.x_batch_stride;
    const int rows = rows_inside<Tile::BM>(arguments.batch - place.row0);
    const unsigned char* const weights = packed_column<P, Tile>(arguments, place.index);
    for (int part = 0; part < Tile::STAGES_PER_TILE; ++part, ++loaded) {
      if (loaded >= Tile::STAGES) wait_for_empty(loaded);
      Mbarrier& barrier = full[team * Tile::STAGES + loaded % Tile::STAGES];
      unsigned char* const stage = ring + loaded % Tile::STAGES * Tile::STAGE_BYTES;
      if (!Tile::RESIDENT && asks) {
        constexpr int BYTES = Tile::LAYERS * Tile::LAYER_BYTES;
        barrier.arrive_and_expect_tx(BYTES);
        barrier.cp_async_bulk(stage + Tile::LAYERS_AT, weights + part * BYTES, BYTES);
      }
      load_rows<P, Tile, Tile::BM, Tile::KL, Tile::PITCH, false>(stage, x, arguments.x_batch_stride, rows,
                                                                 part * Tile::KL);
      barrier.cp_async_arrive();
    }
    if (++team == Tile::TEAMS) team = 0;
  }
  // Nobody may arrive at a barrier without end: the last stages are waited for too.
  const int first = loaded < Tile::STAGES ? 0 : loaded - Tile::STAGES;
  for (int stage = first; stage < loaded; ++stage) wait_for_empty(stage);
}

// The weight of output k, l and j of a column, from its packed weights.
template <typename P, typename Tile> struct PackedWeights {
  const uint32* layers;
  Column column;

  __device__ __forceinline__ float operator()(int k, int l, int j) const {
    using Layout = typename Tile::Layout;
    const int output = k - column.n0, n = output - output % 8 + column_of_output<Layout>(output % 8);
    const int runs = l / (4 * Layout::RUN_L), q = l / Layout::RUN_L % 4;
    const int layer = runs * Layout::RUN_L + l % Layout::RUN_L;
    const uint32* const big = layers + ((layer * Tile::JC + j - column.j0) * Tile::HALVES * Tile::NB + n) * 4 + q;
    const float small = __uint_as_float(big[(Tile::HALVES - 1) * Tile::NB * 4]);
    return small == small ? __uint_as_float(*big) + small : __uint_as_float(*big);
  }
};

// Writes a finished tile from registers, behind its epilogue, each result of four j as one chunk.
template <typename P, typename Tile, typename After, typename Weights>
__device__ __forceinline__ void write_tile_directly(const typename After::Arguments& arguments, int64 tile,
                                                    const Sums<Tile>& sums, int warp_m,
                                                    Weights weights_of_column) {
  using Layout = typename Tile::Layout;
  const int lane = threadIdx.x % 32;
  const TilePlace<P, Tile> place(tile, arguments.batch);
  const Column& column = place.column;
  const int64 row0 = place.row0 + warp_m * 16 + lane / 4;
  // Of row half * 8 of this lane's, and output tile n: its columns 2 q and 2 q + 1.
  const auto first_of = [&](int n, int c) {
    return (column.n0 + n * 8 + output_of_column<Layout>(lane % 4 * 2 + c)) * P::D + column.j0;
  };
  float* const y = static_cast<float*>(arguments.y) + column.i * (P::B * P::D);
  const auto store = [&](int64 row, int first, const float4& sums) {
    const int64 feature = column.i * (P::B * P::D) + first, at = row * arguments.y_batch_stride + feature;
    *reinterpret_cast<float4*>(y + row * arguments.y_batch_stride + first) =
        four_with_epilogue<P, After>(sums, arguments, feature, at, 4);
  };
  unsigned long long not_finite = 0;  // a bit for each chunk of this thread
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64 row = row0 + half * 8;
    if (row >= arguments.batch) break;
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float(&of_j)[4][4] = sums[0][n];
        if (Tile::PADDED && first_of(n, c) >= P::B * P::D) continue;
        const int e = half * 2 + c;
        const float4 result = make_float4(of_j[0][e], of_j[1][e], of_j[2][e], of_j[3][e]);
        if (Tile::PRODUCTS == 1 || all_finite(result)) {
          store(row, first_of(n, c), result);
        } else {
          not_finite |= 1ull << ((half * Tile::NT + n) * 2 + c);
        }
      }
  }
  if (not_finite == 0) return;
  const float* const x = static_cast<const float*>(arguments.x) + column.i * (P::C * P::D);
  const auto weight_at = weights_of_column(column);
#pragma unroll 1
  for (int at = 0; at < Tile::NT * 4; ++at) {
    if ((not_finite >> at & 1) == 0) continue;
    const int64 row = row0 + at / (2 * Tile::NT) * 8;
    const int first = first_of(at / 2 % Tile::NT, at % 2);
    store(row, first, plain_product<P>(x + row * arguments.x_batch_stride, weight_at, first));
  }
}

template <typename P, typename Tile, typename After>
__device__ __forceinline__ void multiply_and_store(const typename After::Arguments& arguments,
                                                   unsigned char* layers, unsigned char* ring, Mbarrier* full) {
  using Layout = typename Tile::Layout;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - Tile::LOADERS) / 32;
  const int team = warp / (Tile::TEAM / 32), warpgroup = warp % (Tile::TEAM / 32) / 4;
  const int warp_j = warpgroup % Tile::WARPS_J;
  const int warp_m = warpgroup / Tile::WARPS_J * 4 + warp % 4;
  const int quarter = lane % 4, row_in_eight = lane / 4;
  unsigned char* const slice =
      ring + Tile::STAGES * Tile::STAGE_BYTES + (team * Tile::WARPS_M + warp_m) * Tile::SLICE_BYTES;
  const int first_matrix = warp_j * Layout::J * Tile::HALVES * Tile::MATRIX_BYTES;
  const int64 tiles = (arguments.batch + Tile::BM - 1) / Tile::BM * Tile::COLUMNS;

  Sums<Tile> sums = {};
  if (Tile::RESIDENT) full[Tile::FULLS].wait(0);
  int used = team * Tile::STAGES_PER_TILE;  // stages before the team's next
  uint32 parities = 0;                      // of the team's phases, a bit for each stage of the ring
  const int64 persistent_ctas = int64(Tile::TEAMS) * gridDim.x;
  for (int64 tile = blockIdx.x + int64(team) * gridDim.x; tile < tiles; tile += persistent_ctas) {
    for (int part = 0; part < Tile::STAGES_PER_TILE; ++part, ++used) {
      const int slot = used % Tile::STAGES;
      unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
      const unsigned char* const x_row = stage + (warp_m * 16 + row_in_eight) * Tile::PITCH * 16;
      const uint32 matrices = shared_address(Tile::RESIDENT ? layers : stage + Tile::LAYERS_AT) + first_matrix;
      full[team * Tile::STAGES + slot].wait(parities >> slot & 1);
      parities ^= 1u << slot;
#pragma unroll 1
      for (int u = 0; u < Tile::STAGE_UNITS; u += Tile::TURN_UNITS) {
        const int unit = part * Tile::STAGE_UNITS + u;
        if (Tile::UNITS % Tile::STAGE_UNITS != 0 && unit >= Tile::UNITS) break;
        const int layer = (Tile::RESIDENT ? unit : u) * Layout::L;
        multiply_by_warpgroup<Tile>(sums, x_row, u, matrices + layer * Tile::LAYER_BYTES, quarter, warp_j,
                                    row_in_eight % 2 * Tile::ODD_ROWS);
      }
      named_barrier_arrive(Tile::FIRST_EMPTY + slot, Tile::LOADERS + Tile::TEAM);
    }
    used += (Tile::TEAMS - 1) * Tile::STAGES_PER_TILE;
    const auto weights_of_column = [&](const Column& column) {
      const int index = TilePlace<P, Tile>(tile, arguments.batch).index;
      const unsigned char* const packed = packed_column<P, Tile>(arguments, index);
      return PackedWeights<P, Tile>{reinterpret_cast<const uint32*>(packed), column};
    };
    if constexpr (Tile::DIRECT) {
      write_tile_directly<P, Tile, After>(arguments, tile, sums, warp_m, weights_of_column);
    } else {
      write_tile<P, Tile, After>(arguments, tile, slice, sums, warp_m, 0, warp_j, 1 + warp_m, weights_of_column);
    }
    clear<Tile>(sums);
  }
}

template <typename P, typename Tile, typename After = NoEpilogue>
__device__ __forceinline__ void wgmma_tf32x3_kernel(const typename After::Arguments& arguments) {
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  unsigned char* const layers = shared + Tile::BARRIER_BYTES;
  unsigned char* const ring = shared + Tile::RING_AT;
  if (threadIdx.x == 0) {
    // All loaders arrive, and once more the one that asks for weights.
    for (int s = 0; s < Tile::FULLS; ++s) full[s].init(Tile::LOADERS + (Tile::RESIDENT ? 0 : 1));
    full[Tile::FULLS].init(1);
    fence_view_async_shared();  // and for the copy engine
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __syncthreads();
  if (threadIdx.x < Tile::LOADERS) {
    setmaxnreg_dec<Tile::LOADER_REGISTERS>();
    load_stages<P, Tile>(arguments, layers, ring, full);
  } else {
    setmaxnreg_inc<Tile::MULTIPLIER_REGISTERS>();
    multiply_and_store<P, Tile, After>(arguments, layers, ring, full);
  }
}

// Splits the weights, which lie in this order, and writes them to `arguments.y` column by column in the order of
// wgmma_tf32x3_kernel's layers.
template <typename P, typename Tile, typename Order>
__device__ __forceinline__ void pack_layers(const Arguments& arguments, const Order& order) {
  using Layout = typename Tile::Layout;
  constexpr int PIECE = Order::PIECE;  // elements that are loaded at a time
  constexpr int J = Layout::J, RUNS = Tile::COLUMN_LAYERS / Layout::RUN_L;  // of four threads' l each
  constexpr int64 TASKS = int64(Tile::COLUMNS) * RUNS * Tile::WARPS_J * Tile::NB;
  const float* const weight = static_cast<const float*>(arguments.weight);
  uint4* const packed = static_cast<uint4*>(arguments.y);
  const int64 threads = int64(gridDim.x) * blockDim.x;
  for (int64 task = blockIdx.x * int64(blockDim.x) + threadIdx.x; task < TASKS; task += threads) {
    const int n = task % Tile::NB, group_j = task / Tile::NB % Tile::WARPS_J;
    const int runs = task / (Tile::NB * Tile::WARPS_J) % RUNS;
    const int index = static_cast<int>(task / (Tile::NB * Tile::WARPS_J * RUNS));
    const Column column = column_at<P, Tile>(index);
    const int output = column.n0 + n - n % 8 + output_of_column<Layout>(n % 8);
    const float* const from = weight + order.at(column.i, output, 0, column.j0);
    float values[4][Layout::RUN * 4];
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
      for (int e = 0; e < Layout::RUN * 4; e += PIECE) {
        const int l = (runs * 4 + q) * Layout::RUN_L + e / J, j = group_j * J + e % J;
        const bool inside = l < P::C && (!Tile::PADDED || output < P::B);
        load_piece<PIECE>(values[q], e, from + order.at(0, 0, l, j), inside);
      }
#pragma unroll
    for (int l = 0; l < Layout::RUN_L; ++l)
#pragma unroll
      for (int j = 0; j < J; ++j) {
        uint32 words[2][4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float value = values[q][l * J + j];
          const Split<Tile::PRODUCTS> split(value);
          words[0][q] = split.big, words[1][q] = split.small;
          if (Tile::PRODUCTS > 1 && !(fabsf(__uint_as_float(split.small)) < __uint_as_float(0x7f800000u))) {
            // What does not split makes results NaN, and can be read from its first half.
            words[0][q] = __float_as_uint(value), words[1][q] = 0x7fffffffu;
          }
        }
        const int64 layer = int64(index) * Tile::COLUMN_LAYERS + runs * Layout::RUN_L + l;
        const int64 matrix = layer * Tile::JC + group_j * J + j;
#pragma unroll
        for (int half = 0; half < Tile::HALVES; ++half) {
          packed[(matrix * Tile::HALVES + half) * Tile::NB + n] =
              make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
        }
      }
  }
}

// The same of weights of any strides.
template <typename P, typename Tile>
__device__ __forceinline__ void mma_tf32x3_pack_kernel(const Arguments& arguments) {
  pack_in_order_of<P, float, Tile::Layout::J>(
      arguments, [&](const auto& order) { pack_layers<P, Tile>(arguments, order); });
}
