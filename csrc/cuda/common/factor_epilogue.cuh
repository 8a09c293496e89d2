// The epilogue of a factor's kernel: bias, activation and residual, on sums that are not rounded yet, and a result in
// float32 instead of a 16-bit type.
#pragma once

#include "common/epilogue.cuh"
#include "common/kernel_params.cuh"
#include "common/smem_layout.cuh"

// The last template argument of kernels that may have an epilogue, for a product alone.
struct NoEpilogue {
  using Arguments = ::Arguments;
  static constexpr bool IS_EMPTY = true, BIAS = false, RESIDUAL = false, IN_FLOAT32 = false;
  static constexpr int ACTIVATION = IDENTITY;
};

template <int ACTIVATION_, bool BIAS_, bool RESIDUAL_, bool IN_FLOAT32_ = false> struct FactorEpilogue {
  using Arguments = EpilogueArguments;
  static constexpr bool IS_EMPTY = false, BIAS = BIAS_, RESIDUAL = RESIDUAL_, IN_FLOAT32 = IN_FLOAT32_;
  static_assert(!(RESIDUAL && IN_FLOAT32), "a residual has the type of what it is added to");
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

// The same of four.
template <typename After>
__device__ __forceinline__ float4 with_summands(const float4& sum, const float4& bias, const float4& residual) {
  return make_float4(with_summands<After>(sum.x, bias.x, residual.x), with_summands<After>(sum.y, bias.y, residual.y),
                     with_summands<After>(sum.z, bias.z, residual.z), with_summands<After>(sum.w, bias.w, residual.w));
}

// The same. `at` is the result's place in y, where the residual has its own.
template <typename T, typename After>
__device__ __forceinline__ float with_epilogue(float sum, float bias, const typename After::Arguments& arguments,
                                               int64 at) {
  float residual = 0.0f;
  if constexpr (After::RESIDUAL) residual = to_float(static_cast<const T*>(arguments.residual)[at]);
  return with_summands<After>(sum, bias, residual);
}

// Where a tile's results are: of its first row and output the place in y, and the feature; how many rows and outputs
// there are from there on.
struct ResultsPlace {
  int64 at, feature;
  int rows, outputs;
};

// One result of a tile behind its epilogue; 0 if its row or output is none of the factor's. `offset`: its feature is so
// far behind the tile's first.
template <typename T, typename After>
__device__ __forceinline__ float result_in_tile(float sum, const typename After::Arguments& arguments,
                                                const ResultsPlace& place, int row, int output, int offset) {
  if constexpr (After::IS_EMPTY) return sum;
  if (row >= place.rows || output >= place.outputs) return 0.0f;
  const float bias = bias_of<T, After>(arguments, place.feature + offset);
  return with_epilogue<T, After>(sum, bias, arguments, place.at + row * arguments.y_batch_stride + offset);
}

// Stores COUNT results that lie side by side in a y of float32, at an address that is a multiple of the bytes that it
// stores at a time.
template <int COUNT> __device__ __forceinline__ void store_floats(float* to, const float (&values)[COUNT]) {
  constexpr int WIDTH = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int at = 0; at < COUNT; at += WIDTH) {
    if constexpr (WIDTH == 4) {
      store_four_floats(to + at, make_float4(values[at], values[at + 1], values[at + 2], values[at + 3]));
    } else if constexpr (WIDTH == 2) {
      store_8_bytes(to + at, __float_as_uint(values[at]), __float_as_uint(values[at + 1]));
    } else {
      to[at] = values[at];
    }
  }
}

// The first `count` of four floats, at a place that is a multiple of ALIGNED bytes; 0 beyond them, all of aligned ones.
template <int ALIGNED> __device__ __forceinline__ float4 load_floats(const void* values, int64 place, int count) {
  const float* const from = static_cast<const float*>(values) + place;
  if constexpr (ALIGNED == 16) return *reinterpret_cast<const float4*>(from);
  return make_float4(from[0], count > 1 ? from[1] : 0.0f, count > 2 ? from[2] : 0.0f, count > 3 ? from[3] : 0.0f);
}

// Four sums in fp32 that lie side by side in y behind their epilogue, of which `count` are the factor's: `feature` is
// the feature of the first, `at` its place in y.
template <typename P, typename After>
__device__ __forceinline__ float4 four_with_epilogue(const float4& sums, const typename After::Arguments& arguments,
                                                     int64 feature, int64 at, int count) {
  if constexpr (After::IS_EMPTY) return sums;
  constexpr int ALIGNED = aligned_results<P, 4>();
  float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f), residual = bias;
  if constexpr (After::BIAS) bias = load_floats<ALIGNED>(arguments.bias, feature, count);
  if constexpr (After::RESIDUAL) residual = load_floats<ALIGNED>(arguments.residual, at, count);
  return with_summands<After>(sums, bias, residual);
}
