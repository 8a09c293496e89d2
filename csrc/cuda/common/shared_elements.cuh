// Elements of any storage type in shared memory, by address.
#pragma once

#include "common/ptx.cuh"

// An element of shared memory.
template <typename T>
__device__ __forceinline__ float load_shared(uint32 address) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(load_shared_word(address));
  } else {
    T value;
    value.bits = static_cast<uint16>(load_shared_16_bits(address));
    return to_float(value);
  }
}

template <typename T>
__device__ __forceinline__ void store_shared(uint32 address, T value) {
  if constexpr (sizeof(T) == 4) {
    store_shared_word(address, __float_as_uint(value));
  } else {
    store_shared_16_bits(address, value.bits);
  }
}

// Two neighbours, at an even place.
template <typename T>
__device__ __forceinline__ void store_pair(uint32 address, float first, float second) {
  if constexpr (sizeof(T) == 4) {
    store_shared_2_words(address, __float_as_uint(first), __float_as_uint(second));
  } else {
    store_shared_word(address, pack_pair<T>(first, second));
  }
}
