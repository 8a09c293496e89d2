// The kernels of ks_chain_input_grad on CUDA: a call that is known runs without Python.
//
// As in product_kernels.cpp; Python's kernels (ksopt/ops/input_gradient.py) stay registered below these.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>

#include "input_gradient.hpp"
#include "python_kernels.hpp"

namespace {

using at::Tensor;
using torch::jit::Stack;

// Python's, without and with an activation. Never freed: what they hold belongs to the interpreter, which ends first.
std::optional<c10::SafeKernelFunction>& python_input_grad(bool activated) {
  static auto* kernels = new std::array<std::optional<c10::SafeKernelFunction>, 2>;
  return (*kernels)[activated];
}

// The results of the operator, if a kernel is in the table and no cached form is dropped; else none.
std::vector<Tensor> known(const std::vector<Tensor>& grads, const std::vector<Tensor>& weights, const Tensor* packed,
                          const Tensor* below, const Tensor* bias, const std::string& activation) {
  const bool is_ordinary = ksopt::are_ordinary(grads, weights) && (below == nullptr || !below->is_neg()) &&
                           (bias == nullptr || !bias->is_neg());
  if (!is_ordinary) return {};
  try {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto known = ksopt::input_gradient_known(ksopt::handles_of(grads), ksopt::handles_of(weights),
                                                   ksopt::handle_of(packed), ksopt::handle_of(below),
                                                   ksopt::handle_of(bias), activation);
    if (!known.gradients.empty()) ksopt::count_forgotten();
    return ksopt::taken(known.gradients);
  } catch (const std::exception&) {  // the Python path reports the error
    return {};
  }
}

template <bool ACTIVATED>
void input_grad_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t COUNT_OF_ARGUMENTS = ACTIVATED ? 5 : 3;
  const c10::IValue* arguments = &(*stack)[stack->size() - COUNT_OF_ARGUMENTS];
  const auto tensor = [&](size_t at) { return arguments[at].isNone() ? nullptr : &arguments[at].toTensor(); };
  auto gradients = known(arguments[0].toTensorVector(), arguments[1].toTensorVector(), ACTIVATED ? nullptr : tensor(2),
                         ACTIVATED ? tensor(2) : nullptr, ACTIVATED ? tensor(3) : nullptr,
                         ACTIVATED ? arguments[4].toStringRef() : "none");
  if (gradients.empty()) {
    python_input_grad(ACTIVATED)->callBoxed(handle, keys, stack);
    return;
  }
  torch::jit::drop(*stack, COUNT_OF_ARGUMENTS);
  for (Tensor& one : gradients) torch::jit::push(*stack, std::move(one));
}

// Registers the kernels above Python's, or takes them away again.
void serve_input_gradients(bool served) {
  static std::mutex mutex;
  static auto* library = new std::unique_ptr<torch::Library>;
  const std::scoped_lock lock(mutex);
  if (served == (*library != nullptr)) return;
  library->reset();
  if (!served) return;
  const auto key = c10::DispatchKey::CUDA;
  python_input_grad(false).emplace(ksopt::python_kernel("ksopt::ks_chain_input_grad", "", key));
  python_input_grad(true).emplace(ksopt::python_kernel("ksopt::ks_chain_input_grad", "activated", key));
  // Torch warns of every kernel that overrides another: here that is intended.
  ksopt::Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const c10::WarningUtils::WarnAlways not_once(true);
  *library = std::make_unique<torch::Library>(torch::Library::IMPL, "ksopt", key, __FILE__, __LINE__);
  (*library)->impl("ks_chain_input_grad", torch::CppFunction::makeFromBoxedFunction<&input_grad_kernel<false>>());
  (*library)->impl("ks_chain_input_grad.activated",
                   torch::CppFunction::makeFromBoxedFunction<&input_grad_kernel<true>>());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ksopt_host, m) { m.def("serve_input_gradients(bool served) -> ()", serve_input_gradients); }
