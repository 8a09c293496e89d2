// FP32 factors on Hopper's warpgroup tensor cores, batch last (sm_90a, aligned rows).
//
// The split products of batch_last_mma_tf32x3.cuh, at twice the rate. TF32's operands in shared memory must
// lie along the summation. The weights do once they are packed: split, with four l of an output in
// 16 bytes. x lies along the batch, so it is the operand that comes through registers: a tile is
// y^T = x^T w^T, whose rows are columns of x, split where they are loaded. A thread's neighbouring
// rows of the product are neighbours in the batch: it loads and stores 8 or 16 bytes at a time, and
// eight lanes write 64 or 128 bytes in one run.
//
// One warpgroup copies: rows of x are runs of memory, and so are packed weights, so that a lane asks
// for a whole row with one instruction. The others of the block multiply and store, side by
// side along the batch (GROUPS_M) and along the outputs (GROUPS_N). Weights stay in shared memory
// for a column (RESIDENT), or stream through the ring beside x. In that case all groups of blocks
// walk along the same columns, so that their weights come from the L2 cache.
#pragma once

#include "batch_last_mma_tf32x3.cuh"
#include "common/mbarrier.cuh"
#include "common/weight_order.cuh"
#include "common/wgmma_tf32.cuh"

template <typename P, int GROUPS_N_, int GROUPS_M_, int MT_, int NT_, int KL_, int STAGES_,
          bool RESIDENT_, int CHAIN_, int PENDING_, int PRODUCTS_>
struct BatchLastWgmmaTf32x3Tile {
  static constexpr int GROUPS_N = GROUPS_N_, GROUPS_M = GROUPS_M_;  // warpgroups
  static constexpr int MT = MT_, NT = NT_;  // tiles of 64 columns and of 8 outputs of a warpgroup
  static constexpr int KL = KL_;            // l in a stage
  static constexpr int STAGES = STAGES_;
  static constexpr bool RESIDENT = RESIDENT_;
  static constexpr int CHAIN = CHAIN_;      // steps of 8 l that the tensor cores add up by themselves
  static constexpr int PENDING = PENDING_;  // chains under way while the next is started: 0 or 1
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr int N = NT * 8, NB = GROUPS_N * N, BM = GROUPS_M * MT * 64;
  static constexpr int MULTIPLIERS = 128 * GROUPS_N * GROUPS_M, LOADERS = 128, LOADING_WARPS = 4;
  static constexpr int THREADS = LOADERS + MULTIPLIERS;
  // Registers of a thread: a block starts with the most that all threads can have equally. setmaxnreg.inc waits
  // forever if it requests more than other warps released.
  static constexpr int REGISTERS = 65536 / THREADS / 8 * 8, LOADER_REGISTERS = 24;
  static constexpr int SHARED_OUT =
      (REGISTERS * THREADS - LOADER_REGISTERS * LOADERS) / MULTIPLIERS / 8 * 8;
  static constexpr int MULTIPLIER_REGISTERS = SHARED_OUT < 240 ? SHARED_OUT : 240;
  static constexpr int VALUES = CHAIN * 4 * MT;  // of x that a thread loads for a chain
  // Whether a chain's values are loaded while the tensor cores are busy with the one before it.
  static constexpr bool AHEAD =
      MT * NT * 4 + (PENDING + 1) * (NT * 4 + CHAIN * 8) + VALUES + 20 <= MULTIPLIER_REGISTERS;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB, COLUMNS = P::A * P::D;
  static constexpr int STAGES_PER_TILE = (P::C + KL - 1) / KL, CHAINS = KL / 8 / CHAIN;
  static constexpr int HALVES = PRODUCTS == 1 ? 1 : 2;              // of a split
  static constexpr int HALF_BYTES = NB * 16, LAYER_BYTES = HALVES * HALF_BYTES;  // a layer: 4 l
  static constexpr int STAGE_LAYERS_BYTES = KL / 4 * LAYER_BYTES;
  static constexpr int COLUMN_LAYERS = STAGES_PER_TILE * KL / 4;    // with zeros after the last l
  static constexpr int COLUMN_BYTES = COLUMN_LAYERS * LAYER_BYTES;  // of one tile of outputs
  static constexpr int PITCH = BM + 8;  // floats: four rows of 32 bytes meet all banks
  static constexpr int LAYERS_AT = KL * PITCH * 4;
  static constexpr int STAGE_BYTES = LAYERS_AT + (RESIDENT ? 0 : STAGE_LAYERS_BYTES);
  static constexpr int BARRIER_BYTES = 128;
  static constexpr int RING_AT = BARRIER_BYTES + (RESIDENT ? COLUMN_BYTES : 0);
  static constexpr int SHARED_BYTES = RING_AT + STAGES * STAGE_BYTES;
  // Named barriers: of each stage of the ring, and of resident weights.
  static constexpr int FIRST_EMPTY = 1, WEIGHTS_EMPTY = FIRST_EMPTY + STAGES, AT_BARRIER = THREADS;
  static constexpr int WARP_ROWS = KL / LOADING_WARPS;  // of a stage, that a warp copies
  static_assert(KL % (8 * CHAIN) == 0 && WARP_ROWS <= 32, "a stage is a number of whole chains");
  static_assert(STAGES >= 2 && (STAGES + 1) * 8 <= BARRIER_BYTES && WEIGHTS_EMPTY < 16, "");
  static_assert(MT == 1 || MT == 2, "a thread's columns are 8 or 16 bytes");
  // Of such tiles ptxas 13.0 drops the products of all chains but the last (13.5 does not).
  static_assert(MT == 1 || PENDING == 1 || STAGES_PER_TILE > 1, "its products would not survive");
};

// The (column, tile) pairs of a block: first, first + step, ... before end; n0 is its first output.
struct Items {
  int n0;
  int64 tiles, first, step, end;
};

template <typename Tile> __device__ __forceinline__ Items items_of_block(const Arguments& arguments) {
  const Share share = share_of_block<Tile>(arguments);
  if (Tile::RESIDENT) return {share.n0, share.tiles, share.begin, 1, share.end};
  return {share.n0, share.tiles, blockIdx.x / Tile::OUTPUT_TILES, gridDim.x / Tile::OUTPUT_TILES,
          share.tiles * Tile::COLUMNS};
}

// Row l = 0 of a column's x, at the columns of the batch from m on.
template <typename P>
__device__ __forceinline__ const float* x_from(const Arguments& arguments, int column, int64 m) {
  return reinterpret_cast<const float*>(column_of_x<P, uint32>(arguments, column)) + m;
}

// Where the packed weights of a column and this block's outputs begin.
template <typename Tile>
__device__ __forceinline__ const unsigned char* packed_layers(const Arguments& arguments, int column,
                                                              int n0) {
  return static_cast<const unsigned char*>(arguments.weight) +
         (int64(column) * Tile::OUTPUT_TILES + n0 / Tile::NB) * Tile::COLUMN_BYTES;
}

// The work of the first warpgroup. `full` has a barrier for each stage of the ring, at which all of
// its warps arrive, and one for resident weights after them.
template <typename P, typename Tile>
__device__ __forceinline__ void copy_stages(const Arguments& arguments, unsigned char* weights,
                                            unsigned char* ring, Mbarrier* full) {
  const Items items = items_of_block<Tile>(arguments);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool asks = threadIdx.x == 0;  // for weights
  const int64 row_stride = arguments.x_feature_stride * P::D;
  ColumnWalk at{static_cast<int>(items.first / items.tiles), items.first % items.tiles};
  const auto wait_for_empty = [](int stage) {
    named_barrier_sync(Tile::FIRST_EMPTY + stage % Tile::STAGES, Tile::AT_BARRIER);
  };
  // A column's weights are loaded once the ring is full of its rows: earlier stages of the ring still need
  // the weights that they replace.
  int due_column = -1, due_in = 0, columns = 0;
  const auto copy_due_weights = [&] {
    if (columns++ > 0) named_barrier_sync(Tile::WEIGHTS_EMPTY, Tile::AT_BARRIER);
    if (asks) {
      Mbarrier& barrier = full[Tile::STAGES];
      barrier.arrive_and_expect_tx(Tile::COLUMN_BYTES);
      barrier.cp_async_bulk(weights, packed_layers<Tile>(arguments, due_column, items.n0), Tile::COLUMN_BYTES);
    }
    due_column = -1;
  };
  int loaded = 0;  // stages
  for (int64 item = items.first; item < items.end; item += items.step) {
    const float* const x = x_from<P>(arguments, at.column, at.tile * Tile::BM);
    const unsigned char* const layers = packed_layers<Tile>(arguments, at.column, items.n0);
    const int64 left = arguments.batch - at.tile * Tile::BM;
    const uint32 row_bytes = left < Tile::BM ? static_cast<uint32>(left) * 4 : Tile::BM * 4;
    if (Tile::RESIDENT && (item == items.first || at.tile == 0)) {
      if (due_column >= 0) copy_due_weights();
      due_column = at.column, due_in = columns == 0 ? 0 : Tile::STAGES;
    }
#pragma unroll 1
    for (int part = 0; part < Tile::STAGES_PER_TILE; ++part, ++loaded) {
      if (due_column >= 0 && due_in-- == 0) copy_due_weights();
      if (loaded >= Tile::STAGES) wait_for_empty(loaded);
      Mbarrier& barrier = full[loaded % Tile::STAGES];
      unsigned char* const stage = ring + loaded % Tile::STAGES * Tile::STAGE_BYTES;
      if (lane == 0) {
        const uint32 layers_bytes = asks && !Tile::RESIDENT ? Tile::STAGE_LAYERS_BYTES : 0;
        barrier.arrive_and_expect_tx(Tile::WARP_ROWS * row_bytes + layers_bytes);
      }
      __syncwarp();
      if (!Tile::RESIDENT && asks) {
        barrier.cp_async_bulk(stage + Tile::LAYERS_AT, layers + part * Tile::STAGE_LAYERS_BYTES,
                              Tile::STAGE_LAYERS_BYTES);
      }
      if (lane < Tile::WARP_ROWS) {
        const int row = lane * Tile::LOADING_WARPS + warp, l = part * Tile::KL + row;
        // Rows beyond the last are multiplied by zero weights, so the last row is loaded in their place.
        const float* const from = x + (P::C % Tile::KL == 0 || l < P::C ? l : P::C - 1) * row_stride;
        barrier.cp_async_bulk(stage + row * Tile::PITCH * 4, from, row_bytes);
      }
    }
    at.advance(static_cast<int>(items.step), items.tiles);
  }
  if (due_column >= 0) copy_due_weights();
  // Nobody may arrive at a barrier without end: the last stages are waited for too.
  const int first = loaded < Tile::STAGES ? 0 : loaded - Tile::STAGES;
  for (int stage = first; stage < loaded; ++stage) wait_for_empty(stage);
}

// sums += x^T w^T over a stage, for this warpgroup's columns and outputs. `x`: this lane's columns
// of its first row; `weights`: the descriptor of the stage's first layers.
template <typename Tile>
__device__ __forceinline__ void multiply_columns(float (&sums)[Tile::MT][Tile::NT * 4], const float* x,
                                                 uint64 weights) {
  constexpr int MT = Tile::MT, CHAIN = Tile::CHAIN, PENDING = Tile::PENDING, GROUPS = Tile::CHAINS * MT;
  float values[2][CHAIN][2][2 * MT];  // of two chains: of row q and q + 4 of a step
  const auto load = [&](int chain) {
#pragma unroll
    for (int i = 0; i < CHAIN; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const from = x + ((chain * CHAIN + i) * 8 + half * 4) * Tile::PITCH;
        float(&to)[2 * MT] = values[chain % 2][i][half];
        if constexpr (MT == 1) {
          const float2 loaded = *reinterpret_cast<const float2*>(from);
          to[0] = loaded.x, to[1] = loaded.y;
        } else {
          const float4 loaded = *reinterpret_cast<const float4*>(from);
          to[0] = loaded.x, to[1] = loaded.y, to[2] = loaded.z, to[3] = loaded.w;
        }
      }
  };
  float parts[PENDING + 1][Tile::NT * 4];
  const auto add = [&](int group) {
    float(&part)[Tile::NT * 4] = parts[group % (PENDING + 1)];
    wgmma_fence_operand(part);
#pragma unroll
    for (int e = 0; e < Tile::NT * 4; ++e) sums[group % MT][e] += part[e];
  };
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int chain = group / MT, mt = group % MT;
    if (mt == 0 && (!Tile::AHEAD || chain == 0)) load(chain);
    uint32 big[CHAIN][4], small[CHAIN][4];
#pragma unroll
    for (int i = 0; i < CHAIN; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Split<Tile::PRODUCTS> split(values[chain % 2][i][e / 2][mt * 2 + e % 2]);
        big[i][e] = split.big, small[i][e] = split.small;
      }
    float(&part)[Tile::NT * 4] = parts[group % (PENDING + 1)];
    const auto big_weights = [&](int i) {
      return weights + (chain * CHAIN + i) * 2 * Tile::LAYER_BYTES / 16;
    };
    wgmma_fence();
    if (Tile::PRODUCTS > 1) {  // the smallest first
#pragma unroll
      for (int i = 0; i < CHAIN; ++i) {
        wgmma_mma_async_tf32<Tile::N>(part, small[i], big_weights(i), i > 0);
        wgmma_mma_async_tf32<Tile::N>(part, big[i], big_weights(i) + Tile::HALF_BYTES / 16, 1);
      }
    }
#pragma unroll
    for (int i = 0; i < CHAIN; ++i) {
      wgmma_mma_async_tf32<Tile::N>(part, big[i], big_weights(i), Tile::PRODUCTS > 1 || i > 0);
    }
    wgmma_commit_group();
    if (Tile::AHEAD && mt == MT - 1 && chain + 1 < Tile::CHAINS) load(chain + 1);
    if (group < PENDING) continue;
    wgmma_wait_group<PENDING>();
    add(group - PENDING);
  }
  if (PENDING > 0) {
    wgmma_wait_group<0>();
    add(GROUPS - 1);
  }
}

// Writes this lane's results, `y` the first: outputs 2 q and 2 q + 1 of every eight, of `rows` that
// exist. Results that are not finite are computed once more by ordinary arithmetic from `x`, this
// lane's columns of row 0, and `layers`, where the packed weights of y's output begin.
template <typename P, typename Tile>
__device__ __forceinline__ void store_columns(const Arguments& arguments,
                                              const float (&sums)[Tile::MT][Tile::NT * 4], float* y, int rows,
                                              const float* x, const uint32* layers) {
  constexpr int MT = Tile::MT, EACH = 2 * MT;
  int64 y_stride = arguments.y_feature_stride * P::D;
  asm volatile("" : "+l"(y_stride));  // its multiples are not to stay in registers from tile to tile
  const int first = threadIdx.x % 4 * 2;
  float* to = y + first * y_stride;
  uint32 not_finite = 0;  // a bit for each output of this thread
#pragma unroll
  for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (P::B % Tile::NB != 0 && n * 8 + first + c >= rows) break;
      float results[EACH];
#pragma unroll
      for (int m = 0; m < EACH; ++m) results[m] = sums[m / 2][n * 4 + m % 2 * 2 + c];
      float nothing = 0.0f;  // times what is not finite is NaN
#pragma unroll
      for (int m = 0; m < EACH; ++m) nothing = fmaf(results[m], 0.0f, nothing);
      if (Tile::PRODUCTS > 1 && nothing != 0.0f) {
        not_finite |= 1u << (n * 2 + c);
      } else if constexpr (MT == 1) {
        *reinterpret_cast<float2*>(to) = make_float2(results[0], results[1]);
      } else {
        *reinterpret_cast<float4*>(to) =
            make_float4(results[0], results[1], results[2], results[3]);
      }
      to += c == 0 ? y_stride : 7 * y_stride;
    }
  if (Tile::PRODUCTS == 1) return;
#pragma unroll 1
  for (int at = 0; at < 2 * Tile::NT; ++at) {
    if ((not_finite >> at & 1) == 0) continue;
    const int k = at / 2 * 8 + first + at % 2;
#pragma unroll 1
    for (int m = 0; m < EACH; ++m) {
      float sum = 0.0f;
      for (int l = 0; l < P::C; ++l) {
        const uint32* const big = layers + l / 4 * (Tile::LAYER_BYTES / 4) + k * 4 + l % 4;
        const float w = __uint_as_float(big[0]);
        const float rest = __uint_as_float(big[(Tile::HALVES - 1) * Tile::HALF_BYTES / 4]);
        sum = fmaf(rest == rest ? w + rest : w, x[l * P::D * arguments.x_feature_stride + m], sum);
      }
      y[k * y_stride + m] = sum;
    }
  }
}

template <typename P, typename Tile>
__device__ __forceinline__ void multiply_tiles(const Arguments& arguments, unsigned char* weights,
                                               unsigned char* ring, Mbarrier* full) {
  constexpr int MT = Tile::MT;
  const Items items = items_of_block<Tile>(arguments);
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - Tile::LOADERS) / 32;
  const int group_n = warp / 4 % Tile::GROUPS_N, group_m = warp / 4 / Tile::GROUPS_N;
  const int first_column = (group_m * 4 + warp % 4) * 16 * MT + lane / 4 * 2 * MT;  // of this lane
  const int k0 = items.n0 + group_n * Tile::N;
  ColumnWalk at{static_cast<int>(items.first / items.tiles), items.first % items.tiles};

  float sums[MT][Tile::NT * 4] = {};
  int slot = 0, weights_parity = 0;
  uint32 parities = 0;  // of the stages' next phases, a bit for each
  for (int64 item = items.first; item < items.end; item += items.step) {
    if (Tile::RESIDENT && (item == items.first || at.tile == 0)) {
      full[Tile::STAGES].wait(weights_parity);
      weights_parity ^= 1;
    }
    const int64 m0 = at.tile * Tile::BM, left = arguments.batch - m0;
    // Columns beyond the last are not stored: the last column is multiplied in their place.
    const int existing = left < Tile::BM ? static_cast<int>(left) : Tile::BM;
    const int column = first_column < existing ? first_column : existing - 2 * MT;
#pragma unroll 1
    for (int part = 0; part < Tile::STAGES_PER_TILE; ++part) {
      const unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
      const unsigned char* const layers =
          Tile::RESIDENT ? weights + part * Tile::STAGE_LAYERS_BYTES : stage + Tile::LAYERS_AT;
      full[slot].wait(parities >> slot & 1);
      parities ^= 1u << slot;
      multiply_columns<Tile>(
          sums, reinterpret_cast<const float*>(stage) + lane % 4 * Tile::PITCH + column,
          make_smem_desc(shared_address(layers) + group_n * Tile::N * 16, Tile::LAYER_BYTES, 128));
      named_barrier_arrive(Tile::FIRST_EMPTY + slot, Tile::AT_BARRIER);
      if (++slot == Tile::STAGES) slot = 0;
    }
    if (Tile::RESIDENT && at.tile + 1 == items.tiles && item + 1 < items.end) {
      named_barrier_arrive(Tile::WEIGHTS_EMPTY, Tile::AT_BARRIER);
    }
    if (first_column < existing) {
      const int64 m = m0 + first_column;
      const unsigned char* const packed = packed_layers<Tile>(arguments, at.column, items.n0);
      store_columns<P, Tile>(arguments, sums,
                             reinterpret_cast<float*>(column_of_y<P, uint32>(arguments, at.column, k0)) + m,
                             P::B - k0, x_from<P>(arguments, at.column, m),
                             reinterpret_cast<const uint32*>(packed) + group_n * Tile::N * 4);
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int e = 0; e < Tile::NT * 4; ++e) sums[mt][e] = 0.0f;
    at.advance(static_cast<int>(items.step), items.tiles);
  }
}

template <typename P, typename Tile>
__device__ __forceinline__ void batch_last_wgmma_tf32x3_kernel(const Arguments& arguments) {
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  unsigned char* const weights = shared + Tile::BARRIER_BYTES;
  unsigned char* const ring = shared + Tile::RING_AT;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) full[s].init(Tile::LOADING_WARPS);
    full[Tile::STAGES].init(1);
    fence_view_async_shared();  // and for the copy engine
  }
  __syncthreads();
  if (threadIdx.x < Tile::LOADERS) {
    setmaxnreg_dec<Tile::LOADER_REGISTERS>();
    copy_stages<P, Tile>(arguments, weights, ring, full);
  } else {
    setmaxnreg_inc<Tile::MULTIPLIER_REGISTERS>();
    multiply_tiles<P, Tile>(arguments, weights, ring, full);
  }
}

// Splits the weights [a, b, c, d], of any strides, and writes them to `arguments.y` in the order in which
// batch_last_wgmma_tf32x3_kernel reads them:
// [column (i, j)][tile of NB outputs][layer of four l][half][output][l].
template <typename P, typename Tile>
__device__ __forceinline__ void batch_last_mma_tf32x3_pack_kernel(const Arguments& arguments) {
  constexpr int64 TASKS = int64(Tile::COLUMNS) * Tile::OUTPUT_TILES * Tile::COLUMN_LAYERS * Tile::NB;
  const float* const weight = static_cast<const float*>(arguments.weight);
  const Strided<1> order(arguments);
  uint4* const packed = static_cast<uint4*>(arguments.y);
  const int64 threads = int64(gridDim.x) * blockDim.x;
  for (int64 task = blockIdx.x * int64(blockDim.x) + threadIdx.x; task < TASKS; task += threads) {
    const int n = static_cast<int>(task % Tile::NB);
    const int64 layer = task / Tile::NB;  // of all columns
    const int l0 = static_cast<int>(layer % Tile::COLUMN_LAYERS) * 4;
    const int64 tile = layer / Tile::COLUMN_LAYERS;
    const int k = static_cast<int>(tile % Tile::OUTPUT_TILES) * Tile::NB + n;
    const int64 column = tile / Tile::OUTPUT_TILES;
    const float* const from = weight + order.at(static_cast<int>(column / P::D), k, 0, static_cast<int>(column % P::D));
    uint32 words[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float value = k < P::B && l0 + q < P::C ? from[order.at(0, 0, l0 + q, 0)] : 0.0f;
      const Split<Tile::PRODUCTS> split(value);
      words[0][q] = split.big, words[1][q] = split.small;
      if (Tile::PRODUCTS > 1 && !Math32::is_finite(split.small)) {
        // A value that cannot be split makes results NaN; its first half holds it unchanged.
        words[0][q] = __float_as_uint(value), words[1][q] = 0x7fffffffu;
      }
    }
#pragma unroll
    for (int half = 0; half < Tile::HALVES; ++half) {
      packed[(layer * Tile::HALVES + half) * Tile::NB + n] =
          make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
    }
  }
}
