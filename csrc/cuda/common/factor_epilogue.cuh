// The epilogue of a factor's kernel: bias, activation and residual, on sums that are not rounded yet.
#pragma once

#include "common/epilogue.cuh"
#include "common/kernel_params.cuh"

// The last template argument of kernels that may have an epilogue, for a product alone.
struct NoEpilogue {
  using Arguments = ::Arguments;
  static constexpr bool IS_EMPTY = true, BIAS = false, RESIDUAL = false;
  static constexpr int ACTIVATION = IDENTITY;
};

template <int ACTIVATION_, bool BIAS_, bool RESIDUAL_> struct FactorEpilogue {
  using Arguments = EpilogueArguments;
  static constexpr bool IS_EMPTY = false, BIAS = BIAS_, RESIDUAL = RESIDUAL_;
  static constexpr int ACTIVATION = ACTIVATION_;
};

// The bias of a feature; 0 where there is none.
template <typename T, typename After>
__device__ __forceinline__ float bias_of(const typename After::Arguments& arguments, int64 feature) {
  if constexpr (After::BIAS) return to_float(static_cast<const T*>(arguments.bias)[feature]);
  return 0.0f;
}

// act(sum + bias) + residual.
template <typename After> __device__ __forceinline__ float with_summands(float sum, float bias, float residual) {
  if constexpr (After::BIAS) sum += bias;
  sum = activate<After::ACTIVATION>(sum);
  if constexpr (After::RESIDUAL) sum += residual;
  return sum;
}

// The same. `at` is the result's place in y, where the residual has its own.
template <typename T, typename After>
__device__ __forceinline__ float with_epilogue(float sum, float bias, const typename After::Arguments& arguments,
                                               int64 at) {
  float residual = 0.0f;
  if constexpr (After::RESIDUAL) residual = to_float(static_cast<const T*>(arguments.residual)[at]);
  return with_summands<After>(sum, bias, residual);
}
