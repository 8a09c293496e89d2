// A value as TF32 numbers, whose sum it is but for the last of its bits: `big`, the nearest, and `small`.
#pragma once

#include "common/ptx.cuh"

// The tensor cores drop the last bits of `small` themselves. For one product `small` is not used.
template <int PRODUCTS> struct Split {
  uint32 big, small;
  __device__ __forceinline__ explicit Split(float value) {
    if (PRODUCTS == 1) {
      big = to_tf32(value), small = 0;
    } else {
      // Adding 2^13 times the value pushes its last 13 bits out, rounded to nearest. Two fused
      // operations do it, where the conversion instruction is a sequence of slower ones.
      const float rounded = fmaf(value, -8192.0f, value * 8193.0f);
      big = __float_as_uint(rounded), small = __float_as_uint(value - rounded);
    }
  }
};

// Three TF32 products turn an infinity into NaN: results that are not finite are recomputed.
__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __uint_as_float(0x7f800000u); }
