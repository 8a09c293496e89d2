// 16-bit factors on Hopper's warpgroup tensor cores for some hundred rows (batch first, sm_90a).
//
// The products of wgmma16_streamed.cuh, by the same packed weights. So few rows have fewer tiles than there are
// multiprocessors, unless tiles are small, and small tiles read x and the weights again and again. So the blocks of
// a cluster share the sum over l of one tile: each has a part of the stages. Then each adds up the sums of a part of
// the outputs, through the shared memory of the others, in the order of the blocks, and stores them.
#pragma once

#include "cluster_sums.cuh"
#include "wgmma16_streamed.cuh"

// BLOCKS: that fit on a multiprocessor: with 2 the next kernel's blocks may wait beside those of this one.
template <typename P, int GROUPS_J_, int GROUPS_M_, int NT_, int KL_, int STAGES_, int BLOCKS_, int CLUSTER_>
struct Wgmma16SplitTile : Wgmma16StreamedTile<P, GROUPS_J_, 1, GROUPS_M_, NT_, KL_, STAGES_, BLOCKS_> {
  using Whole = Wgmma16StreamedTile<P, GROUPS_J_, 1, GROUPS_M_, NT_, KL_, STAGES_, BLOCKS_>;
  static constexpr int CLUSTER = CLUSTER_;
  // Of a block.
  static constexpr int UNITS = Whole::UNITS / CLUSTER, STAGES_PER_TILE = Whole::STAGES_PER_TILE / CLUSTER;
  static constexpr int64 SHARE_BYTES = Whole::COLUMN_BYTES / CLUSTER;
  // What a block stores: all rows of these outputs.
  using Stored = Wgmma16Tile<P, GROUPS_J_, 1, GROUPS_M_, NT_ / CLUSTER, KL_, STAGES_, BLOCKS_, 1>;
  static constexpr int SUMS = Whole::Fold::J * Whole::N / 2;  // of a thread
  static_assert(CLUSTER == 1 || P::C % (KL_ * CLUSTER) == 0, "blocks of a cluster have as many stages each");
  static_assert(NT_ % CLUSTER == 0, "and store as many outputs each");
  static_assert(CLUSTER == 1 || SUMS * Whole::MULTIPLIERS * 4 <= STAGES_ * Whole::STAGE_BYTES, "sums take the ring's place");
};

// The one tile of a cluster. Those of the same weights follow each other.
template <typename P, typename Tile> struct SplitWalk {
  static constexpr int group = 0;
  int64 tile;
  int column;
  bool here = true;
  __device__ __forceinline__ explicit SplitWalk(const Arguments& arguments) {
    const int64 row_tiles = (arguments.batch + Tile::BM - 1) / Tile::BM, at = blockIdx.x / Tile::CLUSTER;
    tile = at % row_tiles, column = static_cast<int>(at / row_tiles);
  }
  __device__ __forceinline__ bool inside() const { return here; }
  __device__ __forceinline__ void next() { here = false; }
  __device__ __forceinline__ int i() const { return column / Tile::COLUMNS_OF_I; }
  __device__ __forceinline__ int j0() const { return column % Tile::COLUMNS_OF_I / Tile::OUTPUT_TILES * Tile::JC; }
  __device__ __forceinline__ int n0() const { return column % Tile::OUTPUT_TILES * Tile::NB; }
};

// Where a thread's four sums `four` of class j lie, for all blocks of the cluster to read.
template <typename Tile> __device__ __forceinline__ float* place_of_sums(unsigned char* shared, int j, int four, int thread) {
  return reinterpret_cast<float*>(shared) + ((j * Tile::NT + four) * Tile::MULTIPLIERS + thread) * 4;
}

// Keeps a block's sums for the others.
template <typename Tile>
__device__ __forceinline__ void keep_sums(unsigned char* shared, const GroupSums<Tile>& sums, int thread) {
#pragma unroll
  for (int j = 0; j < Tile::Fold::J; ++j)
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n) {
      *reinterpret_cast<float4*>(place_of_sums<Tile>(shared, j, n, thread)) =
          make_float4(sums[j][n * 4], sums[j][n * 4 + 1], sums[j][n * 4 + 2], sums[j][n * 4 + 3]);
    }
}

// Adds what all blocks have of the outputs that block `rank` stores.
template <typename Tile>
__device__ __forceinline__ void add_sums(GroupSums<typename Tile::Stored>& sums, unsigned char* shared, int rank, int thread) {
  constexpr int COUNT = Tile::Stored::NT;
#pragma unroll
  for (int j = 0; j < Tile::Fold::J; ++j)
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int other = 0; other < Tile::CLUSTER; ++other) {
        add(sum, load_from_block(place_of_sums<Tile>(shared, j, rank * COUNT + n, thread), other));
      }
      sums[j][n * 4] = sum.x, sums[j][n * 4 + 1] = sum.y, sums[j][n * 4 + 2] = sum.z, sums[j][n * 4 + 3] = sum.w;
    }
}

template <typename T, typename P, typename Tile>
__device__ __forceinline__ void wgmma16_split_kernel(const Arguments& all) {
  using Walk = SplitWalk<P, Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  Mbarrier* const empty = full + Tile::STAGES;
  unsigned char* const ring = shared + Tile::RING_AT;
  const int rank = Tile::CLUSTER == 1 ? 0 : static_cast<int>(blockIdx.x % Tile::CLUSTER);
  Arguments arguments = all;
  arguments.x = static_cast<const uint16*>(all.x) + rank * Tile::STAGES_PER_TILE * Tile::KL * P::D;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) {
      full[s].init(Tile::LOADERS + 1);  // once more the one that asks for weights
      empty[s].init(Tile::MULTIPLIERS);
    }
    fence_for_tensor_cores();  // and for the copy engine
  }
  prefetch_share<Tile::THREADS>(all.weight, Tile::COLUMNS * Tile::COLUMN_BYTES, blockIdx.x, gridDim.x);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  __syncthreads();
  if (threadIdx.x < Tile::LOADERS) {
    setmaxnreg_dec<Tile::LOADER_REGISTERS>();
    load_rows<P, Tile, Walk>(arguments, ring, full, empty, [&](const Walk& walk, int part, int slot) {
      if (threadIdx.x != 0) return;
      full[slot].arrive_and_expect(Tile::STAGE_WEIGHT_BYTES);
      full[slot].copy_in_bulk(ring + slot * Tile::STAGE_BYTES + Tile::WEIGHTS_AT,
                              static_cast<const unsigned char*>(all.weight) + walk.column * Tile::COLUMN_BYTES +
                                  rank * Tile::SHARE_BYTES + part * Tile::STAGE_WEIGHT_BYTES,
                              Tile::STAGE_WEIGHT_BYTES);
    });
    if constexpr (Tile::CLUSTER > 1) {
      __syncwarp();
      cluster_barrier();
      cluster_barrier();
    }
  } else {
    setmaxnreg_inc<Tile::MULTIPLIER_REGISTERS>();
    unsigned char* const slices = shared + Tile::SLICES_AT;
    const auto store = [&](const Walk& walk, GroupSums<Tile>& sums, const GroupPlace<Tile>& place) {
      const int rows = rows_inside<Tile::BM>(arguments.batch - walk.tile * Tile::BM);
      uint16* const y = outputs_of<P, Tile>(arguments, walk);
      if constexpr (Tile::CLUSTER == 1) {
        store_group<T, P, Tile>(arguments, y, rows, slices, sums, place);
      } else {
        const int thread = threadIdx.x - Tile::LOADERS;
        wait_at(Tile::ALL_MULTIPLIERS, Tile::MULTIPLIERS);  // the ring is no longer in use
        keep_sums<Tile>(ring, sums, thread);
        cluster_barrier();
        GroupSums<typename Tile::Stored> own;
        add_sums<Tile>(own, ring, rank, thread);
        cluster_barrier();  // none may end while others read its sums
        const GroupPlace<typename Tile::Stored> own_place(thread);
        store_group<T, P, typename Tile::Stored>(arguments, y + rank * Tile::Stored::N * P::D, rows, slices, own, own_place);
      }
    };
    multiply_rows_of_tiles<T, P, Tile, Walk>(arguments, ring + Tile::WEIGHTS_AT, ring, full, empty, store);
  }
}
