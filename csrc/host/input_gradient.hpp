// The gradient of a trained chain's input, in one launch, for the files of the library compiled with ATen.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace ksopt {

// The gradients of x and of the values between a chain's two factors, and whether their launch is known: then null
// handles mean one launch per factor. The handles belong to the caller.
struct KnownInputGradient {
  bool is_known;
  AtenTensorHandle of_x, of_between;
};

// Of grad [*batch, b1*d1], left [1,b1,c1,d1] and right [a2,b2,c2,1]. packed: both packed for as many rows, or null.
KnownInputGradient input_gradient_known(AtenTensorHandle grad, AtenTensorHandle left, AtenTensorHandle right,
                                        AtenTensorHandle packed);
void forget_input_gradients();

}  // namespace ksopt
