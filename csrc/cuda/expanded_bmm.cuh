// Repairs a product by matrices that contain the zeros of a pattern: its blocks, or the whole matrix.
//
// Zero times infinity or NaN is NaN, so an input that is not finite reaches outputs that do not depend
// on it in the pattern. The inputs and outputs of a matrix fall into classes, one for each (i, j), and an
// output depends only on inputs of its own class. A row with an input that is not finite therefore has
// NaN in all outputs of the other classes. Of two outputs of different classes at least one is NaN then.
// If neither is, the row is correct; otherwise a warp computes its outputs again, without the zeros.
#pragma once

#include "common/kernel_params.cuh"
#include "common/pdl.cuh"

// The matrices that the product was by: MATRICES for each row.
template <typename P, bool WHOLE> struct ExpandedMatrices {
  static constexpr int MATRICES = WHOLE ? 1 : P::A;
  static constexpr int64 OUTPUTS = int64(P::A) / MATRICES * P::B * P::D;  // of a matrix
  // The distance from the first output of a matrix to one of another class.
  static constexpr int64 OTHER_CLASS = P::D > 1 ? 1 : P::B;
  static_assert(P::D > 1 || (WHOLE && P::A > 1), "the matrices hold no zeros");
};

// An operand's row: elements `stride` apart.
template <typename T> struct ExpandedRow {
  T* first;
  int64 stride;

  __device__ __forceinline__ T& at(int64 feature) const { return first[feature * stride]; }
  __device__ __forceinline__ bool is_nan(int64 feature) const {
    const float value = to_float(at(feature));
    return value != value;
  }
};

template <typename T, typename P>
__device__ __forceinline__ float exact_output(const Arguments& arguments, const ExpandedRow<const T>& x, int64 feature) {
  const int64 i = feature / (P::B * P::D), k = feature / P::D % P::B, j = feature % P::D;
  const T* weight = static_cast<const T*>(arguments.weight) + i * arguments.weight_stride_a +
                    k * arguments.weight_stride_b + j * arguments.weight_stride_d;
  float sum = 0.0f;
  for (int l = 0; l < P::C; ++l)
    sum = fmaf(to_float(x.at((i * P::C + l) * P::D + j)), to_float(weight[l * arguments.weight_stride_c]), sum);
  return sum;
}

template <typename T, typename P, bool WHOLE, bool BATCH_LAST>
__device__ __forceinline__ void expanded_repair_kernel(const Arguments& arguments) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  using M = ExpandedMatrices<P, WHOLE>;
  const int64 tasks = arguments.batch * M::MATRICES;
  const int lane = threadIdx.x % 32;
  // Neighbouring threads check neighbours in memory: rows if the batch comes last.
  const auto row_of = [&](int64 task) { return BATCH_LAST ? task % arguments.batch : task / M::MATRICES; };
  const auto first_output_of = [&](int64 task) {
    return (BATCH_LAST ? task / arguments.batch : task % M::MATRICES) * M::OUTPUTS;
  };
  const auto y_of = [&](int64 row) {
    return ExpandedRow<T>{static_cast<T*>(arguments.y) + row * arguments.y_batch_stride, arguments.y_feature_stride};
  };
  const int64 step = int64(gridDim.x) * blockDim.x;
  for (int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x - lane; first < tasks; first += step) {
    bool is_wrong = false;
    if (first + lane < tasks) {
      const ExpandedRow<T> y = y_of(row_of(first + lane));
      const int64 output = first_output_of(first + lane);
      is_wrong = y.is_nan(output) || y.is_nan(output + M::OTHER_CLASS);
    }
    const uint32 wrong = __ballot_sync(~0u, is_wrong);  // all have looked before one writes
    if (wrong == 0) continue;
    for (int from = 0; from < 32; ++from) {
      if ((wrong >> from & 1) == 0) continue;
      const int64 row = row_of(first + from), output = first_output_of(first + from);
      const ExpandedRow<const T> x{static_cast<const T*>(arguments.x) + row * arguments.x_batch_stride,
                                   arguments.x_feature_stride};
      const ExpandedRow<T> y = y_of(row);
      for (int64 at = output + lane; at < output + M::OUTPUTS; at += 32)
        y.at(at) = from_float<T>(exact_output<T, P>(arguments, x, at));
    }
  }
}
