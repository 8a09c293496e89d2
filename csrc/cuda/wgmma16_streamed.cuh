// 16-bit factors on Hopper's warpgroup tensor cores, whose weights do not fit beside a ring of rows
// (batch first, sm_90a).
//
// The products of wgmma16.cuh, but a stage of the ring holds the weights of its l too. They come
// through the L2 cache once for each tile of rows, in return for more outputs a block, so that fewer
// blocks read the same x.
//
// `wgmma16_streamed_pack_kernel` writes the weights once in the order in which the tensor cores read them.
// What a stage needs of them is then one run of bytes, which one thread asks for with one instruction.
#pragma once

#include "common/pdl.cuh"
#include "wgmma16.cuh"

template <typename P, int GROUPS_J_, int GROUPS_N_, int GROUPS_M_, int NT_, int KL_, int STAGES_>
struct Wgmma16StreamedTile : Wgmma16Tile<P, GROUPS_J_, GROUPS_N_, GROUPS_M_, NT_, KL_, STAGES_, 1, 1> {
  using Base = Wgmma16Tile<P, GROUPS_J_, GROUPS_N_, GROUPS_M_, NT_, KL_, STAGES_, 1, 1>;
  static constexpr bool STREAMED = true;
  static constexpr int WEIGHTS_AT = Base::STAGE_BYTES;  // in a stage, after its rows of x
  static constexpr int STAGE_WEIGHT_BYTES = Base::STAGE_UNITS * Base::UNIT_BYTES;
  static constexpr int STAGE_BYTES = WEIGHTS_AT + STAGE_WEIGHT_BYTES;
  static constexpr int RING_AT = Base::BARRIER_BYTES, SLICES_AT = RING_AT + STAGES_ * STAGE_BYTES;
  static constexpr int SHARED_BYTES = SLICES_AT + Base::SLICES * Base::SLICE_BYTES;
  // The packed weights of a block's outputs and j.
  static constexpr int64 COLUMN_BYTES = int64(Base::STAGES_PER_TILE) * STAGE_WEIGHT_BYTES;
  static constexpr int PARTS_OF_J = P::D / Base::JC;
  static constexpr int COLUMNS_OF_I = PARTS_OF_J * Base::OUTPUT_TILES, COLUMNS = P::A * COLUMNS_OF_I;
  static_assert(Base::UNITS % Base::STAGE_UNITS == 0, "whole stages of weights");
};

// What a block computes, tile after tile. Blocks that follow each other have the same rows of x, at the
// same time, and all have the weights of one i: what several of them read comes from memory once.
template <typename P, typename Tile> struct StreamWalk {
  int64 row_tiles, all, at, tile;
  int group, column;  // i, and which outputs and j of it

  __device__ __forceinline__ explicit StreamWalk(const Arguments& arguments)
      : row_tiles((arguments.batch + Tile::BM - 1) / Tile::BM), all(row_tiles * Tile::COLUMNS), at(blockIdx.x) {
    place();
  }
  __device__ __forceinline__ bool inside() const { return at < all; }
  __device__ __forceinline__ void next() {
    at += gridDim.x;
    place();
  }
  __device__ __forceinline__ void place() {
    const int64 of_row_tiles = at / Tile::COLUMNS_OF_I;
    tile = of_row_tiles % row_tiles, group = static_cast<int>(of_row_tiles / row_tiles);
    column = static_cast<int>(at % Tile::COLUMNS_OF_I);
  }
  __device__ __forceinline__ int i() const { return group; }
  __device__ __forceinline__ int j0() const { return column / Tile::OUTPUT_TILES * Tile::JC; }
  __device__ __forceinline__ int n0() const { return column % Tile::OUTPUT_TILES * Tile::NB; }
};

template <typename T, typename P, typename Tile, typename After = NoEpilogue>
__device__ __forceinline__ void wgmma16_streamed_kernel(const typename After::Arguments& arguments) {
  using Walk = StreamWalk<P, Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  Mbarrier* const empty = full + Tile::STAGES;
  unsigned char* const ring = shared + Tile::RING_AT;
  unsigned char* const slices = shared + Tile::SLICES_AT;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) {
      full[s].init(Tile::LOADERS + 1);  // once more the one that asks for weights
      empty[s].init(Tile::MULTIPLIERS);
    }
    fence_view_async_shared();  // and for the copy engine
  }
  prefetch_bias<P, Tile, After>(arguments);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __syncthreads();
  if (threadIdx.x < Tile::LOADERS) {
    setmaxnreg_dec<Tile::LOADER_REGISTERS>();
    load_rows<P, Tile, Walk>(arguments, ring, full, empty, [&](const Walk& walk, int part, int slot) {
      if (threadIdx.x != 0) return;
      const int64 first = (int64(walk.group) * Tile::COLUMNS_OF_I + walk.column) * Tile::COLUMN_BYTES;
      full[slot].arrive_and_expect_tx(Tile::STAGE_WEIGHT_BYTES);
      full[slot].cp_async_bulk(ring + slot * Tile::STAGE_BYTES + Tile::WEIGHTS_AT,
                               static_cast<const unsigned char*>(arguments.weight) + first +
                                  part * Tile::STAGE_WEIGHT_BYTES,
                               Tile::STAGE_WEIGHT_BYTES);
    });
  } else {
    setmaxnreg_inc<Tile::MULTIPLIER_REGISTERS>();
    multiply_and_store_rows<T, P, Tile, Walk, After>(arguments, ring + Tile::WEIGHTS_AT, ring, slices, full, empty);
  }
}

// Writes the weights, of any strides, to `arguments.y`: as many blocks as there are columns, or a multiple of them.
template <typename P, typename Tile>
__device__ __forceinline__ void wgmma16_streamed_pack_kernel(const Arguments& arguments) {
  const uint16* const weight = static_cast<const uint16*>(arguments.weight);
  unsigned char* const packed = static_cast<unsigned char*>(arguments.y);
  const int column = blockIdx.x % Tile::COLUMNS;
  const int n0 = column % Tile::OUTPUT_TILES * Tile::NB, i = column / Tile::COLUMNS_OF_I;
  const int j0 = column / Tile::OUTPUT_TILES % Tile::PARTS_OF_J * Tile::JC;
  pack_in_order_of<P, uint16, Tile::Layout::J>(arguments, [&](const auto& order) {
    write_weights<P, Tile>(packed + column * Tile::COLUMN_BYTES, weight + order.at(i, n0, 0, j0), order, P::B - n0,
                           threadIdx.x, blockIdx.x / Tile::COLUMNS, gridDim.x / Tile::COLUMNS);
  });
}
