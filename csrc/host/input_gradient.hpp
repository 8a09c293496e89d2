// The gradient of the input of a trained chain, or of siblings, in one launch, for the files of the library compiled
// with ATen.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <vector>

namespace ksopt {

// The gradients of x and of the values between the chains' two factors, and whether their launch is known: then null
// handles mean several launches: one per factor of a chain, those of each sibling. The handles belong to the caller.
struct KnownInputGradient {
  bool is_known;
  AtenTensorHandle of_x, of_between;
};

// Of grads [*batch, b1*d1], and weights [1,b1,c1,d1] and [a2,b2,c2,1], of each sibling. packed: the weights packed for
// as many rows, or null.
KnownInputGradient input_gradient_known(const std::vector<AtenTensorHandle>& grads,
                                        const std::vector<AtenTensorHandle>& weights, AtenTensorHandle packed);
void forget_input_gradients();

}  // namespace ksopt
