// Arguments of the kernels of whole chains and of those that pack their weights, and the epilogue on the sums of the
// last factor.
#pragma once

#include "common/numeric_types.cuh"

// Strides count elements.
struct ChainArguments {
  const void* x;
  const void* weights;  // of all factors and siblings, packed as the kernel reads them
  const void* bias;      // of all siblings' outputs
  const void* residual;
  void* y;
  int64 batch;
  int64 x_stride, y_stride, residual_stride;  // from a row to the next; batch last, from a feature to the next
  int64 rows_per_block;                       // a multiple of a tile's; blocks of a cluster have a tile, once
  void* z;                                    // values between two factors, [sibling, batch, features], if stored
};

// Arguments of a kernel of two layers. The weights are those of both; bias and residual belong to the second one.
struct MlpArguments : ChainArguments {
  const void* hidden_bias;  // of the first layer's outputs
};

// The arguments of the kernels that pack the weights of chains: of each sibling's factors, in the order in which x
// meets them.
struct ChainPackArguments {
  const void* weights[4][4];
  int64 strides[4][4][4];  // of a, b, c and d, in elements
  void* packed;
  void* packed_of_grad;  // which trained_pack.cuh writes
};

// KEEPS_Z: the values between the factors are also written to memory, for a backward pass; only without
// MIDDLE. GATED: ACTIVATION of the first sibling's product times the second's is written, with the features
// of one. HIDDEN_BIAS: the first of two layers has a bias, added before MIDDLE. IN_FLOAT32: y is of float32; then there
// is no residual.
template <int MIDDLE_, int ACTIVATION_, bool BIAS_, bool RESIDUAL_, bool KEEPS_Z_ = false, bool GATED_ = false,
          bool HIDDEN_BIAS_ = false, bool IN_FLOAT32_ = false>
struct ChainEpilogue {
  static constexpr int MIDDLE = MIDDLE_, ACTIVATION = ACTIVATION_;  // Activation of z and of y
  static constexpr bool BIAS = BIAS_, RESIDUAL = RESIDUAL_, KEEPS_Z = KEEPS_Z_, GATED = GATED_;
  static constexpr bool HIDDEN_BIAS = HIDDEN_BIAS_, IN_FLOAT32 = IN_FLOAT32_;
  static_assert(!(RESIDUAL && IN_FLOAT32), "a residual has the type of what it is added to");
};
