// FP32 factors on Hopper's warpgroup tensor cores, with j in the vector lanes (batch first, sm_90a).
//
// The products of lanes32.cuh, twice as fast: x is split in registers as there, and the weights lie
// in shared memory already split, so that the tensor cores read them there themselves. For each j
// and half of the split, four l of all NB outputs are one matrix, 16 bytes an output.
//
// Resident weights are split once a block. Streamed ones arrive in rows with x, and are split one
// stage ahead of the products: by one half of the warpgroups before their own products and by the
// other half after theirs, so that the tensor cores always have somebody's products to work on.
#pragma once

#include "lanes32.cuh"
#include "wgmma_tf32.cuh"

template <typename P, int WARPGROUPS_J_, int WARPGROUPS_M_, int NT_, int KL_, int STAGES_, bool RESIDENT_,
          int PENDING_, int PRODUCTS_>
struct Lanes32WgmmaTile
    : Lanes32Tile<P, WARPGROUPS_J_, 4 * WARPGROUPS_M_, 1, 1, NT_, KL_, STAGES_, 1, RESIDENT_, PRODUCTS_> {
  using Base = Lanes32Tile<P, WARPGROUPS_J_, 4 * WARPGROUPS_M_, 1, 1, NT_, KL_, STAGES_, 1, RESIDENT_, PRODUCTS_>;
  using Fold = typename Base::Fold;
  static constexpr int PENDING = PENDING_;  // products of a j under way while the next are started: 0 or 1
  static constexpr int HALVES = PRODUCTS_ == 1 ? 1 : 2;  // of a split
  static constexpr int WEIGHT_PITCH = Base::STAGE_CHUNKS | 1;  // outputs in neighbouring banks
  static constexpr int STAGE_BYTES =
      Base::BM * Base::PITCH * 16 + (RESIDENT_ ? 0 : Base::NB * WEIGHT_PITCH * 16);
  static constexpr int MATRIX_BYTES = Base::NB * 16;
  static constexpr int LAYER_BYTES = Base::JC * HALVES * MATRIX_BYTES;  // 4 l
  static constexpr int STAGE_LAYERS = KL_ / 4, STAGE_UNITS = KL_ / Fold::UNIT;
  static constexpr int LAYERS = RESIDENT_ ? Base::UNITS * Fold::L : 2 * STAGE_LAYERS;
  static constexpr int SHARED_BYTES =
      LAYERS * LAYER_BYTES + STAGES_ * STAGE_BYTES + Base::WARPS_M * Base::SLICE_BYTES;
  static_assert(STAGES_ >= (RESIDENT_ ? 2 : 3), "");
};

// Splits the weights of `units` units, and writes them as the tensor cores read them. A chunk is
// asked for by output and by number, as in a stage of rows, for warpgroups of j number `group_j`.
template <typename Tile, typename ChunkAt>
__device__ __forceinline__ void write_matrices(unsigned char* layers, int units, ChunkAt chunk_at) {
  using Fold = typename Tile::Fold;
  constexpr int J = Fold::J;
  const int tasks = units * Fold::RUNS * Tile::WARPS_J * Tile::NB;
#pragma unroll 1
  for (int task = threadIdx.x; task < tasks; task += Tile::THREADS) {
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
    float (&sums)[1][Tile::NT][Tile::Fold::J][4], const unsigned char* x_row, int x_unit, uint32 layers,
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

template <typename P, typename Tile>
__device__ __forceinline__ void lanes32_wgmma_kernel(const Arguments& arguments) {
  using Fold = typename Tile::Fold;
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const ring = shared + Tile::LAYERS * Tile::LAYER_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
  const int warp_j = warpgroup % Tile::WARPS_J;
  const int warp_m = warpgroup / Tile::WARPS_J * 4 + warp % 4;
  const int quarter = lane % 4, row_in_eight = lane / 4;
  unsigned char* const slice = ring + Tile::STAGES * Tile::STAGE_BYTES + warp_m * Tile::SLICE_BYTES;
  const uint32 layers =
      shared_address(shared) + warp_j * Fold::J * Tile::HALVES * Tile::MATRIX_BYTES;

  Loader<P, Tile> loader(arguments, ring);
#pragma unroll
  for (int s = 0; s < Tile::STAGES - 1; ++s) loader.next();
  // Splits the weights in the ring's slot `from` into buffer `to`.
  const auto split_stage = [&](int from, int to) {
    const unsigned char* const rows = ring + from * Tile::STAGE_BYTES + Tile::BM * Tile::PITCH * 16;
    write_matrices<Tile>(shared + to * Tile::STAGE_LAYERS * Tile::LAYER_BYTES, Tile::STAGE_UNITS,
                         [&](int n, int chunk) {
                           return *reinterpret_cast<const float4*>(
                               rows + (n * Tile::WEIGHT_PITCH + chunk) * 16);
                         });
  };
  if constexpr (Tile::RESIDENT) {
    const WeightRows<P, Tile> rows(arguments, loader.column);
    write_matrices<Tile>(shared, Tile::UNITS, [&](int n, int chunk) {
      const int offset = Fold::WIDE ? chunk / Tile::CHUNKS_OF_L * P::D + chunk % Tile::CHUNKS_OF_L * 4
                                    : chunk * 4;
      return offset < P::C * P::D ? *reinterpret_cast<const float4*>(rows(n) + offset)
                                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    });
  } else {
    wait_for_copies<Tile::STAGES - 2>();
    __syncthreads();
    split_stage(0, 0);
  }

  float sums[1][Tile::NT][Fold::J][4] = {};
  int64 tile = blockIdx.x;
  int part = 0, slot = 0, buffer = 0;
  while (tile < loader.tiles) {
    // The stage, split, is there for all, and so is the next one in rows; the one before is free.
    wait_for_copies<Tile::STAGES - (Tile::RESIDENT ? 2 : 3)>();
    __syncthreads();
    loader.next();
    const unsigned char* const x_row =
        ring + slot * Tile::STAGE_BYTES + (warp_m * 16 + row_in_eight) * Tile::PITCH * 16;
    if (++slot == Tile::STAGES) slot = 0;

    if (!Tile::RESIDENT && warpgroup % 2 == 0) split_stage(slot, buffer ^ 1);
#pragma unroll 1
    for (int u = 0; u < Tile::STAGE_UNITS; ++u) {
      const int unit = part * Tile::STAGE_UNITS + u;
      if (Tile::UNITS % Tile::STAGE_UNITS != 0 && unit >= Tile::UNITS) break;
      const int layer = Tile::RESIDENT ? unit * Fold::L : buffer * Tile::STAGE_LAYERS + u * Fold::L;
      multiply_unit_by_warpgroup<Tile>(sums, x_row, u, layers + layer * Tile::LAYER_BYTES, quarter, warp_j);
    }
    if (!Tile::RESIDENT && warpgroup % 2 != 0) split_stage(slot, buffer ^ 1);
    buffer ^= 1;
    if (++part < Tile::STAGES_PER_TILE) continue;

    write_tile<P, Tile>(arguments, tile, slice, sums, warp_m, 0, warp_j, 1 + warp_m);
    part = 0, tile += gridDim.x;
    clear<Tile>(sums);
  }
}
