// The kernels of whole layers on CPU and CUDA: a call whose plan is known runs without Python.
//
// Compiled graphs of inference call them; eager layers call their lookup (`run_layer`). As in product_kernels.cpp, all
// other calls go to Python (ksopt/ops/implementation.py).
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

using at::Tensor;
using torch::jit::Stack;

// As ksopt/ops/chain.py defines its operators.
struct Layer {
  const Tensor& x;
  std::vector<Tensor> weights;
  const Tensor* bias;      // or null
  const Tensor* residual;  // or null
  const std::string& activation;
  bool batch_last;
  int64_t siblings;
  std::vector<Tensor> owners;  // of each weight, or empty
  bool in_float32;             // the result of 16-bit operands
  const Tensor* out;           // or null

  template <typename Predicate>
  bool any(const Predicate& is) const {
    const auto is_one = [&](const Tensor* one) { return one != nullptr && is(*one); };
    return is(x) || std::any_of(weights.begin(), weights.end(), is) || is_one(bias) || is_one(residual) || is_one(out);
  }
};

const Tensor* tensor_if_any(const c10::IValue& value) { return value.isNone() ? nullptr : &value.toTensor(); }

const Tensor* tensor_if_any(const std::optional<Tensor>& value) { return value ? &*value : nullptr; }

constexpr size_t arguments_of(bool writes) { return writes ? 10 : 9; }

Layer layer_of(const Stack& stack, bool writes) {
  const c10::IValue* arguments = &stack[stack.size() - arguments_of(writes)];
  return {arguments[0].toTensor(),
          arguments[1].toTensorVector(),
          tensor_if_any(arguments[2]),
          tensor_if_any(arguments[3]),
          arguments[4].toStringRef(),
          arguments[5].toBool(),
          arguments[6].toInt(),
          arguments[7].isNone() ? std::vector<Tensor>() : arguments[7].toTensorVector(),
          arguments[8].toBool(),
          writes ? &arguments[9].toTensor() : nullptr};
}

// Whether an earlier call had the values of the weight that multiplies first.
bool was_first_seen(const Layer& layer, const std::vector<Tensor>& roots) {
  const size_t siblings = layer.siblings > 0 ? static_cast<size_t>(layer.siblings) : 1;
  if (layer.weights.size() < siblings) return false;
  const size_t first = layer.weights.size() / siblings - 1;
  return ksopt::was_seen(layer.weights[first], roots[first]);
}

std::vector<Tensor> roots_of(const Layer& layer) {
  std::vector<Tensor> roots;
  for (size_t at = 0; at < layer.weights.size(); ++at) {
    roots.push_back(ksopt::root_of(layer.weights[at], layer.owners.empty() ? nullptr : &layer.owners[at]));
  }
  return roots;
}

// y, where ksopt/ops/implementation.py (chain) would take it from the table.
std::optional<Tensor> known(const Layer& layer, bool repacked, bool stored) {
  const bool is_ordinary = !at::globalContext().deterministicAlgorithms() &&
                           (layer.owners.empty() || layer.owners.size() == layer.weights.size());
  if (!is_ordinary) return std::nullopt;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<ksopt::CachedWeight> cached;  // of weights that change nothing is
    bool recorded = false;
    if (!repacked) {
      const std::vector<Tensor> roots = roots_of(layer);
      cached = ksopt::cached_of(layer.weights, roots);
      recorded = stored && was_first_seen(layer, roots) && ksopt::are_marked_recorded();
    }
    ksopt::LayerHandles handles{ksopt::handle_of(&layer.x), {}, ksopt::handle_of(layer.bias),
                                ksopt::handle_of(layer.residual), layer.activation, layer.siblings, layer.in_float32};
    handles.weights = ksopt::handles_of(layer.weights);
    const std::unique_ptr<Tensor> y(reinterpret_cast<Tensor*>(
        ksopt::layer_known(handles, {layer.batch_last, ksopt::is_exact(layer.x), repacked, stored, recorded},
                           ksopt::handles_of(cached), ksopt::handle_of(layer.out))));
    return y ? std::optional(std::move(*y)) : std::nullopt;
  } catch (const std::exception&) {  // the path that checks and decides reports the error
    return std::nullopt;
  }
}

// Python's, without and with memory to write into.
std::array<std::optional<c10::SafeKernelFunction>, 2>& python_layers() {
  static auto* kernels = new std::array<std::optional<c10::SafeKernelFunction>, 2>;
  return *kernels;
}

template <bool WRITES>
void layer_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  std::optional<Tensor> y;
  const Layer layer = layer_of(*stack, WRITES);
  // Without owners the weights are computed by the graph and not cached.
  if (const auto repacked = layer.owners.empty() ? true : ksopt::are_marked_repacked()) {
    const bool records = WRITES && at::GradMode::is_enabled() &&
                         layer.any([](const Tensor& one) { return one.requires_grad(); });
    // Python reports why it refuses these. Weights with owners in a graph are stored by its module.
    if (!records) y = known(layer, *repacked, !layer.owners.empty());
    if (y && WRITES) layer.out->unsafeGetTensorImpl()->bump_version();
  }
  if (!y) {
    python_layers()[WRITES]->callBoxed(handle, keys, stack);
    return;
  }
  torch::jit::drop(*stack, arguments_of(WRITES));
  if constexpr (!WRITES) torch::jit::push(*stack, std::move(*y));
}

// The known plan, for eager layers, which enter Python; `repacked` is the state of this thread's scope.
std::optional<Tensor> run_layer(const Tensor& x, std::vector<Tensor> weights, const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& residual, std::string activation, bool batch_last,
                                int64_t siblings, std::optional<std::vector<Tensor>> owners, bool in_float32,
                                bool repacked, bool stored, const std::optional<Tensor>& out) {
  ksopt::mark_repacked(repacked);
  return known({x, std::move(weights), tensor_if_any(bias), tensor_if_any(residual), activation, batch_last, siblings,
                owners ? std::move(*owners) : std::vector<Tensor>(), in_float32, tensor_if_any(out)},
               repacked, stored);
}

}  // namespace

namespace ksopt {

void find_python_layers() {
  python_layers()[false].emplace(python_kernel("ksopt::ks_chain_inner", "", c10::DispatchKey::CPU));  // CUDA's, too
  python_layers()[true].emplace(python_kernel("ksopt::ks_chain", "out", c10::DispatchKey::CPU));
}

void register_layers(torch::Library& library) {
  library.impl("ks_chain_inner", torch::CppFunction::makeFromBoxedFunction<&layer_kernel<false>>());
  library.impl("ks_chain.out", torch::CppFunction::makeFromBoxedFunction<&layer_kernel<true>>());
}

}  // namespace ksopt

TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def(
      "run_layer(Tensor x, Tensor[] weights, Tensor? bias, Tensor? residual, str activation, bool batch_last, "
      "int siblings, Tensor[]? owners, bool in_float32, bool repacked, bool stored, Tensor? out=None) -> Tensor?",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, run_layer));
}
