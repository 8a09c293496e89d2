// What is done to a product's sums before they are rounded and stored: activations, in fp32.
#pragma once

#include "common/numeric_types.cuh"

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
