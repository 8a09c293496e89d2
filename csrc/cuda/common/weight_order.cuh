// The order of a weight's elements in memory, for kernels that pack weights: a weight that changes is packed as it is
// stored. The gradient of an input, for one, multiplies by a transposed weight.
//
// A thread loads pieces of several elements where memory allows it. A piece is counted in elements along l, then j.
#pragma once

#include "common/kernel_params.cuh"

// In the order of (a, b, c, d): PIECE elements may go on from one l to the next.
template <typename P, int PIECE_> struct InOrder {
  static constexpr bool STRIDED = false;
  static constexpr int PIECE = PIECE_;
  __device__ static __forceinline__ int64 at(int i, int k, int l, int j) {
    return int64(i) * P::B * P::C * P::D + int64(k) * (P::C * P::D) + (l * P::D + j);
  }
};

// In any order in which PIECE elements of neighbouring j lie side by side.
template <int PIECE_> struct Strided {
  static constexpr bool STRIDED = true;
  static constexpr int PIECE = PIECE_;
  int64 a, b, c, d;
  __device__ __forceinline__ explicit Strided(const Arguments& arguments)
      : a(arguments.weight_stride_a), b(arguments.weight_stride_b), c(arguments.weight_stride_c),
        d(arguments.weight_stride_d) {}
  __device__ __forceinline__ int64 at(int i, int k, int l, int j) const { return i * a + k * b + l * c + j * d; }
};

// Whether 16-byte chunks of the weight hold what they do where its elements are in order. The stride of a dimension of
// size 1 says nothing.
template <typename P> __device__ __forceinline__ bool is_in_order(const Arguments& arguments) {
  return (P::A == 1 || arguments.weight_stride_a == int64(P::B) * P::C * P::D) &&
         (P::B == 1 || arguments.weight_stride_b == P::C * P::D) &&
         (P::C == 1 || arguments.weight_stride_c == P::D) && (P::D == 1 || arguments.weight_stride_d == 1) &&
         reinterpret_cast<uint64>(arguments.weight) % 16 == 0;
}

// Calls `pack` with the order of a weight of elements T, of which 16 bytes hold neighbouring j, J of them at a time: with
// the largest pieces that can be loaded. A transposed weight, whose j still lie side by side, has pieces of several j.
template <typename P, typename T, int J, typename Pack>
__device__ __forceinline__ void pack_in_order_of(const Arguments& arguments, const Pack& pack) {
  constexpr int CHUNK = 16 / sizeof(T);
  constexpr int PIECE = J % CHUNK == 0 ? CHUNK : J % 4 == 0 ? 4 : J % 2 == 0 ? 2 : 1;
  if (is_in_order<P>(arguments)) return pack(InOrder<P, CHUNK>());
  if constexpr (PIECE > 1) {
    const int64 strides = arguments.weight_stride_a | arguments.weight_stride_b | arguments.weight_stride_c;
    const uint64 address = reinterpret_cast<uint64>(arguments.weight);
    if (arguments.weight_stride_d == 1 && strides % PIECE == 0 && address % (PIECE * sizeof(T)) == 0) {
      return pack(Strided<PIECE>(arguments));
    }
  }
  pack(Strided<1>(arguments));
}

// Loads a piece as elements `at` and those behind it of a thread's words, two in a word; zeros if it is not inside.
template <int PIECE>
__device__ __forceinline__ void load_piece(uint32* words, int at, const uint16* from, bool inside) {
  if constexpr (PIECE == 8) {
    uint4 loaded = make_uint4(0, 0, 0, 0);
    if (inside) loaded = *reinterpret_cast<const uint4*>(from);
    words[at / 2] = loaded.x, words[at / 2 + 1] = loaded.y, words[at / 2 + 2] = loaded.z, words[at / 2 + 3] = loaded.w;
  } else if constexpr (PIECE == 4) {
    uint2 loaded = make_uint2(0, 0);
    if (inside) loaded = *reinterpret_cast<const uint2*>(from);
    words[at / 2] = loaded.x, words[at / 2 + 1] = loaded.y;
  } else if constexpr (PIECE == 2) {
    words[at / 2] = inside ? *reinterpret_cast<const uint32*>(from) : 0;
  } else {
    const uint32 loaded = inside ? *from : 0;
    words[at / 2] = at % 2 == 0 ? loaded : words[at / 2] | loaded << 16;
  }
}

template <int PIECE>
__device__ __forceinline__ void load_piece(float* values, int at, const float* from, bool inside) {
  if constexpr (PIECE == 4) {
    float4 loaded = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (inside) loaded = *reinterpret_cast<const float4*>(from);
    values[at] = loaded.x, values[at + 1] = loaded.y, values[at + 2] = loaded.z, values[at + 3] = loaded.w;
  } else if constexpr (PIECE == 2) {
    float2 loaded = make_float2(0.0f, 0.0f);
    if (inside) loaded = *reinterpret_cast<const float2*>(from);
    values[at] = loaded.x, values[at + 1] = loaded.y;
  } else {
    values[at] = inside ? *from : 0.0f;
  }
}
