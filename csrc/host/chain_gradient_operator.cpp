// The kernel of ks_chain_weight_grads on CUDA: a call that is known runs without Python, as in product_kernels.cpp.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "chain_gradients.hpp"
#include "python_kernels.hpp"

namespace {

using at::Tensor;
using torch::jit::Stack;

// Never freed: what it holds belongs to the interpreter, which ends first.
std::optional<c10::SafeKernelFunction>& python_weight_grads() {
  static auto* kernel = new std::optional<c10::SafeKernelFunction>;
  return *kernel;
}

// Whether the operands of the gradients have fitting shapes, dtypes and devices.
bool fit(const Tensor& grad, const Tensor& x, int64_t a, int64_t d) {
  return a > 0 && d > 0 && x.dim() > 0 && x.numel() > 0 && grad.numel() > 0 && !x.is_neg() && !grad.is_neg() &&
         grad.scalar_type() == x.scalar_type() && grad.device() == x.device() &&
         grad.sizes().slice(0, grad.dim() - 1) == x.sizes().slice(0, x.dim() - 1) && grad.size(-1) % (a * d) == 0 &&
         x.size(-1) % (a * d) == 0;
}

// Whether those of all siblings do, and have one shape.
bool fit(const std::vector<Tensor>& rows, size_t siblings, const ksopt::ChainRows& of) {
  if (siblings == 0 || rows.size() != 3 * siblings + 1) return false;
  for (size_t at = 0; at < siblings; ++at) {
    const Tensor &grad = rows[at], &between = rows[siblings + at], &grad_between = rows[2 * siblings + at];
    if (!fit(grad, between, of.a[0], of.d[0]) || !fit(grad_between, rows.back(), of.a[1], of.d[1]) ||
        !fit(grad, grad_between, 1, 1) || grad.sizes() != rows[0].sizes() ||
        between.sizes() != rows[siblings].sizes() || grad_between.sizes() != rows[2 * siblings].sizes()) {
      return false;
    }
  }
  return true;
}

void weight_grads_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t COUNT = 9;
  const c10::IValue* const arguments = &(*stack)[stack->size() - COUNT];
  std::vector<Tensor> rows = arguments[0].toTensorVector();
  const size_t siblings = rows.size();
  bool is_each = true;
  for (size_t at : {1, 2}) {
    const std::vector<Tensor> several = arguments[at].toTensorVector();
    is_each = is_each && several.size() == siblings;
    rows.insert(rows.end(), several.begin(), several.end());
  }
  rows.push_back(arguments[3].toTensor());
  ksopt::ChainRows of{{},
                      {arguments[4].toInt(), arguments[6].toInt()},
                      {arguments[5].toInt(), arguments[7].toInt()},
                      arguments[8].toBool()};
  ksopt::KnownChainGradients known{};
  if (is_each && fit(rows, siblings, of)) {
    for (const Tensor& one : rows) of.rows.push_back(ksopt::handle_of(&one));
    const at::AutoDispatchBelowADInplaceOrView below;
    known = ksopt::chain_gradients_known(of);
  }
  if (known.gradients.empty()) {
    python_weight_grads()->callBoxed(handle, keys, stack);
    return;
  }
  torch::jit::drop(*stack, COUNT);
  torch::jit::push(*stack, ksopt::taken(known.gradients));
}

}  // namespace

void ksopt::keep_python_chain_gradients() {
  python_weight_grads().emplace(c10::Dispatcher::singleton()
                              .findSchemaOrThrow("ksopt::ks_chain_weight_grads", "")
                              .getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
}

void ksopt::serve_chain_gradients(torch::Library& library) {
  library.impl("ks_chain_weight_grads", torch::CppFunction::makeFromBoxedFunction<&weight_grads_kernel>());
}
