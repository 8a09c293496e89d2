// The kernel of ks_chain_input_grad on CUDA: a call that is known runs without Python.
//
// As in product_kernels.cpp; Python's kernel (ksopt/ops/input_gradient.py) stays registered below this one.
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

constexpr const char* NAME = "ks_chain_input_grad";

// Python's. Never freed: what it holds belongs to the interpreter, which ends first.
std::optional<c10::SafeKernelFunction>& python_input_grad() {
  static auto* kernel = new std::optional<c10::SafeKernelFunction>;
  return *kernel;
}

// The gradients of x and of the values between the factors, if a kernel is in the table and no cached form is dropped.
std::optional<std::array<Tensor, 2>> known(const std::vector<Tensor>& grads, const std::vector<Tensor>& weights,
                                           const Tensor* packed) {
  if (!ksopt::are_ordinary(grads, weights)) return std::nullopt;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto gradients = ksopt::input_gradient_known(ksopt::handles_of(grads), ksopt::handles_of(weights),
                                                       ksopt::handle_of(packed));
    if (gradients.of_x == nullptr) return std::nullopt;
    const std::unique_ptr<Tensor> of_x(reinterpret_cast<Tensor*>(gradients.of_x));
    const std::unique_ptr<Tensor> of_between(reinterpret_cast<Tensor*>(gradients.of_between));
    ksopt::count_forgotten();
    return std::array{*of_x, *of_between};
  } catch (const std::exception&) {  // the Python path reports the error
    return std::nullopt;
  }
}

void input_grad_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t COUNT_OF_ARGUMENTS = 3;
  const c10::IValue* arguments = &(*stack)[stack->size() - COUNT_OF_ARGUMENTS];
  const c10::IValue& packed = arguments[2];
  auto gradients = known(arguments[0].toTensorVector(), arguments[1].toTensorVector(),
                         packed.isNone() ? nullptr : &packed.toTensor());
  if (!gradients) {
    python_input_grad()->callBoxed(handle, keys, stack);
    return;
  }
  torch::jit::drop(*stack, COUNT_OF_ARGUMENTS);
  for (Tensor& one : *gradients) torch::jit::push(*stack, std::move(one));
}

// Registers the kernel above Python's, or takes it away again.
void serve_input_gradients(bool served) {
  static std::mutex mutex;
  static auto* library = new std::unique_ptr<torch::Library>;
  const std::scoped_lock lock(mutex);
  if (served == (*library != nullptr)) return;
  library->reset();
  if (!served) return;
  const auto key = c10::DispatchKey::CUDA;
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("ksopt::") + NAME).c_str(), "");
  python_input_grad().emplace(handle.getComputedKernelForDispatchKey(key));
  // Torch warns of every kernel that overrides another: here that is intended.
  ksopt::Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const c10::WarningUtils::WarnAlways not_once(true);
  *library = std::make_unique<torch::Library>(torch::Library::IMPL, "ksopt", key, __FILE__, __LINE__);
  (*library)->impl(NAME, torch::CppFunction::makeFromBoxedFunction<&input_grad_kernel>());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ksopt_host, m) { m.def("serve_input_gradients(bool served) -> ()", serve_input_gradients); }
