// The gradient of what a trained chain reads, in one launch, for the files of the library that are made with ATen.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace ksopt {

// The gradients of x and of what is between a chain's two factors; and whether it is known how they are computed:
// then no handles say by a launch a factor. The handles belong to the caller.
struct KnownInputGradient {
  bool is_known;
  AtenTensorHandle of_x, of_between;
};

// Of grad [*batch, b1*d1], left [1,b1,c1,d1] and right [a2,b2,c2,1].
KnownInputGradient input_gradient_known(AtenTensorHandle grad, AtenTensorHandle left, AtenTensorHandle right);

}  // namespace ksopt
