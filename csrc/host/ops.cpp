// The operators of ksopt_host: the C++ half of ksopt/kernels.
//
// Built on PyTorch's stable ABI, so that one binary serves several torch versions.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "chain_gradients.hpp"
#include "dispatch_table.hpp"
#include "input_gradient.hpp"
#include "kernel_table.hpp"
#include "dispatch.hpp"
#include "mlp_table.hpp"
#include "plan_table.hpp"
#include "trained_chain.hpp"
#include "weight_gradient.hpp"

namespace {

// x: (*batch, N) or, batch last, (N, *batch); weight: (a, b, c, d), its elements in order if the plan has
// a fallback; bias and residual where the plan's kernel has them, contiguous. Returns y in the same layout: out, fit
// for `launch_plan`, if it is passed; none if the plan's fallback is needed and LATER.
std::optional<Tensor> launch(const Tensor& x, const Tensor& weight, int64_t plan_index,
                             std::optional<Tensor> out, std::optional<Tensor> bias, std::optional<Tensor> residual) {
  const Plan plan = plan_at(plan_index);
  const int64_t first = plan.batch_last ? 1 : 0, last = plan.batch_last ? x.dim() : x.dim() - 1;
  const Within within{plan_index, std::move(bias), std::move(residual)};
  return launch_plan(plan, common_stride(x, first, last) ? x : torch::stable::contiguous(x), weight, out, &within);
}

// What a plan's kernel packs of a weight (a, b, c, d) of any strides.
Tensor pack(const Tensor& weight, int64_t plan) { return launch_packing(plan_at(plan), weight); }

void know_choice(const Tensor& x, const Tensor& weight, bool batch_last, bool exact, bool repacked, int64_t plan,
                 int64_t form, int64_t kind, bool repacks, bool any_rows, int64_t packing) {
  know(x, weight, batch_last, exact, repacked,
       plan < 0 ? std::nullopt : std::optional(Choice{plan, form, kind, repacks, any_rows, packing}));
}

void know_plan(const Tensor& x, std::vector<Tensor> weights, std::optional<Tensor> bias,
               std::optional<Tensor> residual, std::string activation, bool batch_last, int64_t siblings,
               bool in_float32, bool exact, int64_t of_weights, int64_t kernel, int64_t form, int64_t repair,
               std::vector<int64_t> pair) {
  const Layer layer{x, weights, bias, residual, activation_of(activation), batch_last, siblings, in_float32};
  PlanChoice choice{kernel, form, reinterpret_cast<void*>(repair)};
  for (size_t at = 0; at < choice.pair.size() && kernel == PAIR; ++at) {
    const auto field = [&](size_t of) { return pair.at(6 * at + of); };  // of an Entry of ksopt/kernels/launcher.py
    choice.pair[at] = {field(0), field(1), field(2), field(3) != 0, field(4) != 0, field(5)};
  }
  know_plan_of(layer, exact, static_cast<Weights>(of_weights), choice);
}

void know_mlp(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> last_weights,
              std::optional<Tensor> hidden_bias, std::optional<Tensor> bias, std::optional<Tensor> residual,
              std::string hidden_activation, std::string activation, bool exact, bool repacked, int64_t kernel,
              int64_t form) {
  know_mlp_of({x, std::move(weights), std::move(last_weights), std::move(hidden_bias), std::move(bias),
               std::move(residual), activation_of(hidden_activation), activation_of(activation)},
              exact, repacked, {kernel, form});
}

// Registers a chain's kernel and returns its index.
int64_t add_chain(int64_t kernel, int64_t out_features, int64_t threads, int64_t shared_bytes, int64_t rows_per_unit,
                  int64_t most_blocks, int64_t cluster, int64_t pack, int64_t pack_blocks, int64_t pack_threads,
                  int64_t packed_elements, bool any_rows, bool in_float32) {
  const std::unique_lock lock(plans_mutex);
  chain_kernels.push_back({reinterpret_cast<void*>(kernel), out_features, static_cast<unsigned>(threads),
                           static_cast<unsigned>(shared_bytes), rows_per_unit, most_blocks, cluster, any_rows,
                           packing_of(pack, pack_blocks, pack_threads, packed_elements), in_float32});
  return static_cast<int64_t>(chain_kernels.size()) - 1;
}

// Registers the launches of the forward pass of trained chains.
void know_trained_chain(const Tensor& x, std::vector<Tensor> weights, std::optional<Tensor> bias, int64_t siblings,
                        std::string activation, int64_t packed_of_grad, int64_t pack, int64_t pack_blocks,
                        int64_t pack_threads, int64_t packed_elements, int64_t kernel, int64_t out_features,
                        int64_t threads, int64_t shared_bytes, int64_t rows_per_unit, int64_t most_blocks,
                        int64_t cluster) {
  know_trained_chain_of(
      {x, weights, bias, std::nullopt, activation_of(activation), false, siblings},
      {reinterpret_cast<void*>(kernel), out_features, static_cast<unsigned>(threads),
       static_cast<unsigned>(shared_bytes), rows_per_unit, most_blocks, cluster, false,
       packing_of(pack, pack_blocks, pack_threads, packed_elements, packed_of_grad)});
}

void forget_all_plans() {
  forget_plans();
  forget_mlps();
  forget_trained_chains();
}

void forget_all_gradients() {
  forget_weight_grads();
  ksopt::forget_chain_gradients();
  ksopt::forget_input_gradients();
}

// Registers how torch multiplies, and returns its index; before, after, repair: plans of kernels, or NONE.
int64_t add_torch(int64_t way, std::vector<int64_t> pattern, std::vector<int64_t> strides, bool batch_last,
                  bool by_groups, int64_t before, int64_t after, int64_t repair) {
  const ksopt::TorchProduct product{
      static_cast<ksopt::TorchWay>(way), pattern.at(0), pattern.at(1), pattern.at(2), pattern.at(3),
      {strides.at(0), strides.at(1), strides.at(2), strides.at(3)}, batch_last, by_groups, before, after, repair};
  const std::unique_lock lock(plans_mutex);
  const auto it = std::find(torch_products.begin(), torch_products.end(), product);
  const int64_t index = it - torch_products.begin();
  if (it == torch_products.end()) torch_products.push_back(product);
  return index;
}

// Registers a kernel (a CUkernel handle of the driver) and returns its index for `launch`.
int64_t add_plan(int64_t kernel, int64_t out_features, bool batch_last, int64_t threads,
                 int64_t shared_bytes, int64_t rows_per_tile, int64_t tiles_per_row_tile,
                 int64_t max_blocks, bool early, int64_t fallback, bool in_float32) {
  const std::unique_lock lock(plans_mutex);
  plans.push_back({reinterpret_cast<void*>(kernel), out_features, batch_last,
                   static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes),
                   rows_per_tile, tiles_per_row_tile, max_blocks, early, fallback, in_float32});
  return static_cast<int64_t>(plans.size()) - 1;
}

// Says which plan computes a product of another plan with an epilogue; NONE: no plan does.
void set_epilogue(int64_t plan, int64_t activation, bool bias, bool residual, bool in_float32, int64_t other) {
  const std::unique_lock lock(plans_mutex);
  plans_within[{plan, activation, bias, residual, in_float32}] = other;
}

// Says which plan takes the operands that a plan does not.
void set_fallback(int64_t plan, int64_t fallback) {
  const std::unique_lock lock(plans_mutex);
  plans.at(static_cast<size_t>(plan)).fallback = fallback;
}

// A tensor of its own for a handle that stays the caller's.
Tensor borrowed(AtenTensorHandle handle) {
  AtenTensorHandle own = nullptr;
  aoti_torch_new_tensor_handle(handle, &own);
  return Tensor(own);
}
std::optional<Tensor> borrowed_if_any(AtenTensorHandle handle) {
  return handle == nullptr ? std::nullopt : std::optional(borrowed(handle));
}

PreparedForms borrowed(const std::vector<ksopt::PreparedWeight>& prepared) {
  PreparedForms forms;
  for (const auto& one : prepared) forms.push_back({borrowed(one.tensor), one.of, one.form, one.stream});
  return forms;
}

// The same for a tensor that the caller owns.
AtenTensorHandle owned(const Tensor& tensor) {
  AtenTensorHandle own = nullptr;
  aoti_torch_new_tensor_handle(tensor.get(), &own);
  return own;
}

}  // namespace

AtenTensorHandle ksopt::multiply_known(AtenTensorHandle x, AtenTensorHandle weight, const Taken& taken,
                                       const std::vector<PreparedWeight>& prepared, AtenTensorHandle out) {
  const auto y = launch_known(borrowed(x), borrowed(weight), taken.batch_last, taken.exact, taken.repacked,
                              taken.recorded, borrowed(prepared), borrowed_if_any(out));
  return y ? owned(*y) : nullptr;
}

AtenTensorHandle ksopt::layer_known(const LayerHandles& layer, const Taken& taken,
                                    const std::vector<PreparedWeight>& prepared, AtenTensorHandle out) {
  const Tensor x = borrowed(layer.x);
  std::vector<Tensor> weights;
  for (AtenTensorHandle weight : layer.weights) weights.push_back(borrowed(weight));
  const auto bias = borrowed_if_any(layer.bias), residual = borrowed_if_any(layer.residual);
  const int64_t activation = activation_of(layer.activation);
  const auto y = run_known_plan(
      {x, weights, bias, residual, activation, taken.batch_last, layer.siblings, layer.in_float32}, taken.exact,
      weights_of(taken.repacked, taken.stored), taken.recorded, borrowed(prepared), borrowed_if_any(out));
  return y ? owned(*y) : nullptr;
}

AtenTensorHandle ksopt::mlp_known(const MlpHandles& mlp, const Taken& taken,
                                  const std::vector<PreparedWeight>& prepared, AtenTensorHandle out) {
  std::array<std::vector<Tensor>, 2> weights;
  for (size_t at = 0; at < mlp.weights.size(); ++at) {
    weights[at < mlp.factors ? 0 : 1].push_back(borrowed(mlp.weights[at]));
  }
  const Mlp operands{borrowed(mlp.x), std::move(weights[0]), std::move(weights[1]), borrowed_if_any(mlp.hidden_bias),
                     borrowed_if_any(mlp.bias), borrowed_if_any(mlp.residual), activation_of(mlp.hidden_activation),
                     activation_of(mlp.activation)};
  const auto y = run_known_mlp(operands, taken.exact, taken.repacked, borrowed(prepared), borrowed_if_any(out));
  return y ? owned(*y) : nullptr;
}

bool ksopt::launch_into(int64_t plan, AtenTensorHandle from, AtenTensorHandle weight, AtenTensorHandle to) {
  return launch_plan(plan_at(plan), borrowed(from), borrowed(weight), borrowed(to)).has_value();
}

ksopt::KnownGradient ksopt::weight_gradient_known(AtenTensorHandle grad, AtenTensorHandle x, int64_t a, int64_t d,
                                                  bool with_bias) {
  const Tensor of_y = borrowed(grad), rows = borrowed(x);
  const WeightGradKey key = weight_grad_key(of_y, rows, a, d, with_bias);
  const auto launch = weight_grad_launch(key);
  if (!launch) return {false, nullptr, nullptr};
  if (launch->kernel == nullptr) return {true, nullptr, nullptr};
  const auto result = launch_weight_grad(*launch, key, of_y, rows);
  if (!result) return {false, nullptr, nullptr};
  ksopt::KnownGradient known{true, nullptr, nullptr};
  aoti_torch_new_tensor_handle(result->of_weight.get(), &known.gradient);
  if (result->of_bias) aoti_torch_new_tensor_handle(result->of_bias->get(), &known.bias);
  return known;
}

std::vector<AtenTensorHandle> ksopt::trained_chain_known(AtenTensorHandle x,
                                                         const std::vector<AtenTensorHandle>& weights,
                                                         AtenTensorHandle bias, int64_t siblings,
                                                         const std::string& activation, int64_t packed_of_grad) {
  const Tensor rows = borrowed(x);
  std::vector<Tensor> of_factors;
  for (AtenTensorHandle weight : weights) of_factors.push_back(borrowed(weight));
  const auto summand = borrowed_if_any(bias);
  const Layer layer{rows, of_factors, summand, std::nullopt, activation_of(activation), false, siblings};
  std::vector<AtenTensorHandle> results;
  for (const Tensor& one : run_trained_chain(layer, packed_of_grad)) results.push_back(owned(one));
  return results;
}

STABLE_TORCH_LIBRARY(ksopt_host, m) {
  m.def(
      "launch(Tensor x, Tensor weight, int plan, Tensor? out=None, Tensor? bias=None, Tensor? residual=None) -> "
      "Tensor?");
  m.def("pack(Tensor weight, int plan) -> Tensor");
  m.def(
      "know(Tensor x, Tensor weight, bool batch_last, bool exact, bool repacked, int plan, int form, "
      "int kind=0, bool repacks=False, bool any_rows=False, int packing=-1) -> ()");
  m.def("forget() -> ()");
  m.def(
      "know_plan(Tensor x, Tensor[] weights, Tensor? bias, Tensor? residual, str activation, bool batch_last, "
      "int siblings, bool in_float32, bool exact, int of_weights, int kernel, int form, int repair, int[] pair) -> ()");
  m.def(
      "know_mlp(Tensor x, Tensor[] weights, Tensor[] last_weights, Tensor? hidden_bias, Tensor? bias, Tensor? residual, "
      "str hidden_activation, str activation, bool exact, bool repacked, int kernel, int form) -> ()");
  m.def("forget_plans() -> ()");
  m.def("forget_gradients() -> ()");
  m.def(
      "add_chain(int kernel, int out_features, int threads, int shared_bytes, int rows_per_unit, "
      "int most_blocks, int cluster, int pack, int pack_blocks, int pack_threads, int packed_elements, "
      "bool any_rows, bool in_float32=False) -> int");
  m.def(
      "add_plan(int kernel, int out_features, bool batch_last, int threads, int shared_bytes, "
      "int rows_per_tile, int tiles_per_row_tile, int max_blocks, bool early, int fallback, bool in_float32=False) -> "
      "int");
  m.def(
      "know_weight_grad(Tensor grad, Tensor x, int a, int d, bool with_bias, int kernel, int adding, int threads, "
      "int shared_bytes, int adding_threads, int blocks, int shares, int rows_per_share, int adding_blocks) -> ()");
  m.def(
      "know_trained_chain(Tensor x, Tensor[] weights, Tensor? bias, int siblings, str activation, "
      "int packed_of_grad, int pack, int pack_blocks, int pack_threads, int packed_elements, int kernel, "
      "int out_features, int threads, int shared_bytes, int rows_per_unit, int most_blocks, int cluster) -> ()");
  m.def("set_fallback(int plan, int fallback) -> ()");
  m.def("set_epilogue(int plan, int activation, bool bias, bool residual, bool in_float32, int other) -> ()");
  m.def(
      "add_torch(int way, int[] pattern, int[] strides, bool batch_last, bool by_groups, int before, int after, "
      "int repair) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CUDA, m) {
  m.impl("launch", TORCH_BOX(&launch));
  m.impl("pack", TORCH_BOX(&pack));
}

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CompositeExplicitAutograd, m) {
  m.impl("add_plan", TORCH_BOX(&add_plan));
  m.impl("set_fallback", TORCH_BOX(&set_fallback));
  m.impl("set_epilogue", TORCH_BOX(&set_epilogue));
  m.impl("add_torch", TORCH_BOX(&add_torch));
  m.impl("forget", TORCH_BOX(&forget_known));
  m.impl("forget_plans", TORCH_BOX(&forget_all_plans));
  m.impl("forget_gradients", TORCH_BOX(&forget_all_gradients));
  m.impl("add_chain", TORCH_BOX(&add_chain));
  // On CPU and CUDA: what is not known of a device is in no table.
  m.impl("know", TORCH_BOX(&know_choice));
  m.impl("know_plan", TORCH_BOX(&know_plan));
  m.impl("know_mlp", TORCH_BOX(&know_mlp));
  m.impl("know_weight_grad", TORCH_BOX(&know_weight_grad));
  m.impl("know_trained_chain", TORCH_BOX(&know_trained_chain));
}
