// The kernels of ksopt's products on CPU and CUDA: a call that is known runs without Python.
//
// Compiled graphs call these operators, some hundred times in a step of training. Calls that are in no table, or whose
// operands are unusual, go to Python's kernel (ksopt/ops/implementation.py), which stays registered below this one.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "chain_gradients.hpp"
#include "python_kernels.hpp"

namespace {

using at::Tensor;
using ksopt::handle_of;
using torch::jit::Stack;

// The operators, as `NAMES` and ksopt/ops/schemas.py name them.
enum Operator : size_t { INNER, FROZEN, REPACKED, INNER_OUT, REPACKED_OUT, COUNT };
constexpr std::array<const char*, COUNT> NAMES = {"ks_mm_inner", "ks_mm_frozen", "ks_mm_repacked", "ks_mm_inner.out",
                                                  "ks_mm_repacked.out"};
constexpr bool writes(Operator op) { return op == INNER_OUT || op == REPACKED_OUT; }
constexpr bool is_repacked(Operator op) { return op == REPACKED || op == REPACKED_OUT; }

// Python's. Never freed: what they hold belongs to the interpreter, which ends first.
using Kernels = std::array<std::optional<c10::SafeKernelFunction>, COUNT>;
Kernels& python_kernels() {
  static auto* kernels = new Kernels;
  return *kernels;
}

struct Call {
  const Tensor& x;
  const Tensor& weight;
  bool batch_last;
  const Tensor* owner;  // or null
  const Tensor* out;    // or null
};

Call call_of(Operator op, const Stack& stack) {
  const c10::IValue* arguments = &stack[stack.size() - (writes(op) ? 5 : 4)];
  const c10::IValue& owner = arguments[writes(op) ? 2 : 3];
  return {arguments[0].toTensor(), arguments[1].toTensor(), arguments[writes(op) ? 3 : 2].toBool(),
          owner.isNone() ? nullptr : &owner.toTensor(), writes(op) ? &arguments[4].toTensor() : nullptr};
}

// y, where ksopt/ops/implementation.py (product, frozen, repacked) would take it from the tables.
std::optional<Tensor> known(const Call& call, bool repacked) {
  if (at::globalContext().deterministicAlgorithms()) return std::nullopt;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<ksopt::CachedWeight> cached;  // of a weight that changes nothing is
    bool recorded = false;
    if (!repacked) {
      const Tensor root = ksopt::root_of(call.weight, call.owner);
      cached = ksopt::cached_of(call.weight, root);
      recorded = call.owner != nullptr && ksopt::was_seen(call.weight, root) && ksopt::are_marked_recorded();
    }
    const std::unique_ptr<Tensor> y(reinterpret_cast<Tensor*>(
        ksopt::multiply_known(handle_of(&call.x), handle_of(&call.weight),
                              {call.batch_last, ksopt::is_exact(call.x), repacked, false, recorded},
                              ksopt::handles_of(cached), handle_of(call.out))));
    return y ? std::optional(std::move(*y)) : std::nullopt;
  } catch (const std::exception&) {  // the path that checks and decides reports the error
    return std::nullopt;
  }
}

// The calls that the kernels serve without Python.
std::optional<Tensor> served(Operator op, const Call& call) {
  const bool records = call.out != nullptr && at::GradMode::is_enabled() &&
                       (call.x.requires_grad() || call.weight.requires_grad() || call.out->requires_grad());
  if (records) return std::nullopt;  // which Python refuses in words
  if (!is_repacked(op)) {
    // Without an owner the weight is computed by the graph and not cached.
    const auto repacked = call.owner == nullptr ? true : ksopt::are_marked_repacked();
    return repacked ? known(call, *repacked) : std::nullopt;
  }
  // Where forms of the weight are cached, Python drops them.
  if (ksopt::may_be_cached(ksopt::root_of(call.owner == nullptr ? call.weight : *call.owner))) return std::nullopt;
  auto y = known(call, true);
  if (y) ksopt::count_forgotten();
  return y;
}

template <Operator op>
void kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const Call call = call_of(op, *stack);
  std::optional<Tensor> y = served(op, call);
  if (!y) {
    python_kernels()[op]->callBoxed(handle, keys, stack);
  } else if constexpr (writes(op)) {
    call.out->unsafeGetTensorImpl()->bump_version();
    torch::jit::drop(*stack, 5);
  } else {
    torch::jit::drop(*stack, 4);
    torch::jit::push(*stack, std::move(*y));
  }
}

template <Operator op>
void register_in(torch::Library& library) {
  library.impl(NAMES[op], torch::CppFunction::makeFromBoxedFunction<&kernel<op>>());
}

// The known product, for eager products, which enter Python. Where the weight is cached, this thread is in no scope of
// changing weights; that a weight changes may also follow from the operator.
std::optional<Tensor> run_product(const Tensor& x, const Tensor& weight, bool batch_last,
                                  const std::optional<Tensor>& owner, bool repacked,
                                  const std::optional<Tensor>& out) {
  if (!repacked) ksopt::mark_repacked(false);
  return known({x, weight, batch_last, owner ? &*owner : nullptr, out ? &*out : nullptr}, repacked);
}

// ks_mm_weight_grad_inner and ks_mm_weight_bias_grad_inner, on CUDA.
std::optional<c10::SafeKernelFunction>& python_weight_grad(bool with_bias) {
  static auto* kernels = new std::array<std::optional<c10::SafeKernelFunction>, 2>;
  return (*kernels)[with_bias];
}

template <bool WITH_BIAS>
void weight_grad_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t COUNT_OF_ARGUMENTS = WITH_BIAS ? 4 : 5;
  const c10::IValue* arguments = &(*stack)[stack->size() - COUNT_OF_ARGUMENTS];
  const Tensor &grad = arguments[0].toTensor(), &x = arguments[1].toTensor();
  const int64_t a = arguments[2].toInt(), d = arguments[3].toInt();
  const bool is_batch_first = WITH_BIAS || !arguments[4].toBool();
  const bool fits = is_batch_first && a > 0 && d > 0 && x.dim() > 0 && x.numel() > 0 && !x.is_neg() &&
                    !grad.is_neg() && grad.scalar_type() == x.scalar_type() && grad.device() == x.device() &&
                    grad.sizes().slice(0, grad.dim() - 1) == x.sizes().slice(0, x.dim() - 1) &&
                    grad.size(-1) % (a * d) == 0 && x.size(-1) % (a * d) == 0;
  ksopt::KnownGradient known{};
  if (fits) {
    const at::AutoDispatchBelowADInplaceOrView below;
    known = ksopt::weight_gradient_known(handle_of(&grad), handle_of(&x), a, d, WITH_BIAS);
  }
  if (known.gradient == nullptr) {
    python_weight_grad(WITH_BIAS)->callBoxed(handle, keys, stack);
    return;
  }
  torch::jit::drop(*stack, COUNT_OF_ARGUMENTS);
  for (AtenTensorHandle one : {known.gradient, known.bias}) {
    const std::unique_ptr<Tensor> owned(reinterpret_cast<Tensor*>(one));
    if (owned) torch::jit::push(*stack, *owned);
  }
}

// ks_chain_keeping, on CUDA.
std::optional<c10::SafeKernelFunction>& python_chain_keeping() {
  static auto* kernel = new std::optional<c10::SafeKernelFunction>;
  return *kernel;
}

// y and the tensors that the backward pass reads, where ksopt/ops/trained_chain.py would launch a kernel that is in
// the table, and no cached form is dropped; else none.
std::vector<Tensor> known_chain(const Tensor& x, const std::vector<Tensor>& weights, const Tensor* bias,
                                int64_t siblings, const std::string& activation, int64_t packed_of_grad) {
  const bool is_ordinary = !at::globalContext().deterministicAlgorithms() && (bias == nullptr || !bias->is_neg()) &&
                           ksopt::are_ordinary({x}, weights);
  if (!is_ordinary) return {};
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto known = ksopt::trained_chain_known(handle_of(&x), ksopt::handles_of(weights), handle_of(bias), siblings,
                                                  activation, packed_of_grad);
    if (!known.empty()) ksopt::count_forgotten();
    return ksopt::taken(known);
  } catch (const std::exception&) {  // the Python path reports the error
    return {};
  }
}

void chain_keeping_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t COUNT_OF_ARGUMENTS = 6;
  const c10::IValue* arguments = &(*stack)[stack->size() - COUNT_OF_ARGUMENTS];
  const c10::IValue& bias = arguments[2];
  auto known = known_chain(arguments[0].toTensor(), arguments[1].toTensorVector(),
                           bias.isNone() ? nullptr : &bias.toTensor(), arguments[3].toInt(),
                           arguments[4].toStringRef(), arguments[5].toInt());
  if (known.empty()) {
    python_chain_keeping()->callBoxed(handle, keys, stack);
    return;
  }
  torch::jit::drop(*stack, COUNT_OF_ARGUMENTS);
  for (Tensor& one : known) torch::jit::push(*stack, std::move(one));
}

// Registers the kernels above Python's, or takes them away again.
void serve_products(bool served) {
  static std::mutex mutex;
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>;
  const std::scoped_lock lock(mutex);
  if (served == !libraries->empty()) return;
  libraries->clear();
  if (!served) return;
  for (size_t op = 0; op < COUNT; ++op) {
    const std::string name = NAMES[op];
    const size_t dot = std::min(name.find('.'), name.size());
    const auto overload = dot < name.size() ? name.substr(dot + 1) : std::string();
    python_kernels()[op].emplace(ksopt::python_kernel(("ksopt::" + name.substr(0, dot)).c_str(), overload.c_str(),
                                                      c10::DispatchKey::CPU));  // CUDA's, too
  }
  const auto of_cuda = [](const char* name) { return ksopt::python_kernel(name, "", c10::DispatchKey::CUDA); };
  python_weight_grad(false).emplace(of_cuda("ksopt::ks_mm_weight_grad_inner"));
  python_weight_grad(true).emplace(of_cuda("ksopt::ks_mm_weight_bias_grad_inner"));
  python_chain_keeping().emplace(of_cuda("ksopt::ks_chain_keeping"));
  ksopt::keep_python_chain_gradients();
  ksopt::find_python_layers();
  ksopt::find_python_mlps();
  // Torch warns of every kernel that overrides another: here that is intended.
  ksopt::Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const c10::WarningUtils::WarnAlways not_once(true);
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    auto& library = *libraries->emplace_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "ksopt", key, __FILE__, __LINE__));
    register_in<INNER>(library);
    register_in<FROZEN>(library);
    register_in<REPACKED>(library);
    register_in<INNER_OUT>(library);
    register_in<REPACKED_OUT>(library);
    ksopt::register_layers(library);
    ksopt::register_mlps(library);
    if (key == c10::DispatchKey::CUDA) {
      library.impl("ks_mm_weight_grad_inner", torch::CppFunction::makeFromBoxedFunction<&weight_grad_kernel<false>>());
      library.impl("ks_mm_weight_bias_grad_inner",
                   torch::CppFunction::makeFromBoxedFunction<&weight_grad_kernel<true>>());
      ksopt::serve_chain_gradients(library);
      library.impl("ks_chain_keeping", torch::CppFunction::makeFromBoxedFunction<&chain_keeping_kernel>());
    }
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def("serve_products(bool served) -> ()", serve_products);
  m.def(
      "run_product(Tensor x, Tensor weight, bool batch_last, Tensor? owner, bool repacked, Tensor? out=None) -> "
      "Tensor?",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, run_product));
}

// Past autograd, whose own fallback would make an owner that requires gradients require them of y.
TORCH_LIBRARY_IMPL(ksopt_host, Autograd, m) {
  m.impl("run_product", torch::CppFunction::makeFallthrough());
  m.impl("run_layer", torch::CppFunction::makeFallthrough());
}
