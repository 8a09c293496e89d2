// The gradients of a trained chain's two weights and of its bias in one launch, where it is known.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace torch {
class Library;
}

namespace ksopt {

// Their operands, batch first: the gradients of y and of the values between the factors, and the inputs of the
// factors. a and d are of the left factor, then of the right one.
struct ChainRows {
  AtenTensorHandle grad, between, grad_between, x;
  int64_t a[2], d[2];
  bool with_bias;
};

// No handles where no launch is known, or where it is known that each factor's is launched alone. They belong to
// the caller.
struct KnownChainGradients {
  bool is_known;
  AtenTensorHandle left, right, bias;
};
KnownChainGradients chain_gradients_known(const ChainRows& rows);
void forget_chain_gradients();

// Keeps Python's kernel of ks_chain_weight_grads, and puts the library's own above it.
void keep_python_chain_gradients();
void serve_chain_gradients(torch::Library& library);

}  // namespace ksopt
