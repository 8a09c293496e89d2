// The kernels of two layers on CPU and CUDA: a call whose launch is known runs without Python.
//
// As layer_kernels.cpp, for ks_mlp_inner and ks_mlp.out; all other calls go to Python (ksopt/ops/mlp.py).
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "python_kernels.hpp"

namespace {

// As ksopt/ops/mlp.py defines its operators.
struct MlpOperands {
  const at::Tensor& x;
  std::vector<at::Tensor> weights;  // of both layers
  size_t factors;                   // of the first one
  std::array<const at::Tensor*, 3> summands;  // hidden bias, bias, residual, or null
  const std::string &hidden_activation, &activation;
  std::vector<at::Tensor> owners;  // of each weight, or empty
  const at::Tensor* out;           // or null

  bool require_gradients() const {
    const auto requires_one = [](const at::Tensor& one) { return one.requires_grad(); };
    const auto is_one = [&](const at::Tensor* one) { return one != nullptr && requires_one(*one); };
    return requires_one(x) || is_one(out) || std::any_of(weights.begin(), weights.end(), requires_one) ||
           std::any_of(summands.begin(), summands.end(), is_one);
  }
};

constexpr size_t arguments_of_mlp(bool writes) { return writes ? 10 : 9; }

MlpOperands mlp_of(const torch::jit::Stack& stack, bool writes) {
  const c10::IValue* arguments = &stack[stack.size() - arguments_of_mlp(writes)];
  const auto if_any = [&](size_t at) { return arguments[at].isNone() ? nullptr : &arguments[at].toTensor(); };
  std::vector<at::Tensor> weights = arguments[1].toTensorVector();
  const std::vector<at::Tensor> last = arguments[2].toTensorVector();
  const size_t factors = weights.size();
  weights.insert(weights.end(), last.begin(), last.end());
  return {arguments[0].toTensor(),
          std::move(weights),
          factors,
          {if_any(3), if_any(4), if_any(5)},
          arguments[6].toStringRef(),
          arguments[7].toStringRef(),
          arguments[8].isNone() ? std::vector<at::Tensor>() : arguments[8].toTensorVector(),
          writes ? &arguments[9].toTensor() : nullptr};
}

// The result, where ksopt/ops/mlp.py would take it from the table.
std::optional<at::Tensor> known_mlp(const MlpOperands& mlp, bool repacked) {
  const bool is_ordinary = !at::globalContext().deterministicAlgorithms() &&
                           (mlp.owners.empty() || mlp.owners.size() == mlp.weights.size());
  if (!is_ordinary) return std::nullopt;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<at::Tensor> roots;
    for (size_t at = 0; at < mlp.weights.size(); ++at) {
      roots.push_back(ksopt::root_of(mlp.weights[at], mlp.owners.empty() ? nullptr : &mlp.owners[at]));
    }
    std::vector<ksopt::CachedWeight> cached;  // of weights that change nothing is
    if (!repacked) cached = ksopt::cached_of(mlp.weights, roots);
    ksopt::MlpHandles handles{ksopt::handle_of(&mlp.x),
                              {},
                              mlp.factors,
                              ksopt::handle_of(mlp.summands[0]),
                              ksopt::handle_of(mlp.summands[1]),
                              ksopt::handle_of(mlp.summands[2]),
                              mlp.hidden_activation,
                              mlp.activation};
    for (const at::Tensor& weight : mlp.weights) handles.weights.push_back(ksopt::handle_of(&weight));
    const std::unique_ptr<at::Tensor> y(reinterpret_cast<at::Tensor*>(
        ksopt::mlp_known(handles, {false, ksopt::is_exact(mlp.x), repacked}, ksopt::handles_of(cached),
                         ksopt::handle_of(mlp.out))));
    return y ? std::optional(std::move(*y)) : std::nullopt;
  } catch (const std::exception&) {  // the path that checks and decides reports the error
    return std::nullopt;
  }
}

// Python's, without and with memory to write into.
std::array<std::optional<c10::SafeKernelFunction>, 2>& python_mlps() {
  static auto* kernels = new std::array<std::optional<c10::SafeKernelFunction>, 2>;
  return *kernels;
}

template <bool WRITES>
void mlp_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::optional<at::Tensor> y;
  const MlpOperands mlp = mlp_of(*stack, WRITES);
  // Without owners the weights are computed by the graph and not cached.
  if (const auto repacked = mlp.owners.empty() ? true : ksopt::are_marked_repacked()) {
    const bool records = WRITES && at::GradMode::is_enabled() && mlp.require_gradients();
    if (!records) y = known_mlp(mlp, *repacked);  // which Python refuses in words
    if (y && WRITES) mlp.out->unsafeGetTensorImpl()->bump_version();
  }
  if (!y) {
    python_mlps()[WRITES]->callBoxed(handle, keys, stack);
    return;
  }
  torch::jit::drop(*stack, arguments_of_mlp(WRITES));
  if constexpr (!WRITES) torch::jit::push(*stack, std::move(*y));
}

}  // namespace

namespace ksopt {

void find_python_mlps() {
  python_mlps()[false].emplace(python_kernel("ksopt::ks_mlp_inner", "", c10::DispatchKey::CPU));  // CUDA's, too
  python_mlps()[true].emplace(python_kernel("ksopt::ks_mlp", "out", c10::DispatchKey::CPU));
}

void register_mlps(torch::Library& library) {
  library.impl("ks_mlp_inner", torch::CppFunction::makeFromBoxedFunction<&mlp_kernel<false>>());
  library.impl("ks_mlp.out", torch::CppFunction::makeFromBoxedFunction<&mlp_kernel<true>>());
}

}  // namespace ksopt
