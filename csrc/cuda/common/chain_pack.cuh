// The weights of chains of two 16-bit factors, in the order that chain_wgmma16.cuh reads them in.
//
// tests/chain_packing.py has the same arithmetic, which tests compare with this one.
#pragma once

#include "common/chain_arguments.cuh"
#include "common/chain_tile.cuh"
#include "common/pdl.cuh"
#include "common/ptx.cuh"

constexpr int RIGHT = 0, LEFT = 1;  // in the order in which x meets the factors (a, b, c, 1) and (1, b, c, d)
constexpr int PACK_THREADS = 256;  // of a block; THREADS of chain_pack_launcher.py

// Asks the L2 cache for a block's share of a factor's weights, where all of them lie side by side.
__device__ __forceinline__ void prefetch_factor(const void* weight, const int64 (&strides)[4], int64 a, int64 b,
                                                int64 c, int64 d) {
  const int64 bytes = a * b * c * d * 2;
  const bool are_together = (d == 1 || strides[3] == 1) && strides[2] == d && strides[1] == c * d &&
                            (a == 1 || strides[0] == b * c * d);
  if (are_together && bytes % 16 == 0 && reinterpret_cast<unsigned long long>(weight) % 16 == 0) {
    prefetch_share<PACK_THREADS>(weight, bytes, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
}

template <typename P, bool ARE_LAYERS = false>
__device__ __forceinline__ void prefetch_chain(const ChainPackArguments& from, int sibling) {
  const int chain = ARE_LAYERS ? 1 : sibling, place = ARE_LAYERS ? 0 : LEFT;
  prefetch_factor(from.weights[chain][place], from.strides[chain][place], 1, P::B1, P::C1, P::D1);
  prefetch_factor(from.weights[sibling][RIGHT], from.strides[sibling][RIGHT], P::A2, P::B2, P::C2, 1);
}

// Stores elements `stride` apart, side by side; zeros follow the first `count` of 8.
__device__ __forceinline__ void store_eight(void* to, const uint16* from, int64 stride, int count) {
  uint32 words[4] = {};
  if (count == 8 && stride == 1 && reinterpret_cast<unsigned long long>(from) % 16 == 0) {
    load_16_bytes(words, from);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e < count) words[e / 2] |= static_cast<uint32>(from[e * stride]) << e % 2 * 16;
    }
  }
  store_16_bytes(to, words[0], words[1], words[2], words[3]);
}

// Which output of its chunk a column of phase 2's operand holds: four threads share the columns of 8, and
// each has two of them, whose outputs must make runs of 8 neighbouring features.
template <typename P, typename Tile> __device__ __forceinline__ int output_of_chunk(int column) {
  const int tile = column / 8, quarter = column % 8 / 2, odd = column % 2;
  if constexpr (P::D1 >= 8) return tile * 8 + quarter + 4 * odd;
  return tile / Tile::RUN_TILES * Tile::RUN_TILES * 8 + quarter * (8 / Tile::J) + tile % Tile::RUN_TILES * 2 + odd;
}

// The right factors: [block, split, part, step, half, sibling, class, tile, column] of 8 features of x. They go to `to`.
template <typename P, typename Tile>
__device__ __forceinline__ void pack_right(const ChainPackArguments& from, int chunk, uint16* to) {
  int at = chunk;
  const auto next = [&at](int size) {
    const int digit = at % size;
    at /= size;
    return digit;
  };
  const int column = next(8), tile = next(Tile::SPLIT_TILES), j = next(P::D1), sibling = next(P::SIBLINGS);
  const int half = next(2), step = next(Tile::STEPS_OF_PART), part = next(Tile::PARTS), split = next(Tile::SPLITS);
  const int l = (split * Tile::SPLIT_TILES + tile) * 8 + column, feature = part * Tile::KS + step * 16 + half * 8;
  const int64* const stride = from.strides[sibling][RIGHT];
  const int64 first = at * stride[0] + (l * P::D1 + j) * stride[1] + feature * stride[2];
  store_eight(to, static_cast<const uint16*>(from.weights[sibling][RIGHT]) + first, stride[2],
              l < Tile::L_OF_BLOCK && feature < P::C2 ? 8 : 0);
}

// The left factors, from that of the first sibling: [sibling, chunk of outputs, group of classes, class, step, half,
// column] of 8 l.
template <typename P, typename Tile, bool ARE_LAYERS = false>
__device__ __forceinline__ void pack_left(const ChainPackArguments& from, int chunk, uint16* to, int first_sibling = 0) {
  int at = chunk;
  const auto next = [&at](int size) {
    const int digit = at % size;
    at /= size;
    return digit;
  };
  const int column = next(Tile::NK), half = next(2), step = next(Tile::STEPS), j = next(Tile::J);
  const int j_group = next(Tile::J_GROUPS), k0 = next(Tile::OUTPUT_CHUNKS) * Tile::NK;
  const int k = k0 + output_of_chunk<P, Tile>(column), tile = 2 * step + half;
  const int block = tile / Tile::TILES_OF_BLOCK, l = tile % Tile::TILES_OF_BLOCK * 8;
  const int chain = ARE_LAYERS ? 1 : first_sibling + at, place = ARE_LAYERS ? 0 : LEFT;
  const int64* const stride = from.strides[chain][place];
  const int64 first =
      k * stride[1] + (block * Tile::L_OF_BLOCK + l) * stride[2] + (j_group * Tile::J + j) * stride[3];
  store_eight(to, static_cast<const uint16*>(from.weights[chain][place]) + first, stride[2],
              k < P::B1 && block < P::A2 ? between(0, Tile::L_OF_BLOCK - l, 8) : 0);
}

// One of all runs of 8 elements. ARE_LAYERS: each factor is a layer's, so that the left one is another chain's.
template <typename P, typename Tile, bool ARE_LAYERS = false>
__device__ __forceinline__ void pack_chain(const ChainPackArguments& arguments, int chunk) {
  constexpr int OF_RIGHT = static_cast<int>(Tile::RIGHT_BYTES / 16), ALL = static_cast<int>(Tile::PACKED_BYTES / 16);
  uint16* const to = static_cast<uint16*>(arguments.packed) + int64(chunk) * 8;
  if (chunk < OF_RIGHT) {
    pack_right<P, Tile>(arguments, chunk, to);
  } else if (chunk < ALL) {
    pack_left<P, Tile, ARE_LAYERS>(arguments, chunk - OF_RIGHT, to);
  }
}

template <typename P, typename Tile, bool ARE_LAYERS = false>
__device__ __forceinline__ void chain_pack_kernel(const ChainPackArguments& arguments) {
#pragma unroll
  for (int sibling = 0; sibling < P::SIBLINGS; ++sibling) prefetch_chain<P, ARE_LAYERS>(arguments, sibling);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  pack_chain<P, Tile, ARE_LAYERS>(arguments, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
}
