// The gradient of the input of a trained chain, or of siblings, in one launch, for the files of the library compiled
// with ATen.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <string>
#include <vector>

namespace ksopt {

// The gradients of x and of the values between the chains' two factors, and whether their launch is known: then none
// mean several launches: one per factor of a chain, those of each sibling. The handles belong to the caller.
struct KnownInputGradient {
  bool is_known;
  std::vector<AtenTensorHandle> gradients;
};

// Of grads [*batch, b1*d1], and weights [1,b1,c1,d1] and [a2,b2,c2,1], of each sibling. packed: the weights packed for
// as many rows, or null. below: what a factor read, of whose product, plus the bias if any, x is an activation; its
// weight is the last one. Then the gradient of what is activated replaces x's.
KnownInputGradient input_gradient_known(const std::vector<AtenTensorHandle>& grads,
                                        const std::vector<AtenTensorHandle>& weights, AtenTensorHandle packed,
                                        AtenTensorHandle below = nullptr, AtenTensorHandle bias = nullptr,
                                        const std::string& activation = "none");
void forget_input_gradients();

}  // namespace ksopt
