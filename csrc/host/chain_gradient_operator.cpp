// The kernel of ks_chain_weight_grads on CUDA: a call that is known runs without Python, as in product_kernels.cpp.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <optional>

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

void weight_grads_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t COUNT = 9;
  const c10::IValue* const arguments = &(*stack)[stack->size() - COUNT];
  const Tensor &grad = arguments[0].toTensor(), &between = arguments[1].toTensor();
  const Tensor &grad_between = arguments[2].toTensor(), &x = arguments[3].toTensor();
  const ksopt::ChainRows rows{ksopt::handle_of(&grad),
                              ksopt::handle_of(&between),
                              ksopt::handle_of(&grad_between),
                              ksopt::handle_of(&x),
                              {arguments[4].toInt(), arguments[6].toInt()},
                              {arguments[5].toInt(), arguments[7].toInt()},
                              arguments[8].toBool()};
  ksopt::KnownChainGradients results{};
  if (fit(grad, between, rows.a[0], rows.d[0]) && fit(grad_between, x, rows.a[1], rows.d[1]) &&
      fit(grad, grad_between, 1, 1)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = ksopt::chain_gradients_known(rows);
  }
  if (results.left == nullptr) {
    python_weight_grads()->callBoxed(handle, keys, stack);
    return;
  }
  const Tensor no_bias = rows.with_bias ? Tensor() : grad.new_empty({0});
  torch::jit::drop(*stack, COUNT);
  for (AtenTensorHandle one : {results.left, results.right, results.bias}) {
    const std::unique_ptr<Tensor> owned(reinterpret_cast<Tensor*>(one));
    torch::jit::push(*stack, owned ? *owned : no_bias);
  }
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
