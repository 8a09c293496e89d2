// A product that the table of decisions knows, for the files of the library that are made with ATen.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace ksopt {

// y = x K^T of a weight that is about to change, if `launch_known` can compute it; else null. The handle of y
// belongs to the caller.
AtenTensorHandle multiply_known(AtenTensorHandle x, AtenTensorHandle weight, bool batch_last, bool exact);

}  // namespace ksopt
