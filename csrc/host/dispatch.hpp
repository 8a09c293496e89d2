// The interface of the tables of decisions, for the files of the library compiled with ATen.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ksopt {

// A prepared form of a call's weights: of which one (ALL: of all of them together; OF_PRODUCT: of the one factor
// that was prepared of all of them), in which form, and for which stream.
constexpr int64_t ALL = -1, OF_PRODUCT = -2;
struct PreparedWeight {
  AtenTensorHandle tensor;
  int64_t of, form, stream;
};

// The mode of a call, beside its operands.
struct Taken {
  bool batch_last;
  bool exact;     // fp32 products
  bool repacked;  // it is about to change
  bool stored = false;    // of a layer: they are a module's parameters
  bool recorded = false;  // a CUDA graph that is recorded now does not write the first one before the product
};

// y = x K^T, if `launch_known` can compute it; else null. out: may be null. The handle of y belongs to the caller.
AtenTensorHandle multiply_known(AtenTensorHandle x, AtenTensorHandle weight, const Taken& taken,
                                const std::vector<PreparedWeight>& prepared, AtenTensorHandle out);

// The arguments of a layer's operator; bias, residual: may be null.
struct LayerHandles {
  AtenTensorHandle x;
  std::vector<AtenTensorHandle> weights;
  AtenTensorHandle bias, residual;
  const std::string& activation;
  int64_t siblings;
  bool in_float32;  // the result of 16-bit operands
};

// The layer's result, if `run_known_plan` can compute it; else null. As for `multiply_known`.
AtenTensorHandle layer_known(const LayerHandles& layer, const Taken& taken,
                             const std::vector<PreparedWeight>& prepared, AtenTensorHandle out);

// The arguments of the operator of two layers; biases, residual: may be null.
struct MlpHandles {
  AtenTensorHandle x;
  std::vector<AtenTensorHandle> weights;  // of both layers
  size_t factors;                         // of the first one
  AtenTensorHandle hidden_bias, bias, residual;
  const std::string &hidden_activation, &activation;
};

// Its result, if `run_known_mlp` can compute it; else null. As for `multiply_known`.
AtenTensorHandle mlp_known(const MlpHandles& mlp, const Taken& taken, const std::vector<PreparedWeight>& prepared,
                           AtenTensorHandle out);

// The weight gradient of grad and x, batch first, and that of a bias if requested, and whether their launch is known:
// then null handles mean that torch computes them. The handles belong to the caller.
struct KnownGradient {
  bool is_known;
  AtenTensorHandle gradient, bias;
};
KnownGradient weight_gradient_known(AtenTensorHandle grad, AtenTensorHandle x, int64_t a, int64_t d, bool with_bias);

// The y of a trained chain of two factors, or of siblings, the values between the factors and the weights packed for the
// gradient of x, if their launch is known; else none. bias: may be null. packed_of_grad: elements of the packed weights.
// The handles belong to the caller.
std::vector<AtenTensorHandle> trained_chain_known(AtenTensorHandle x, const std::vector<AtenTensorHandle>& weights,
                                                  AtenTensorHandle bias, int64_t siblings,
                                                  const std::string& activation, int64_t packed_of_grad);

}  // namespace ksopt
