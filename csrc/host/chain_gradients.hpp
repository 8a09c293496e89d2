// The gradients of trained chains' weights and of their biases in one launch, where it is known.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <vector>

namespace torch {
class Library;
}

namespace ksopt {

// Their operands, batch first: of all siblings the gradients of y, of all the values between the factors, of all the
// gradients of these, and x. a and d are of the left factor, then of the right one.
struct ChainRows {
  std::vector<AtenTensorHandle> rows;
  int64_t a[2], d[2];
  bool with_bias;
};

// Those of the weights, sibling after sibling, and behind them those of the biases; none where no launch is known, or
// where it is known that each is launched alone. They belong to the caller.
struct KnownChainGradients {
  bool is_known;
  std::vector<AtenTensorHandle> gradients;
};
KnownChainGradients chain_gradients_known(const ChainRows& rows);
void forget_chain_gradients();

// Keeps Python's kernel of ks_chain_weight_grads, and puts the library's own above it.
void keep_python_chain_gradients();
void serve_chain_gradients(torch::Library& library);

}  // namespace ksopt
