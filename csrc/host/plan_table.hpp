// The table of plans of layers: one launch; products of dispatch_table.hpp and torch's operations behind them; or one
// matrix or factor, prepared from all weights. A call with an entry here runs without Python.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "dispatch_table.hpp"
#include "weight_packing.hpp"

namespace {

// The same struct as in csrc/cuda/common/chain_arguments.cuh.
struct ChainArguments {
  const void* x;
  const void* weights;
  const void* bias;
  const void* residual;
  void* y;
  int64_t batch, x_stride, y_stride, residual_stride, rows_per_block;
  void* z = nullptr;
  const void* hidden_bias = nullptr;  // of MlpArguments (csrc/cuda/common/chain_mlp_tile.cuh), which kernels of MLPs take
};

struct ChainGrid {
  unsigned blocks;
  int64_t rows_per_block;
};

// A kernel that computes a layer, and how to launch it on any batch.
struct ChainKernel {
  void* kernel;
  int64_t out_features;
  unsigned threads, shared_bytes;
  int64_t rows_per_unit;  // blocks, or clusters of them, take whole units of so many rows
  int64_t most_blocks;
  int64_t cluster;        // blocks that share the work on their rows
  bool any_rows = false;  // it takes rows of any length, in either layout: one kernel a layout
  WeightPacking packing{};
  bool in_float32 = false;  // as of `Plan`

  // As grid_of of ksopt/kernels/families/common/row_grid.py.
  ChainGrid grid_of(int64_t rows) const {
    const int64_t units = (rows + rows_per_unit - 1) / rows_per_unit;
    const int64_t most = std::min(units, most_blocks);
    const int64_t of_block = (units + most - 1) / most;
    return {static_cast<unsigned>((units + of_block - 1) / of_block * cluster), of_block * rows_per_unit};
  }
};

std::vector<ChainKernel> chain_kernels;  // under plans_mutex

// The arguments of a layer's operator; weights are of its factors, left to right, sibling after
// sibling.
struct Layer {
  const Tensor& x;
  const std::vector<Tensor>& weights;
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& residual;
  int64_t activation;  // of csrc/cuda/common/epilogue.cuh, or a gate
  bool batch_last;
  int64_t siblings;
  bool in_float32 = false;  // the result of 16-bit operands; then there is no residual

  size_t length() const { return weights.size() / static_cast<size_t>(siblings); }
  bool is_gated() const { return activation >= FIRST_GATE; }
  // The activation of a product; of a gate that of its first product.
  ksopt::Activation activation_of_product() const {
    return static_cast<ksopt::Activation>(is_gated() ? activation - FIRST_GATE + 1 : activation);
  }
};

// Features of y; none if the operands do not fit together.
std::optional<int64_t> features_of_result(const Layer& layer, const Rows& x) {
  const auto is_like_x = [&](const Tensor& t) { return dtype_of(t) == x.dtype && t.get_device_index() == x.device; };
  const size_t length = layer.length();
  int64_t features = x.features;
  for (size_t at = layer.weights.size(); at-- > 0;) {
    const Tensor& weight = layer.weights[at];
    if (weight.dim() != 4 || !is_like_x(weight)) return std::nullopt;
    if (at >= length) {  // a sibling's: of the first one's shape
      const Tensor& first = layer.weights[at % length];
      for (int64_t i = 0; i < 4; ++i) {
        if (first.dim() != 4 || first.size(i) != weight.size(i)) return std::nullopt;
      }
      continue;
    }
    if (features != weight.size(0) * weight.size(2) * weight.size(3)) return std::nullopt;
    features = weight.size(0) * weight.size(1) * weight.size(3);
  }
  const std::optional<Tensor>&bias = layer.bias, &residual = layer.residual;
  if (bias && (bias->dim() != 1 || bias->size(0) != features * layer.siblings || !is_like_x(*bias))) {
    return std::nullopt;
  }
  if (!layer.is_gated()) features *= layer.siblings;
  if (residual) {
    const int64_t dims = layer.x.dim(), along = layer.batch_last ? 0 : dims - 1;
    if (residual->dim() != dims || !is_like_x(*residual)) return std::nullopt;
    for (int64_t i = 0; i < dims; ++i) {
      if (residual->size(i) != (i == along ? features : layer.x.size(i))) return std::nullopt;
    }
  }
  return features;
}

// dtype, layout, precision, bits of the batch, place, siblings, bias, activation, residual, result's type, alignment (of
// kernels' choices; by factors each factor has its own), patterns.
using PlanKey = std::vector<int64_t>;
struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const {
    size_t hash = key.size();
    for (const int64_t value : key) hash = (hash ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
  }
};

PlanKey plan_key(const Layer& layer, const Rows& x, bool exact) {
  PlanKey key;
  key.reserve(11 + 4 * layer.length());
  key.assign({x.dtype, x.batch_last, exact, bits_of(x.batch), x.place, layer.siblings, layer.bias.has_value(),
              layer.activation, layer.residual.has_value(), layer.in_float32, x.aligned});
  for (size_t at = 0; at < layer.length(); ++at) {
    for (int64_t i = 0; i < 4; ++i) key.push_back(layer.weights[at].size(i));
  }
  return key;
}

// A chain's kernel and the form of the weights that it takes; FACTORS: a product for each factor; MERGED: torch's
// product by the one matrix that is prepared of all of them, or a product by one factor (ksopt/kernels/merged.py);
// PAIR: a product for each of two factors, by choices of the plan's own.
constexpr int64_t FACTORS = -2, MERGED = -3, PAIR = -4;
struct PlanChoice {
  int64_t kernel;
  int64_t form;
  void* repair = nullptr;           // of MERGED, the kernel behind a product by a matrix with zeros
  std::array<Choice, 2> pair = {};  // of PAIR, in the order in which they multiply
};

// The same struct as in csrc/cuda/common/chain_repair.cuh, but for what follows.
struct ChainRepairArguments {
  ChainPackArguments factors;
  ChainArguments operands;
};

// How weights are prepared: cached, at each call, or, for parameters of modules, cached at any preparation cost.
enum class Weights : int64_t { cached, repacked, stored };

Weights weights_of(bool repacked, bool stored) {
  return repacked ? Weights::repacked : stored ? Weights::stored : Weights::cached;
}

using KnownPlans = std::unordered_map<PlanKey, PlanChoice, PlanKeyHash>;
std::array<KnownPlans, 3> known_plans;  // under known_mutex

KnownPlans& plans_for(Weights weights) { return known_plans.at(static_cast<size_t>(weights)); }

std::vector<int64_t> sizes_of_result(const Layer& layer, int64_t features) {
  std::vector<int64_t> sizes(static_cast<size_t>(layer.x.dim()));
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = layer.x.size(static_cast<int64_t>(i));
  sizes[layer.batch_last ? 0 : sizes.size() - 1] = features;
  return sizes;
}

// Whether a chain's kernel can read what is added to its result, if anything is.
bool is_readable(const std::optional<Tensor>& summand) {
  return !summand || (summand->is_contiguous() && aligned_16(summand->const_data_ptr()));
}

// The weights of a launch: all of them, of so many chains, packed by the call if they change, else prepared.
struct LaunchedWeights {
  const std::vector<Tensor>& all;
  size_t chains;
  bool repacked;
  const PreparedForms& forms;
};

// hidden_bias: of a layer ahead, where the kernel computes that, too.
std::optional<Tensor> launch_chain(const PlanChoice& choice, const Layer& layer, const Rows& x,
                                   const LaunchedWeights& weights, const std::optional<Tensor>& out,
                                   const std::optional<Tensor>& hidden_bias = std::nullopt) {
  ChainKernel chain{};
  {
    const std::shared_lock lock(plans_mutex);
    chain = chain_kernels.at(static_cast<size_t>(choice.kernel));
  }
  const bool fits = chain.any_rows ? aligned_16(layer.x.const_data_ptr()) : x.aligned && !layer.batch_last;
  if (!fits || !is_readable(layer.bias) || !is_readable(layer.residual)) return std::nullopt;
  if (!is_readable(hidden_bias)) return std::nullopt;
  const int32_t device = x.device;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  const std::optional<Tensor> packed = weights.repacked
                                           ? packed_weights(chain.packing, weights.all, weights.chains)
                                           : find_prepared(weights.forms, ksopt::ALL, choice.form, device);
  if (!packed) return std::nullopt;
  const std::vector<int64_t> sizes = sizes_of_result(layer, chain.out_features);
  Tensor y = out ? *out : empty_like_in(layer.x, sizes, type_of_results(chain.in_float32));
  const ChainGrid grid = chain.grid_of(x.batch);
  const int64_t stride_of_y = layer.batch_last ? x.batch : chain.out_features;
  ChainArguments arguments{layer.x.const_data_ptr(),
                           packed->const_data_ptr(),
                           layer.bias ? layer.bias->const_data_ptr() : nullptr,
                           layer.residual ? layer.residual->const_data_ptr() : nullptr,
                           y.mutable_data_ptr(),
                           x.batch,
                           layer.batch_last ? x.batch : x.features,
                           stride_of_y,
                           layer.residual ? stride_of_y : 0,
                           grid.rows_per_block,
                           nullptr,
                           hidden_bias ? hidden_bias->const_data_ptr() : nullptr};
  launch_on_current_stream({chain.kernel, chain.threads, chain.shared_bytes, true, &arguments}, device, grid.blocks);
  return y;
}

// What torch's operations make of a product, in its memory or, in float32, in new memory; bias: still to be added.
Tensor behind(const Tensor& y, const Layer& layer, const std::optional<Tensor>& bias, ksopt::Activation activation) {
  ksopt::add_epilogue(y.get(), bias ? bias->get() : nullptr, activation,
                      layer.residual ? layer.residual->get() : nullptr, layer.batch_last);
  return layer.in_float32 ? Tensor(ksopt::in_float32(y.get())) : y;
}

// act(first) * second + residual, a bias that is still to be added included.
Tensor gated(const Layer& layer, const Tensor& first, const Tensor& second, const std::optional<Tensor>& bias,
             const std::optional<Tensor>& out) {
  const Tensor y(ksopt::gate(first.get(), second.get(), bias ? bias->get() : nullptr, layer.activation_of_product(),
                             layer.batch_last, out ? out->get() : nullptr));
  return behind(y, layer, std::nullopt, ksopt::Activation::none);
}

// The last product of a layer with what is behind it: by its kernel, where that has an epilogue, or by torch's
// operations. settled: as of `launch_plan`. None if Python has to say which.
std::optional<Tensor> run_last(const Step& step, const Layer& layer, const Tensor& x, const std::optional<Tensor>& out,
                               bool settled) {
  const bool is_bare = !layer.bias && !layer.residual && layer.activation == 0 && !layer.in_float32;
  if (!is_bare && step.choice.kind == KERNEL) {
    int64_t plan = NONE;
    {
      const std::shared_lock lock(plans_mutex);
      const auto it = plans_within.find(
          {step.choice.plan, layer.activation, layer.bias.has_value(), layer.residual.has_value(), layer.in_float32});
      if (it == plans_within.end()) return std::nullopt;
      plan = it->second;
    }
    if (plan != NONE && is_readable(layer.bias) && is_readable(layer.residual)) {
      const Within within{plan, layer.bias, layer.residual};
      if (auto y = step.run(x, layer.batch_last, out, &within, settled)) return y;
    }
  }
  const auto y = step.run(x, layer.batch_last, out, nullptr, settled);
  return y ? std::optional(behind(*y, layer, layer.bias, layer.activation_of_product())) : std::nullopt;
}

// A product for each factor, and torch's operations behind them: as ksopt/kernels/by_factors.py.
// recorded: as of `Taken`.
// pair: the choices of two factors, instead of the table's.
std::optional<Tensor> run_factors(const Layer& layer, const Rows& x, bool exact, bool repacked, bool recorded,
                                  const PreparedForms& forms, const std::optional<Tensor>& out,
                                  const std::array<Choice, 2>* pair = nullptr) {
  // Nothing is launched before all factors are found in the table.
  std::vector<Step> steps;
  const size_t length = layer.length();
  for (size_t first = 0; first < layer.weights.size(); first += length) {
    Rows rows = x;
    for (size_t at = first + length; at-- > first;) {
      const Tensor& weight = layer.weights[at];
      const Choice* fixed = pair == nullptr ? nullptr : &pair->at(steps.size());
      auto step = step_of(rows, weight, exact, repacked, forms, static_cast<int64_t>(at), fixed);
      if (!step) return std::nullopt;
      steps.push_back(std::move(*step));
      rows.features = weight.size(0) * weight.size(1) * weight.size(3);
      const int64_t row = layer.batch_last ? rows.batch : rows.features;
      rows.aligned = row * static_cast<int64_t>(layer.x.element_size()) % 16 == 0;
    }
  }
  std::vector<Tensor> parts;
  // Asked of kernels alone, as a device without any may have no streams.
  const bool is_kernel = std::any_of(steps.begin(), steps.end(), [](const Step& s) { return s.choice.kind == KERNEL; });
  const bool is_recorded = recorded && is_kernel && is_capturing(current_stream(x.device));
  bool settled = is_recorded;  // as of `launch_plan`
  for (size_t first = 0; first < steps.size(); first += length) {
    Tensor part = layer.x;
    for (size_t at = first; at < first + length; ++at) {
      if (at + 1 == steps.size() && layer.siblings == 1) return run_last(steps[at], layer, part, out, settled);
      const auto y = steps[at].run(part, layer.batch_last, std::nullopt, nullptr, settled);
      if (!y) return std::nullopt;
      part = *y;
      settled = is_recorded || steps[at].choice.kind == KERNEL;  // which is ahead of the next product's
    }
    parts.push_back(part);
  }
  if (layer.is_gated()) return gated(layer, parts[0], parts[1], layer.bias, out);
  std::vector<AtenTensorHandle> handles;
  for (const Tensor& part : parts) handles.push_back(part.get());
  const Tensor y(ksopt::side_by_side(handles, layer.batch_last, out ? out->get() : nullptr));
  return behind(y, layer, layer.bias, layer.activation_of_product());
}

// As ksopt/kernels/chain_repair.py: computes the rows of y again that what is not finite spoilt.
void repair_rows(void* kernel, const Layer& layer, const Rows& x, const Tensor& y) {
  constexpr unsigned THREADS = 256;  // as there, like ROWS
  constexpr int64_t ROWS = 64, MOST_BLOCKS = std::numeric_limits<int32_t>::max();
  ChainRepairArguments arguments{factors_of(layer.weights, 1), {}};
  arguments.operands.x = layer.x.const_data_ptr();
  arguments.operands.bias = layer.bias ? layer.bias->const_data_ptr() : nullptr;
  arguments.operands.y = y.mutable_data_ptr();
  arguments.operands.batch = x.batch;
  arguments.operands.x_stride = layer.batch_last ? x.batch : x.features;
  arguments.operands.y_stride = layer.batch_last ? x.batch : y.numel() / x.batch;
  const int64_t blocks = std::min((x.batch + ROWS - 1) / ROWS, MOST_BLOCKS);
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != x.device) guard.emplace(x.device);
  launch_on_current_stream({kernel, THREADS, 0, true, &arguments}, x.device, static_cast<unsigned>(blocks));
}

// A product by the matrix, or the factor, that is prepared of all weights, and torch's operations behind it.
std::optional<Tensor> run_merged(const PlanChoice& choice, const Layer& layer, const Rows& x, bool exact,
                                 const PreparedForms& forms, const std::optional<Tensor>& out) {
  const std::optional<Tensor> product = find_prepared(forms, ksopt::ALL, choice.form, x.device);
  if (!product || (choice.repair != nullptr && layer.bias && !layer.bias->is_contiguous())) return std::nullopt;
  if (product->dim() == 4) {
    const auto step = step_of(x, *product, exact, false, forms, ksopt::OF_PRODUCT);
    return step ? run_last(*step, layer, layer.x, out, false) : std::nullopt;
  }
  AtenTensorHandle const to = out && !layer.is_gated() ? out->get() : nullptr;
  const AtenTensorHandle bias = layer.bias ? layer.bias->get() : nullptr;
  const Tensor y(ksopt::multiply_by_matrix(layer.x.get(), product->get(), bias, layer.batch_last, to));
  if (layer.is_gated()) {
    const auto [first, second] = ksopt::halves(y.get(), layer.batch_last);
    return gated(layer, Tensor(first), Tensor(second), std::nullopt, out);
  }
  if (choice.repair != nullptr) repair_rows(choice.repair, layer, x, y);
  return behind(y, layer, std::nullopt, layer.activation_of_product());
}

bool is_ordinary(const Layer& layer) {
  return layer.x.dim() > 0 && layer.x.is_contiguous() && layer.x.numel() > 0 && layer.siblings > 0 &&
         !layer.weights.empty() && layer.weights.size() % static_cast<size_t>(layer.siblings) == 0 &&
         layer.activation < ALL_ACTIVATIONS && (!layer.is_gated() || layer.siblings == 2) &&
         (!layer.in_float32 || (layer.x.element_size() == 2 && !layer.residual));
}

// y, if the plan of such operands is known and can be run; as for `launch_known`, the caller does the rest.
// recorded: as of `Taken`.
std::optional<Tensor> run_known_plan(const Layer& layer, bool exact, Weights weights, bool recorded,
                                     const PreparedForms& forms, const std::optional<Tensor>& out) {
  if (!is_ordinary(layer) || (out && layer.in_float32)) return std::nullopt;
  const Rows x = rows_of(layer.x, layer.batch_last);
  const std::optional<int64_t> features = features_of_result(layer, x);
  if (!features) return std::nullopt;
  if (out) {
    for (const Tensor& weight : layer.weights) {
      if (!takes_product(*out, layer.x, weight, *features, layer.batch_last)) return std::nullopt;
    }
    if (layer.bias && share_memory(*out, *layer.bias)) return std::nullopt;
    if (layer.residual && share_memory(*out, *layer.residual)) return std::nullopt;
  }
  PlanChoice choice{};
  {
    const std::shared_lock lock(known_mutex);
    const auto& table = plans_for(weights);
    const auto it = table.find(plan_key(layer, x, exact));
    if (it == table.end()) return std::nullopt;
    choice = it->second;
  }
  const bool repacked = weights == Weights::repacked;
  if (choice.kernel == FACTORS) return run_factors(layer, x, exact, repacked, recorded, forms, out);
  if (choice.kernel == PAIR) return run_factors(layer, x, exact, repacked, recorded, forms, out, &choice.pair);
  if (choice.kernel == MERGED) return run_merged(choice, layer, x, exact, forms, out);
  const LaunchedWeights all{layer.weights, static_cast<size_t>(layer.siblings), repacked, forms};
  return launch_chain(choice, layer, x, all, out);
}

// Registers the plan of `run_known_plan` for operands like these; kernel = NONE: removes it.
void know_plan_of(const Layer& layer, bool exact, Weights weights, const PlanChoice& choice) {
  if (!is_ordinary(layer)) return;
  const Rows x = rows_of(layer.x, layer.batch_last);
  if (!features_of_result(layer, x)) return;
  const std::unique_lock lock(known_mutex);
  if (choice.kernel == NONE) {
    plans_for(weights).erase(plan_key(layer, x, exact));
  } else {
    plans_for(weights)[plan_key(layer, x, exact)] = choice;
  }
}

void forget_plans() {
  const std::unique_lock lock(known_mutex);
  for (auto& table : known_plans) table.clear();
}

}  // namespace
