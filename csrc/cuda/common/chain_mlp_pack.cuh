// The weights of two chains of two 16-bit factors, in the order that chain_mlp_wgmma16.cuh reads them in.
//
// tests/chain_packing.py has the same arithmetic, which tests compare with this one.
#pragma once

#include "common/chain_mlp_tile.cuh"
#include "common/chain_pack.cuh"

// The second right factor, for a chunk of hidden features: [step, half, class, tile, column] of 8 of these, which
// have the order of the first chain's outputs in registers.
template <typename P1, typename P2, typename Tile>
__device__ __forceinline__ void pack_hidden(const ChainPackArguments& from, int chunk, int at, uint16* to) {
  using First = typename Tile::First;
  using Second = typename Tile::Second;
  constexpr int STEPS_OF_CLASS = First::NK / 16;  // of the first chain's
  const auto next = [&at](int size) {
    const int digit = at % size;
    at /= size;
    return digit;
  };
  const int column = next(8), tile = next(Second::TILES_OF_BLOCK), j = next(P2::D1), half = next(2), step = at;
  const int l = tile * 8 + column, k0 = chunk % Tile::CHUNKS_OF_BLOCK * First::NK;
  const int64* const stride = from.strides[1][RIGHT];
  const uint16* const row = static_cast<const uint16*>(from.weights[1][RIGHT]) + chunk / Tile::CHUNKS_OF_BLOCK * stride[0] +
                            (l * P2::D1 + j) * stride[1];
  uint32 words[4] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int k = k0 + output_of_chunk<P1, First>((step % STEPS_OF_CLASS * 2 + half) * 8 + e);
    if (l < Second::L_OF_BLOCK) {
      words[e / 2] |= static_cast<uint32>(row[(k * P1::D1 + step / STEPS_OF_CLASS) * stride[2]]) << e % 2 * 16;
    }
  }
  store_16_bytes(to, words[0], words[1], words[2], words[3]);
}

// Where siblings' weights are for chain_pack.cuh, here the first chain's are, and then the second one's.
template <typename P1, typename P2, typename Tile>
__device__ __forceinline__ void chain_mlp_pack_kernel(const ChainPackArguments& arguments) {
  using First = typename Tile::First;
  constexpr int OF_RIGHT = static_cast<int>(First::RIGHT_BYTES / 16), LAST = static_cast<int>(Tile::LAST_AT / 16);
  constexpr int OF_LEFT = First::CHUNK_BYTES / 16, LEFT_AND_HIDDEN = Tile::HIDDEN_CHUNK_BYTES / 16;
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  uint16* const to = static_cast<uint16*>(arguments.packed) + int64(at) * 8;
  prefetch_chain<P1>(arguments, 0);
  prefetch_chain<P2>(arguments, 1);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (at < OF_RIGHT) {
    pack_right<P1, First>(arguments, at, to);
  } else if (at < LAST) {
    const int chunk = (at - OF_RIGHT) / LEFT_AND_HIDDEN, inside = (at - OF_RIGHT) % LEFT_AND_HIDDEN;
    if (inside < OF_LEFT) {
      pack_left<P1, First>(arguments, chunk * OF_LEFT + inside, to);
    } else {
      pack_hidden<P1, P2, Tile>(arguments, chunk, inside - OF_LEFT, to);
    }
  } else if (at < static_cast<int>(Tile::PACKED_BYTES / 16)) {
    pack_left<P2, typename Tile::Second>(arguments, at - LAST, to, 1);
  }
}
