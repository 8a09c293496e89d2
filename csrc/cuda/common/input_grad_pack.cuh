// The weights of chains of two 16-bit factors, in the order that input_grad_wgmma16.cuh reads them in.
#pragma once

#include "common/chain_pack.cuh"
#include "common/input_grad_tile.cuh"

// The weights in the order in which x meets them: where there is one below, it is the first.
template <typename P> constexpr int place_of_factor(int factor) { return factor + (P::IS_ACTIVATED ? 1 : 0); }
constexpr int BELOW = 0;

// Stores 8 elements that `of(e)` gives.
template <typename Of> __device__ __forceinline__ void store_eight_of(void* to, const Of& of) {
  uint32 words[4] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) words[e / 2] |= static_cast<uint32>(of(e)) << e % 2 * 16;
  store_16_bytes(to, words[0], words[1], words[2], words[3]);
}

// The left factors: [sibling, split, slot, unit, step, half, class, column] of 8 k.
template <typename P, typename Tile>
__device__ __forceinline__ void pack_left_of_grad(const ChainPackArguments& arguments, int chunk, uint16* to) {
  int at = chunk;
  const auto next = [&at](int size) {
    const int digit = at % size;
    at /= size;
    return digit;
  };
  const int column = next(Tile::NL), j = next(P::D1), half = next(2), step = next(Tile::STEPS_OF_UNIT);
  const int unit = next(Tile::UNITS), slot = next(Tile::SLOTS_1), split = next(Tile::SPLITS);
  const int l = split * Tile::NL + place_of_column<P::D1>(column), first = slot * Tile::KF + unit * Tile::UNIT;
  constexpr int PLACE = place_of_factor<P>(LEFT);
  const int64* const stride = arguments.strides[at][PLACE];
  const uint16* const from = static_cast<const uint16*>(arguments.weights[at][PLACE]) + l * stride[2] + j * stride[3];
  store_eight_of(to, [&](int e) {
    const int k = (first + feature_of_place<P::D1>(step, half, e)) / P::D1;
    return k < P::B1 ? from[k * stride[1]] : uint16(0);
  });
}

// The right factors, for a chunk of columns of a block: [sibling, run of 32, step, half, column] of 8 features of dz.
template <typename P, typename Tile>
__device__ __forceinline__ void pack_right_of_grad(const ChainPackArguments& arguments, int block, int part, int at,
                                                   uint16* to) {
  const auto next = [&at](int size) {
    const int digit = at % size;
    at /= size;
    return digit;
  };
  const int column = next(Tile::NC), half = next(2), step = next(2), run = next(P::B2 / 32);
  const int c = part * Tile::NC + place_of_column<1>(column);
  constexpr int PLACE = place_of_factor<P>(RIGHT);
  const int64* const stride = arguments.strides[at][PLACE];
  const uint16* const from =
      static_cast<const uint16*>(arguments.weights[at][PLACE]) + block * stride[0] + c * stride[2];
  store_eight_of(to, [&](int e) {
    return c < P::C2 ? from[(run * 32 + feature_of_place<1>(step, half, e)) * stride[1]] : uint16(0);
  });
}

// The factor below, for the same columns: [unit, step, half, class, column] of 8 of what it reads.
template <typename P, typename Tile>
__device__ __forceinline__ void pack_below(const ChainPackArguments& arguments, int block, int part, int at,
                                           uint16* to) {
  using Unit = GradUnit<P::D0>;
  const auto next = [&at](int size) {
    const int digit = at % size;
    at /= size;
    return digit;
  };
  const int column = next(Tile::NC / P::D0), j = next(P::D0), half = next(2), step = next(Unit::STEPS);
  const int of_block = part * Tile::NC + place_of_column<P::D0>(column) * P::D0, k = (block * P::C2 + of_block) / P::D0;
  const int64* const stride = arguments.strides[0][BELOW];
  const uint16* const from = static_cast<const uint16*>(arguments.weights[0][BELOW]) + k * stride[1] + j * stride[3];
  store_eight_of(to, [&](int e) {
    const int l = (at * Unit::FEATURES + feature_of_place<P::D0>(step, half, e)) / P::D0;
    return of_block < P::C2 ? from[l * stride[2]] : uint16(0);
  });
}

// One of all runs of 8 elements.
template <typename P, typename Tile>
__device__ __forceinline__ void pack_of_grad(const ChainPackArguments& arguments, void* packed, int chunk) {
  constexpr int OF_LEFT = static_cast<int>(Tile::LEFT_BYTES / 16), ALL = static_cast<int>(Tile::PACKED_BYTES / 16);
  uint16* const to = static_cast<uint16*>(packed) + int64(chunk) * 8;
  if (chunk < OF_LEFT) {
    pack_left_of_grad<P, Tile>(arguments, chunk, to);
  } else if (chunk < ALL) {
    constexpr int OF_RIGHT = Tile::RIGHT_BYTES / 16, OF_CHUNK = Tile::WEIGHT_BYTES_2 / 16;
    const int of_columns = (chunk - OF_LEFT) / OF_CHUNK, at = (chunk - OF_LEFT) % OF_CHUNK;
    const int block = of_columns / Tile::CHUNKS, part = of_columns % Tile::CHUNKS;
    if (at < OF_RIGHT) {
      pack_right_of_grad<P, Tile>(arguments, block, part, at, to);
    } else if constexpr (P::IS_ACTIVATED) {
      pack_below<P, Tile>(arguments, block, part, at - OF_RIGHT, to);
    }
  }
}

template <typename P, typename Tile>
__device__ __forceinline__ void input_grad_pack_kernel(const ChainPackArguments& arguments) {
#pragma unroll
  for (int s = 0; s < P::SIBLINGS; ++s) {
    constexpr int TO_LEFT = place_of_factor<P>(LEFT), TO_RIGHT = place_of_factor<P>(RIGHT);
    prefetch_factor(arguments.weights[s][TO_LEFT], arguments.strides[s][TO_LEFT], 1, P::B1, P::MIDDLE / P::D1, P::D1);
    prefetch_factor(arguments.weights[s][TO_RIGHT], arguments.strides[s][TO_RIGHT], P::A2, P::B2, P::C2, 1);
  }
  if constexpr (P::IS_ACTIVATED) {
    prefetch_factor(arguments.weights[0][BELOW], arguments.strides[0][BELOW], 1, P::IN / P::D0, P::C0, P::D0);
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  pack_of_grad<P, Tile>(arguments, arguments.packed, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
}
