// The tables of decisions that the library can execute.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "kernel_table.hpp"
#include "dispatch.hpp"
#include "torch_ops.hpp"

namespace {

// The key of a choice: a, b, c, d, dtype, layout, precision, bits of the batch, device (`place_of`).
using ProblemKey = std::array<int64_t, 10>;
struct ProblemKeyHash {
  size_t operator()(const ProblemKey& key) const {
    size_t hash = 0;
    for (const int64_t value : key) hash = (hash ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
  }
};

// A choice: a plan, or a product by torch, and the form of the weight that it takes; 0: none is cached. repacks: where
// no weight in that form is cached, one is prepared for the call: for torch its matrices, for a plan (which also takes
// a weight whose elements are in order as it is) the elements in order. any_rows: whether it is also for rows of x that do
// not begin at multiples of 16 bytes. packing: the plan that packs a weight that changes, as it is stored, or BY_GROUPS:
// torch puts it into the order [a, d, b, c]; NONE: it is not packed, or by Python.
enum Kind : int64_t { KERNEL, TORCH };
constexpr int64_t BY_GROUPS = -3;
struct Choice {
  int64_t plan;
  int64_t form;
  int64_t kind;
  bool repacks, any_rows;
  int64_t packing;
};

static_assert(ksopt::NO_PLAN == NONE);
std::vector<ksopt::TorchProduct> torch_products;  // under plans_mutex

ksopt::TorchProduct torch_product_at(int64_t index) {
  const std::shared_lock lock(plans_mutex);
  return torch_products.at(static_cast<size_t>(index));
}

// For weights that are cached, and for those that change.
std::array<std::unordered_map<ProblemKey, Choice, ProblemKeyHash>, 2> known;
std::shared_mutex known_mutex;

// As ksopt.kernels.problem.bits_of counts: batches up to 2 to this power have one key.
int64_t bits_of(int64_t batch) {
  int64_t bits = 0;
  while (bits < 62 && batch > int64_t{1} << bits) ++bits;
  return bits;
}

int32_t dtype_of(const Tensor& x) {
  int32_t dtype = -1;
  aoti_torch_get_dtype(x.get(), &dtype);
  return dtype;
}

// Whether x's elements lie side by side and its rows (batch last: its features) begin at multiples of
// 16 bytes: what ksopt.kernels.problem calls aligned.
bool is_aligned(const Tensor& x, bool batch_last) {
  const int64_t features = x.size(batch_last ? 0 : x.dim() - 1);
  const int64_t row = batch_last ? x.numel() / (features > 0 ? features : 1) : features;
  return x.is_contiguous() && aligned_16(x.const_data_ptr()) &&
         row * static_cast<int64_t>(x.element_size()) % 16 == 0;
}

// The device; of a CPU as many threads as torch has, which its choices depend on.
int32_t place_of(const Tensor& x) {
  const int32_t device = x.get_device_index();
  uint32_t threads = 0;
  if (device < 0) torch_get_num_threads(&threads);
  return device < 0 ? -static_cast<int32_t>(threads) : device;
}

bool share_memory(const Tensor& one, const Tensor& other) {  // from the first element to the last
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  const auto bytes = [](const Tensor& t) {
    int64_t last = t.numel() > 0 ? 0 : -1;
    for (int64_t i = 0; last >= 0 && i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return static_cast<uintptr_t>(last + 1) * t.element_size();
  };
  return begin(one) < begin(other) + bytes(other) && begin(other) < begin(one) + bytes(one);
}

// Whether a kernel may write the product of x by a weight straight into out.
bool takes_product(const Tensor& out, const Tensor& x, const Tensor& weight, int64_t out_features,
                   bool batch_last) {
  const int64_t dims = x.dim(), at = batch_last ? 0 : dims - 1;
  if (out.dim() != dims || dtype_of(out) != dtype_of(x) || out.get_device_index() != x.get_device_index()) {
    return false;
  }
  for (int64_t i = 0; i < dims; ++i) {
    if (out.size(i) != (i == at ? out_features : x.size(i))) return false;
  }
  return out.is_contiguous() && aligned_16(out.const_data_ptr()) &&
         !share_memory(out, x) && !share_memory(out, weight);
}

// A prepared form of a call's weights. cached_weights.cpp and ksopt/kernels/weight_table.py vouch for what the
// stable ABI cannot tell: that it was prepared from the weights' memory at its present version.
struct Prepared {
  Tensor tensor;
  int64_t of;      // which of the weights, or ksopt::ALL, or OF_PRODUCT
  int64_t form;    // what was prepared, from weights of which shapes and dtype
  int64_t stream;  // that may read it

  // Whether it is of the form, may be read now, and need not be prepared again for a graph.
  bool serves(int64_t required_form, int32_t device) const {
    if (form != required_form || tensor.get_device_index() != device) return false;
    void* current = current_stream(device);
    return stream == reinterpret_cast<intptr_t>(current) && !is_capturing(current);
  }
};
using PreparedForms = std::vector<Prepared>;

// The prepared form of a weight, or of all of them; none if there is none.
std::optional<Tensor> find_prepared(const PreparedForms& forms, int64_t of, int64_t form, int32_t device) {
  for (const Prepared& one : forms) {
    if (one.of == of && one.serves(form, device)) return one.tensor;
  }
  return std::nullopt;
}

// The properties of x, which need not exist yet: it is contiguous.
struct Rows {
  int64_t features, batch;
  int32_t dtype, device, place;
  bool batch_last, aligned;
};

Rows rows_of(const Tensor& x, bool batch_last) {
  const int64_t features = x.size(batch_last ? 0 : x.dim() - 1);
  return {features, features > 0 ? x.numel() / features : 0, dtype_of(x), x.get_device_index(), place_of(x),
          batch_last, is_aligned(x, batch_last)};
}

// A weight as the kernel of a choice reads it.
Tensor pack_weight(const Choice& choice, const Tensor& weight) {
  if (choice.packing == BY_GROUPS) return Tensor(ksopt::by_groups(weight.get()));
  return launch_packing(plan_at(choice.packing), weight);
}

// A product whose choice can be carried out: nothing of it has to be compiled or prepared by Python.
struct Step {
  Choice choice;
  const Tensor* weight;
  std::optional<Tensor> prepared;
  bool packs = false;

  // within: what a plan of its own computes beside the product; settled: as of `launch_plan`.
  std::optional<Tensor> run(const Tensor& x, bool batch_last, const std::optional<Tensor>& out,
                            const Within* within = nullptr, bool settled = false) const {
    if (choice.kind == TORCH) {
      AtenTensorHandle y =
          ksopt::multiply_by_torch(torch_product_at(choice.plan), x.get(), weight->get(),
                                   prepared ? prepared->get() : nullptr, out ? out->get() : nullptr);
      return y == nullptr ? std::nullopt : std::optional(Tensor(y));
    }
    const Plan plan = plan_at(within ? within->plan : choice.plan);
    if (prepared) return launch_plan(plan, x, *prepared, out, within, settled);
    if (packs) return launch_plan(plan, x, pack_weight(choice, *weight), out, within);
    if (weight->is_contiguous()) return launch_plan(plan, x, *weight, out, within, settled);
    return launch_plan(plan, x, torch::stable::contiguous(*weight), out, within);
  }
};

// The step for such operands, whose weight is one of those with prepared forms; none if it is not known, or needs
// Python. fixed: the choice, instead of the table's.
std::optional<Step> step_of(const Rows& x, const Tensor& weight, bool exact, bool repacked, const PreparedForms& forms,
                            int64_t of, const Choice* fixed = nullptr) {
  const auto prepared_in = [&](int64_t form) { return find_prepared(forms, of, form, x.device); };
  if (weight.dim() != 4) return std::nullopt;
  const int64_t a = weight.size(0), b = weight.size(1), c = weight.size(2), d = weight.size(3);
  if (x.features != a * c * d || x.features == 0 || x.batch == 0 || x.dtype != dtype_of(weight) ||
      x.device != weight.get_device_index()) {
    return std::nullopt;
  }
  Choice choice{};
  if (fixed != nullptr) {
    if (!x.aligned && !fixed->any_rows) return std::nullopt;
    choice = *fixed;
  } else {
    const std::shared_lock lock(known_mutex);
    const auto& table = known[repacked];
    const auto it = table.find({a, b, c, d, x.dtype, x.batch_last, exact, bits_of(x.batch), x.place, x.aligned});
    if (it == table.end()) return std::nullopt;
    choice = it->second;
  }
  if (choice.kind == TORCH) {
    if (ksopt::takes_as_it_is(torch_product_at(choice.plan), weight.get())) return Step{choice, &weight, std::nullopt};
    std::optional<Tensor> prepared = prepared_in(choice.form);
    if (!prepared && !choice.repacks) return std::nullopt;
    return Step{choice, &weight, std::move(prepared)};
  }
  if ((choice.repacks || choice.form == 0) && weight.is_contiguous()) return Step{choice, &weight, std::nullopt};
  if (choice.form != 0) {
    if (std::optional<Tensor> prepared = prepared_in(choice.form)) return Step{choice, &weight, std::move(prepared)};
  }
  if (choice.packing != NONE && repacked) return Step{choice, &weight, std::nullopt, true};
  // For a weight that is cached, Python caches the elements in order, too, once.
  if (choice.repacks && repacked) return Step{choice, &weight, std::nullopt};
  return std::nullopt;
}

// y, if the table has an entry for these operands and it can run on them. In all other cases the caller
// checks, chooses and reports errors. An eager call spends its time here.
// recorded: as of `Taken`.
std::optional<Tensor> launch_known(const Tensor& x, const Tensor& weight, bool batch_last, bool exact,
                                   bool repacked, bool recorded, const PreparedForms& forms,
                                   const std::optional<Tensor>& out) {
  if (x.dim() == 0 || weight.dim() != 4 || !x.is_contiguous()) return std::nullopt;
  const Rows rows = rows_of(x, batch_last);
  const int64_t out_features = weight.size(0) * weight.size(1) * weight.size(3);
  if (out && !takes_product(*out, x, weight, out_features, batch_last)) return std::nullopt;
  const auto step = step_of(rows, weight, exact, repacked, forms, 0);
  if (!step) return std::nullopt;
  const bool settled = recorded && step->choice.kind == KERNEL && is_capturing(current_stream(rows.device));
  return step->run(x, batch_last, out, nullptr, settled);
}

// Registers the choice of `launch_known` for operands like these, if it takes such; none: removes it.
void know(const Tensor& x, const Tensor& weight, bool batch_last, bool exact, bool repacked,
          std::optional<Choice> choice) {
  if (!x.is_contiguous() || x.numel() == 0) return;
  const Rows rows = rows_of(x, batch_last);
  const ProblemKey key = {weight.size(0), weight.size(1), weight.size(2), weight.size(3), rows.dtype,
                          batch_last, exact, bits_of(rows.batch), rows.place, rows.aligned};
  const std::unique_lock lock(known_mutex);
  if (choice && (rows.aligned || choice->any_rows)) {
    known[repacked][key] = *choice;
  } else {
    known[repacked].erase(key);
  }
}

void forget_known() {
  const std::unique_lock lock(known_mutex);
  for (auto& table : known) table.clear();
}

}  // namespace
