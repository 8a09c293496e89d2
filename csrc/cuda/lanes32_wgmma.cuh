// FP32 factors on Hopper's warpgroup tensor cores, with j in the vector lanes (batch first, sm_90a).
//
// The products of lanes32.cuh, twice as fast: x is split in registers as there, and the weights lie
// in shared memory already split, so that the tensor cores read them there themselves. For each j
// and half of the split, four l of all NB outputs are one matrix, 16 bytes an output.
//
// The first warpgroup of a block copies x and the weights to shared memory and splits the weights;
// the others do nothing but multiply and store, two or three of them, so that the tensor cores always
// have somebody's products to work on. They hand stages to each other through pairs of barriers.
#pragma once

#include "lanes32.cuh"
#include "pipeline.cuh"
#include "wgmma_tf32.cuh"

template <typename P, int WARPGROUPS_J_, int WARPGROUPS_M_, int NT_, int KL_, int STAGES_, bool RESIDENT_,
          int PENDING_, int PRODUCTS_>
struct Lanes32WgmmaTile
    : Lanes32Tile<P, WARPGROUPS_J_, 4 * WARPGROUPS_M_, 1, 1, NT_, KL_, STAGES_, 1, RESIDENT_, PRODUCTS_> {
  using Base = Lanes32Tile<P, WARPGROUPS_J_, 4 * WARPGROUPS_M_, 1, 1, NT_, KL_, STAGES_, 1, RESIDENT_, PRODUCTS_>;
  using Fold = typename Base::Fold;
  static constexpr int MULTIPLIERS = 128 * WARPGROUPS_J_ * WARPGROUPS_M_, LOADERS = 128;
  static constexpr int THREADS = LOADERS + MULTIPLIERS;
  // Registers a thread, added up over the warpgroups: a block starts with the most that all threads
  // can have alike. To take more than were given up would wait for ever.
  static constexpr int REGISTERS = MULTIPLIERS == 384 ? 4 * 128 : 3 * 168;
  static constexpr int LOADER_REGISTERS =
      Fold::RUN == 3 ? (MULTIPLIERS == 384 ? 80 : 88) : MULTIPLIERS == 384 ? 56 : 40;
  static constexpr int MULTIPLIER_REGISTERS = (REGISTERS - LOADER_REGISTERS) / (MULTIPLIERS / 128);
  static_assert(MULTIPLIER_REGISTERS % 8 == 0, "");
  static_assert(LOADER_REGISTERS + MULTIPLIERS / 128 * MULTIPLIER_REGISTERS <= REGISTERS, "");
  static constexpr int PENDING = PENDING_;  // products of a j under way while the next are started: 0 or 1
  static constexpr int HALVES = PRODUCTS_ == 1 ? 1 : 2;  // of a split
  static constexpr int WEIGHT_PITCH = Base::STAGE_CHUNKS | 1;  // outputs in neighbouring banks
  static constexpr int MATRIX_BYTES = Base::NB * 16;
  static constexpr int LAYER_BYTES = Base::JC * HALVES * MATRIX_BYTES;  // 4 l
  static constexpr int STAGE_UNITS = KL_ / Fold::UNIT;
  static constexpr int LAYERS = RESIDENT_ ? Base::UNITS * Fold::L : KL_ / 4;  // in a stage if streamed
  // A stage: rows of x; if streamed, rows of the weight and what they are split into.
  static constexpr int RAW_AT = Base::BM * Base::PITCH * 16;
  static constexpr int LAYERS_AT = RAW_AT + Base::NB * WEIGHT_PITCH * 16;
  static constexpr int STAGE_BYTES = RESIDENT_ ? RAW_AT : LAYERS_AT + LAYERS * LAYER_BYTES;
  static constexpr int BARRIER_BYTES = 128;
  static constexpr int RING_AT = BARRIER_BYTES + (RESIDENT_ ? LAYERS * LAYER_BYTES : 0);
  static constexpr int SHARED_BYTES = RING_AT + STAGES_ * STAGE_BYTES + Base::WARPS_M * Base::SLICE_BYTES;
  static constexpr int AHEAD = STAGES_ - 2;  // stages whose copies are under way
  static_assert(STAGES_ >= 3 && STAGES_ * 16 <= BARRIER_BYTES, "");
  static_assert(MULTIPLIERS == 256 || MULTIPLIERS == 384, "");
};

// Splits the weights of UNITS units, and writes them as the tensor cores read them. A chunk is
// asked for by output and by number, as in a stage of rows, for warpgroups of j number `group_j`.
template <typename Tile, int UNITS, typename ChunkAt>
__device__ __forceinline__ void write_matrices(unsigned char* layers, ChunkAt chunk_at) {
  using Fold = typename Tile::Fold;
  constexpr int J = Fold::J;
  constexpr int TASKS = UNITS * Fold::RUNS * Tile::WARPS_J * Tile::NB;
  constexpr int ROUNDS = (TASKS + Tile::LOADERS - 1) / Tile::LOADERS;
#pragma unroll(ROUNDS <= 4 ? ROUNDS : 1)
  for (int round = 0; round < ROUNDS; ++round) {
    const int task = threadIdx.x + round * Tile::LOADERS;
    if (TASKS % Tile::LOADERS != 0 && task >= TASKS) break;
    const int n = task % Tile::NB, group_j = task / Tile::NB % Tile::WARPS_J;
    const int runs = task / (Tile::NB * Tile::WARPS_J);  // of four threads' l each
    float values[4][Fold::RUN * 4];
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
      for (int c = 0; c < Fold::RUN; ++c) {
        const int at = runs * 4 + q;
        const float4 loaded =
            chunk_at(n, Fold::WIDE ? at * Tile::CHUNKS_OF_L + group_j : at * Fold::RUN + c);
        values[q][c * 4] = loaded.x, values[q][c * 4 + 1] = loaded.y;
        values[q][c * 4 + 2] = loaded.z, values[q][c * 4 + 3] = loaded.w;
      }
#pragma unroll
    for (int l = 0; l < Fold::RUN_L; ++l)
#pragma unroll
      for (int j = 0; j < J; ++j) {
        uint32 words[2][4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const Split<Tile::PRODUCTS> split(values[q][l * J + j]);
          words[0][q] = split.big, words[1][q] = split.small;
        }
#pragma unroll
        for (int half = 0; half < Tile::HALVES; ++half) {
          const int matrix = ((runs * Fold::RUN_L + l) * Tile::JC + group_j * J + j) * Tile::HALVES + half;
          *reinterpret_cast<uint4*>(layers + matrix * Tile::MATRIX_BYTES + n * 16) =
              make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
        }
      }
  }
  fence_for_tensor_cores();
}

// sums += x w over a unit's l, for 64 rows and all NB outputs. `layers`: address of its weights.
template <typename Tile>
__device__ __forceinline__ void multiply_unit_by_warpgroup(
    Sums<Tile>& sums, const unsigned char* x_row, int x_unit, uint32 layers,
    int quarter, int warp_j) {
  using Fold = typename Tile::Fold;
  constexpr int J = Fold::J, GROUPS = J * Fold::STEPS;
  float values[2][Fold::CHUNKS * 4];
  load_unit<Tile>(values[0], x_row, x_unit, quarter, warp_j);
  load_unit<Tile>(values[1], x_row + 8 * Tile::PITCH * 16, x_unit, quarter, warp_j);
  float parts[Tile::PENDING + 1][Tile::NT * 4];
  const auto add = [&](int group) {
    float(&part)[Tile::NT * 4] = parts[group % (Tile::PENDING + 1)];
    appear(part);
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[0][n][group / Fold::STEPS][e] += part[n * 4 + e];
  };
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int j = group / Fold::STEPS, s = group % Fold::STEPS;
    uint32 big[4], small[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Split<Tile::PRODUCTS> split(values[e % 2][(2 * s + e / 2) * J + j]);
      big[e] = split.big, small[e] = split.small;
    }
    const uint32 matrix = layers + 2 * s * Tile::LAYER_BYTES + j * Tile::HALVES * Tile::MATRIX_BYTES;
    const uint64 w_big = describe_plain(matrix, Tile::LAYER_BYTES, 128);
    float(&part)[Tile::NT * 4] = parts[group % (Tile::PENDING + 1)];
    begin_products();
    if (Tile::PRODUCTS > 1) {  // the smallest first
      const uint64 w_small = describe_plain(matrix + Tile::MATRIX_BYTES, Tile::LAYER_BYTES, 128);
      multiply_warpgroup_tf32<Tile::NB>(part, small, w_big, 0);
      multiply_warpgroup_tf32<Tile::NB>(part, big, w_small, 1);
    }
    multiply_warpgroup_tf32<Tile::NB>(part, big, w_big, Tile::PRODUCTS > 1);
    commit_products();
    if (group < Tile::PENDING) continue;
    wait_for_products<Tile::PENDING>();
    add(group - Tile::PENDING);
  }
  if (Tile::PENDING > 0) {
    wait_for_products<0>();
    add(GROUPS - 1);
  }
}

// The job of the first warpgroup. `full` and `empty` have a barrier for each stage of the ring.
template <typename P, typename Tile>
__device__ __forceinline__ void load_and_split(const Arguments& arguments, unsigned char* layers,
                                               unsigned char* ring, PhaseBarrier* full,
                                               PhaseBarrier* empty) {
  using Fold = typename Tile::Fold;
  Loader<P, Tile> loader(arguments, ring);
  const float* const weights = weights_of<P>(arguments, loader.column);
  int loaded = 0, published = 0;  // stages
  const auto publish = [&] {
    const int slot = published % Tile::STAGES;
    if constexpr (!Tile::RESIDENT) {
      wait_at(15, Tile::LOADERS);  // the rows were copied by all loaders
      unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
      write_matrices<Tile, Tile::STAGE_UNITS>(stage + Tile::LAYERS_AT, [&](int n, int chunk) {
        return *reinterpret_cast<const float4*>(stage + Tile::RAW_AT + (n * Tile::WEIGHT_PITCH + chunk) * 16);
      });
    } else if (published == 0) {
      write_matrices<Tile, Tile::UNITS>(layers, [&](int n, int chunk) {
        const int offset = Fold::WIDE ? chunk / Tile::CHUNKS_OF_L * P::D + chunk % Tile::CHUNKS_OF_L * 4
                                      : chunk * 4;
        const int output = n - n % 8 + output_of_column<Fold>(n % 8);
        return offset < P::C * P::D ? *reinterpret_cast<const float4*>(weights + output * (P::C * P::D) + offset)
                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      });
    }
    full[slot].arrive();
    ++published;
  };
  for (; loader.tile < loader.tiles; ++loaded) {
    empty[loaded % Tile::STAGES].wait(loaded / Tile::STAGES % 2 ^ 1);
    loader.next();
    if (loaded < Tile::AHEAD) continue;
    wait_for_copies<Tile::AHEAD>();
    publish();
  }
  wait_for_copies<0>();
  while (published < loaded) publish();
}

template <typename P, typename Tile>
__device__ __forceinline__ void multiply_and_store(const Arguments& arguments, unsigned char* layers,
                                                   unsigned char* ring, PhaseBarrier* full,
                                                   PhaseBarrier* empty) {
  using Fold = typename Tile::Fold;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - Tile::LOADERS / 32, warpgroup = warp / 4;
  const int warp_j = warpgroup % Tile::WARPS_J;
  const int warp_m = warpgroup / Tile::WARPS_J * 4 + warp % 4;
  const int quarter = lane % 4, row_in_eight = lane / 4;
  unsigned char* const slice = ring + Tile::STAGES * Tile::STAGE_BYTES + warp_m * Tile::SLICE_BYTES;
  const int first_matrix = warp_j * Fold::J * Tile::HALVES * Tile::MATRIX_BYTES;
  const int64 tiles = (arguments.batch + Tile::BM - 1) / Tile::BM * Tile::COLUMNS;

  Sums<Tile> sums = {};
  int slot = 0, parity = 0;
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int part = 0; part < Tile::STAGES_PER_TILE; ++part) {
      unsigned char* const stage = ring + slot * Tile::STAGE_BYTES;
      const unsigned char* const x_row = stage + (warp_m * 16 + row_in_eight) * Tile::PITCH * 16;
      const uint32 matrices = shared_address(Tile::RESIDENT ? layers : stage + Tile::LAYERS_AT) + first_matrix;
      full[slot].wait(parity);
#pragma unroll 1
      for (int u = 0; u < Tile::STAGE_UNITS; ++u) {
        const int unit = part * Tile::STAGE_UNITS + u;
        if (Tile::UNITS % Tile::STAGE_UNITS != 0 && unit >= Tile::UNITS) break;
        const int layer = (Tile::RESIDENT ? unit : u) * Fold::L;
        multiply_unit_by_warpgroup<Tile>(sums, x_row, u, matrices + layer * Tile::LAYER_BYTES, quarter,
                                         warp_j);
      }
      __syncwarp();
      if (lane == 0) empty[slot].arrive();
      if (++slot == Tile::STAGES) slot = 0, parity ^= 1;
    }
    write_tile<P, Tile>(arguments, tile, slice, sums, warp_m, 0, warp_j, 1 + warp_m);
    clear<Tile>(sums);
  }
}

template <typename P, typename Tile>
__device__ __forceinline__ void lanes32_wgmma_kernel(const Arguments& arguments) {
  extern __shared__ __align__(128) unsigned char shared[];
  PhaseBarrier* const full = reinterpret_cast<PhaseBarrier*>(shared);
  PhaseBarrier* const empty = full + Tile::STAGES;
  unsigned char* const layers = shared + Tile::BARRIER_BYTES;
  unsigned char* const ring = shared + Tile::RING_AT;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) {
      full[s].init(Tile::LOADERS);
      empty[s].init(Tile::MULTIPLIERS / 32);
    }
  }
  __syncthreads();
  if (threadIdx.x < Tile::LOADERS) {
    give_up_registers<Tile::LOADER_REGISTERS>();
    load_and_split<P, Tile>(arguments, layers, ring, full, empty);
  } else {
    take_registers<Tile::MULTIPLIER_REGISTERS>();
    multiply_and_store<P, Tile>(arguments, layers, ring, full, empty);
  }
}
