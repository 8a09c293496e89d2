// What a plan calls of torch beside its kernels: products in torch's own ways, and what follows a product.
//
// The definitions are in torch_ops.cpp, the one file of the library that is made with ATen: the stable ABI
// has no add_. Handles of results belong to the caller.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <vector>

namespace ksopt {

// Ways of ksopt/baselines.py, in the order of ksopt/kernels/backends/cpu.py.
enum class TorchWay : int64_t { bmm, bmm_paper, bmm_loop, einsum, expand, dense };

// y = x K^T on a CPU, as cpu.py computes it by this way. x: (*batch, N) or, batch last, (N, *batch), not
// empty; weight: (a, b, c, d); out: as for `launch_plan`, or null.
AtenTensorHandle multiply_by_torch(TorchWay way, AtenTensorHandle x, AtenTensorHandle weight, bool batch_last,
                                   AtenTensorHandle out);

// The activations of csrc/cuda/epilogue.cuh.
enum class Activation : int64_t { none, relu, gelu, gelu_tanh, silu };

// y = act(y + bias) + residual, in y's memory; bias and residual may be null.
void add_epilogue(AtenTensorHandle y, AtenTensorHandle bias, Activation activation, AtenTensorHandle residual,
                  bool batch_last);

// The results of siblings, side by side; out may be null.
AtenTensorHandle side_by_side(const std::vector<AtenTensorHandle>& parts, bool batch_last, AtenTensorHandle out);

}  // namespace ksopt
