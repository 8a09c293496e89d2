// The torch operations that plans call beside kernels: torch's own products, and the epilogue of a product.
//
// The definitions are compiled with ATen: the stable ABI has no bmm_out and no add_. Handles of results belong to the
// caller.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace ksopt {

// One batched product; one for each i or each j, batch last; by the weight as it is, torch's einsum, in either
// order of its operands; one with the weight on the left, batch first; and, by the weight as it is, a grouped
// convolution, where d is 1.
enum class TorchWay : int64_t { batched, loop, einsum, einsum_weight_first, bmm_weight_first, conv };

constexpr int64_t NO_PLAN = -1;  // instead of a plan's index

// How torch multiplies by a weight: by a*d matrices [b, c], those of its pattern or, where they hold zeros, too, of
// larger blocks. Where the weight's elements lie in them is known of ksopt/batched.py (`Matrices`).
struct TorchProduct {
  TorchWay way;
  int64_t a, b, c, d;
  std::array<int64_t, 4> strides;  // of the weight's dims in the memory of the matrices
  bool batch_last;
  // x and y are laid out for the product one group after another, batch first too: MKL takes all groups in one call
  // only where the result is contiguous.
  bool by_groups;
  int64_t before, after;  // plans of kernels that transpose x and y; NO_PLAN: torch copies them
  int64_t repair;         // plan of the kernel that mends what zeros spoil; NO_PLAN: who looks at y sees it

  int64_t groups() const { return a * d; }
  bool operator==(const TorchProduct&) const = default;
};

// Whether a weight need not be prepared.
bool takes_as_it_is(const TorchProduct& product, AtenTensorHandle weight);

// y = x K^T. x: (*batch, N) or, batch last, (N, *batch), contiguous, not empty; weight: (a, b, c, d); prepared: its
// matrices, or null to prepare them; out: as for `launch_plan`, or null. Null where that takes Python: a kernel that was
// not compiled yet, or, without one that repairs it, a result that is not finite where the matrices hold zeros (times
// infinity, they are NaN).
AtenTensorHandle multiply_by_torch(const TorchProduct& product, AtenTensorHandle x, AtenTensorHandle weight,
                                   AtenTensorHandle prepared, AtenTensorHandle out);

// y = x matrixᵀ + bias. x as above; matrix: (M, N); bias: (M,), or null; out: as above.
AtenTensorHandle multiply_by_matrix(AtenTensorHandle x, AtenTensorHandle matrix, AtenTensorHandle bias,
                                    bool batch_last, AtenTensorHandle out);

// A weight in the order [a, d, b, c].
AtenTensorHandle by_groups(AtenTensorHandle weight);

// Launches a kernel's plan on `from`, whose result goes to `to`; whether that can be done (kernel_table.hpp).
bool launch_into(int64_t plan, AtenTensorHandle from, AtenTensorHandle weight, AtenTensorHandle to);

// The activations of csrc/cuda/common/epilogue.cuh.
enum class Activation : int64_t { none, relu, gelu, gelu_tanh, silu };

// y = act(y + bias) + residual, in y's memory; bias and residual may be null.
void add_epilogue(AtenTensorHandle y, AtenTensorHandle bias, Activation activation, AtenTensorHandle residual,
                  bool batch_last);

// A 16-bit tensor in float32; any other as it is.
AtenTensorHandle in_float32(AtenTensorHandle y);

// act(first + its half of the bias) * (second + its half), which are written over; bias and out may be null.
AtenTensorHandle gate(AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle bias, Activation activation,
                      bool batch_last, AtenTensorHandle out);

// The halves of y's features, as views.
std::pair<AtenTensorHandle, AtenTensorHandle> halves(AtenTensorHandle y, bool batch_last);

// The results of siblings, side by side; out may be null.
AtenTensorHandle side_by_side(const std::vector<AtenTensorHandle>& parts, bool batch_last, AtenTensorHandle out);

}  // namespace ksopt
