// What is done to a product's sums before they are rounded and stored: activations, in fp32.
#pragma once

#include "common/ptx.cuh"

__device__ __forceinline__ void store_four_floats(float* to, const float4& four) {
  store_16_bytes(to, __float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z), __float_as_uint(four.w));
}

// Stores eight results of each lane, side by side in a y of float32 at a multiple of 16 bytes. All lanes of a warp call
// it; those that are not `inside` have none. Two neighbours store one's eight and then the other's, so that they
// fill a sector of 32 bytes at a time, where each would fill half of two.
__device__ __forceinline__ void store_eight_floats(float* to, const float (&values)[8], bool inside) {
  const bool is_odd = threadIdx.x % 2 != 0;
  const auto of_neighbour = [](uint32 word) { return __shfl_sync(~0u, word, static_cast<int>(threadIdx.x % 32 ^ 1)); };
  const uint64 place = inside ? reinterpret_cast<uint64>(to) : 0;
  const uint64 low = of_neighbour(static_cast<uint32>(place)), high = of_neighbour(static_cast<uint32>(place >> 32));
  float* const theirs = reinterpret_cast<float*>(high << 32 | low);
  const bool are_theirs_inside = theirs != nullptr;
  float passed[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    passed[e] = __uint_as_float(of_neighbour(__float_as_uint(is_odd ? values[e] : values[4 + e])));
  }
  const float4 received = make_float4(passed[0], passed[1], passed[2], passed[3]);
  const float4 own = is_odd ? make_float4(values[4], values[5], values[6], values[7])
                            : make_float4(values[0], values[1], values[2], values[3]);
  // First the eight of the even lane, then those of the odd one: both lanes in one instruction each.
  const bool is_first_inside = is_odd ? are_theirs_inside : inside, is_last_inside = is_odd ? inside : are_theirs_inside;
  if (is_first_inside) store_four_floats(is_odd ? theirs + 4 : to, is_odd ? received : own);
  if (is_last_inside) store_four_floats(is_odd ? to + 4 : theirs, is_odd ? own : received);
}

// In the order of ksopt/epilogue.py.
enum Activation { IDENTITY = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4 };

__device__ __forceinline__ float exponential_of_2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// 1 / (1 + exp(-value)): 0 and 1 at the infinities.
__device__ __forceinline__ float sigmoid(float value) {
  return reciprocal(1.0f + exponential_of_2(-1.4426950408889634f * value));
}

// The normal distribution: its integral, by Abramowitz and Stegun 7.1.26, off by at most 1e-7, and its density.
struct Normal {
  float integral, density;
};
__device__ __forceinline__ Normal normal_of(float value) {
  const float z = fabsf(value) * 0.70710678118654752f;
  const float t = reciprocal(fmaf(0.3275911f, z, 1.0f));
  const float series =
      t * fmaf(t, fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f), 0.127414796f);
  const float exponential = exponential_of_2(-1.4426950408889634f * z * z);
  const float tail = series * exponential;  // half of erfc(z)
  return {value < 0.0f ? tail : 1.0f - tail, 0.39894228040143268f * exponential};
}

// A NaN stays one, and infinities become what PyTorch's functions make of them.
template <int ACTIVATION> __device__ __forceinline__ float activate(float value) {
  if constexpr (ACTIVATION == RELU) return value < 0.0f ? 0.0f : value;
  if constexpr (ACTIVATION == GELU) return value * normal_of(value).integral;
  if constexpr (ACTIVATION == GELU_TANH) {  // (1 + tanh(u)) / 2 is the sigmoid of 2 u
    return value * sigmoid(1.5957691216057308f * value * fmaf(0.044715f * value, value, 1.0f));
  }
  if constexpr (ACTIVATION == SILU) return value * sigmoid(value);
  return value;
}

// An activation's slope, by which the gradient of its result is multiplied.
template <int ACTIVATION> __device__ __forceinline__ float slope_of(float value) {
  if constexpr (ACTIVATION == RELU) return value <= 0.0f ? 0.0f : 1.0f;
  if constexpr (ACTIVATION == GELU) {
    const Normal normal = normal_of(value);
    return fmaf(value, normal.density, normal.integral);
  }
  if constexpr (ACTIVATION == GELU_TANH) {
    const float square = 0.044715f * value * value;
    const float s = sigmoid(1.5957691216057308f * value * (square + 1.0f));
    const float slope = 1.5957691216057308f * fmaf(3.0f, square, 1.0f);  // of what the sigmoid takes
    return fmaf(value * slope, s * (1.0f - s), s);
  }
  if constexpr (ACTIVATION == SILU) {
    const float s = sigmoid(value);
    return s * fmaf(value, 1.0f - s, 1.0f);
  }
  return 1.0f;
}
