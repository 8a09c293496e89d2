// The parameters of every kernel: the pattern at compile time, addresses and strides at run time.
#pragma once

#include "common/numeric_types.cuh"

// The support I_a (x) 1_{b x c} (x) I_d.
template <int A_, int B_, int C_, int D_> struct Pattern {
  static constexpr int A = A_, B = B_, C = C_, D = D_;
};

// Filled by csrc/host/kernel_table.hpp; the two must agree byte for byte. Strides count elements.
struct Arguments {
  const void* x;
  const void* weight;
  void* y;
  int64 batch;
  int64 x_batch_stride, x_feature_stride;
  int64 y_batch_stride, y_feature_stride;
  int64 weight_stride_a, weight_stride_b, weight_stride_c, weight_stride_d;
  int64 weight_is_settled;  // whether the weight's writer has ended when the kernel starts, even if it starts early
};

// The same of kernels with an epilogue. The residual lies in memory as y does.
struct EpilogueArguments : Arguments {
  const void* bias;
  const void* residual;
};
