// The tables of decisions that the library can carry out: what a call needs to know beside its operands.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "bmm_plan.hpp"
#include "kernel_table.hpp"

namespace {

// What a plan was chosen for: a, b, c, d, dtype, layout, precision, bits of the batch, device.
using ProblemKey = std::array<int64_t, 9>;
struct ProblemKeyHash {
  size_t operator()(const ProblemKey& key) const {
    size_t hash = 0;
    for (const int64_t value : key) hash = (hash ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
  }
};

// What was chosen: a plan, or a batched product, and the form of the weight that it takes; 0: the weight
// as it is, its elements in order. Anew: where there is no weight in that form, one is made and let go: for
// a batched product its matrices, for a plan (which also takes a weight whose elements are in order as it
// is) the elements in order.
struct Choice {
  int64_t plan;
  int64_t form;
  bool batched;
  bool anew;
};

// For weights that are kept, and for those that change.
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

// A weight in the form that a plan takes. ksopt/kernels/weight_table.py vouches for what the stable ABI
// cannot tell: that it was prepared from the weight's memory at its present version.
struct Prepared {
  const Tensor& tensor;
  int64_t form;    // what was prepared, from a weight of which shape and dtype
  int64_t stream;  // that may read it

  // Whether it is of the form, may be read now, and need not be prepared anew for a graph.
  bool serves(int64_t wanted, int32_t device) const {
    if (form != wanted || tensor.get_device_index() != device) return false;
    void* current = current_stream(device);
    return stream == reinterpret_cast<intptr_t>(current) && !is_capturing(current);
  }
};

std::optional<Tensor> multiply_known(const Choice& choice, const Tensor& x, const Tensor& weight,
                                     const std::optional<Tensor>& prepared, const std::optional<Tensor>& out) {
  const Batched product = batched_at(choice.plan);
  // One row is one column, which ksopt/batched.py multiplies without copies.
  const bool copies = product.before == NONE && !(product.sees_x() && product.sees_y());
  if (copies && x.numel() == product.groups() * product.c) return std::nullopt;
  std::optional<Tensor> made;  // which `matrices` may refer to
  std::optional<Matrices> matrices = matrices_in(weight);
  if (!matrices && prepared) matrices = matrices_of_prepared(product, *prepared);
  if (!matrices && choice.anew) {
    made = prepare_matrices(weight);
    matrices = matrices_of_prepared(product, *made);
  }
  return matrices ? multiply_batched(product, x, *matrices, weight, out) : std::nullopt;
}

// y, if something is known for these operands and nothing about them is out of the ordinary; the caller
// checks, chooses and reports what is wrong in all other cases. An eager call spends its time here.
std::optional<Tensor> launch_known(const Tensor& x, const Tensor& weight, bool batch_last, bool exact,
                                   bool changing, const std::optional<Prepared>& prepared,
                                   const std::optional<Tensor>& out) {
  const int64_t dims = x.dim();
  if (dims == 0 || weight.dim() != 4 || !is_aligned(x, batch_last)) return std::nullopt;
  const int64_t a = weight.size(0), b = weight.size(1), c = weight.size(2), d = weight.size(3);
  const int64_t features = x.size(batch_last ? 0 : dims - 1);
  const int32_t dtype = dtype_of(x), device = x.get_device_index();
  if (features != a * c * d || features == 0 || dtype != dtype_of(weight) || device != weight.get_device_index()) {
    return std::nullopt;
  }
  const int64_t batch = x.numel() / features;
  if (batch == 0 || (out && !takes_product(*out, x, weight, a * b * d, batch_last))) return std::nullopt;
  Choice choice{};
  {
    const std::shared_lock lock(known_mutex);
    const auto& table = known[changing];
    const auto found = table.find({a, b, c, d, dtype, batch_last, exact, bits_of(batch), device});
    if (found == table.end()) return std::nullopt;
    choice = found->second;
  }
  const bool serves = prepared && prepared->serves(choice.form, device);
  if (choice.batched) {
    return multiply_known(choice, x, weight, serves ? std::optional(prepared->tensor) : std::nullopt, out);
  }
  const Plan plan = plan_at(choice.plan);
  if ((choice.anew || choice.form == 0) && weight.is_contiguous()) return launch_plan(plan, x, weight, out);
  if (choice.form != 0 && serves) return launch_plan(plan, x, prepared->tensor, out);
  // Of a weight that is kept one in order is kept, too: by Python, once.
  if (choice.anew && changing) return launch_plan(plan, x, torch::stable::contiguous(weight), out);
  return std::nullopt;
}

// Tells `launch_known` the choice for operands like these, if it takes such; none: no longer any.
void know(const Tensor& x, const Tensor& weight, bool batch_last, bool exact, bool changing,
          std::optional<Choice> choice) {
  if (!is_aligned(x, batch_last) || x.numel() == 0) return;
  const int64_t batch = x.numel() / x.size(batch_last ? 0 : x.dim() - 1);
  const ProblemKey key = {weight.size(0), weight.size(1), weight.size(2), weight.size(3), dtype_of(x),
                               batch_last, exact, bits_of(batch), x.get_device_index()};
  const std::unique_lock lock(known_mutex);
  if (choice) {
    known[changing][key] = *choice;
  } else {
    known[changing].erase(key);
  }
}

void forget_known() {
  const std::unique_lock lock(known_mutex);
  for (auto& table : known) table.clear();
}

}  // namespace
