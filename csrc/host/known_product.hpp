// A product that the table of decisions knows, for the files of the library that are made with ATen.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace ksopt {

// A weight in a form, and the stream that may read it.
struct PreparedWeight {
  AtenTensorHandle tensor;
  int64_t form, stream;
};

// How a product's weight is taken, beside its operands.
struct Taken {
  bool batch_last;
  bool exact;     // fp32 products
  bool changing;  // it is about to change
};

// y = x K^T, if `launch_known` can compute it; else null. prepared, out: may be null. The handle of y belongs to
// the caller.
AtenTensorHandle multiply_known(AtenTensorHandle x, AtenTensorHandle weight, const Taken& taken,
                                const PreparedWeight* prepared, AtenTensorHandle out);

// The weight gradient of grad and x, batch first, and that of a bias where it is wanted; and whether their launch is
// known: then no handles say that torch computes them. The handles belong to the caller.
struct KnownGradient {
  bool is_known;
  AtenTensorHandle gradient, bias;
};
KnownGradient weight_gradient_known(AtenTensorHandle grad, AtenTensorHandle x, int64_t a, int64_t d, bool with_bias);

// A trained chain's y and what is between its two factors, if their launch is known; else null. bias: may be
// null. The handles belong to the caller.
struct KnownChain {
  AtenTensorHandle y, between;
};
KnownChain trained_chain_known(AtenTensorHandle x, AtenTensorHandle left, AtenTensorHandle right,
                               AtenTensorHandle bias);

}  // namespace ksopt
