// The table of plans of two layers, one behind the other: those that one launch computes. A call with an entry here
// runs without Python.
#pragma once

#include "plan_table.hpp"

namespace {

// All that the operator of two layers is called with, batch first.
struct Mlp {
  Tensor x;
  std::vector<Tensor> weights, last_weights;  // of the first layer's factors, and of the second one's
  std::optional<Tensor> hidden_bias, bias, residual;
  int64_t hidden_activation, activation;  // of csrc/cuda/common/epilogue.cuh
  std::optional<Tensor> nothing = std::nullopt;

  Layer first() const { return {x, weights, hidden_bias, nothing, hidden_activation, false, 1}; }
  // Of x's rows: what it reads has the first one's features.
  Layer second() const { return {x, last_weights, bias, residual, activation, false, 1}; }
  bool is_ordinary() const { return ::is_ordinary(first()) && ::is_ordinary(second()); }
};

// Features of the result; none if the operands do not fit together.
std::optional<int64_t> features_of_result(const Mlp& mlp, Rows x) {
  const auto hidden = features_of_result(mlp.first(), x);
  if (!hidden) return std::nullopt;
  x.features = *hidden;
  return features_of_result(mlp.second(), x);
}

PlanKey plan_key(const Mlp& mlp, const Rows& x, bool exact) {
  PlanKey key = {static_cast<int64_t>(mlp.weights.size())};
  for (const Layer& layer : {mlp.first(), mlp.second()}) {
    const PlanKey own = plan_key(layer, x, exact);
    key.insert(key.end(), own.begin(), own.end());
  }
  return key;
}

// For weights that are cached, and for those that change; under known_mutex.
std::array<std::unordered_map<PlanKey, PlanChoice, PlanKeyHash>, 2> known_mlps;

// The result, if a launch that computes it is in the table and can run; otherwise the caller computes it.
std::optional<Tensor> run_known_mlp(const Mlp& mlp, bool exact, bool repacked, const PreparedForms& forms,
                                    const std::optional<Tensor>& out) {
  if (!mlp.is_ordinary()) return std::nullopt;
  const Rows x = rows_of(mlp.x, false);
  const std::optional<int64_t> features = features_of_result(mlp, x);
  if (!features) return std::nullopt;
  if (out) {
    for (const auto* weights : {&mlp.weights, &mlp.last_weights}) {
      for (const Tensor& weight : *weights) {
        if (!takes_product(*out, mlp.x, weight, *features, false)) return std::nullopt;
      }
    }
    for (const auto* other : {&mlp.hidden_bias, &mlp.bias, &mlp.residual}) {
      if (*other && share_memory(*out, **other)) return std::nullopt;
    }
  }
  PlanChoice choice{};
  {
    const std::shared_lock lock(known_mutex);
    const auto& table = known_mlps[repacked];
    const auto it = table.find(plan_key(mlp, x, exact));
    if (it == table.end()) return std::nullopt;
    choice = it->second;
  }
  std::vector<Tensor> weights = mlp.weights;
  weights.insert(weights.end(), mlp.last_weights.begin(), mlp.last_weights.end());
  return launch_chain(choice, mlp.second(), x, {weights, 2, repacked, forms}, out, mlp.hidden_bias);
}

// Registers the kernel of `run_known_mlp` for operands like these; NONE: removes it.
void know_mlp_of(const Mlp& mlp, bool exact, bool repacked, const PlanChoice& choice) {
  if (!mlp.is_ordinary()) return;
  const Rows x = rows_of(mlp.x, false);
  if (!features_of_result(mlp, x)) return;
  const std::unique_lock lock(known_mutex);
  if (choice.kernel == NONE) {
    known_mlps[repacked].erase(plan_key(mlp, x, exact));
  } else {
    known_mlps[repacked][plan_key(mlp, x, exact)] = choice;
  }
}

void forget_mlps() {
  const std::unique_lock lock(known_mutex);
  for (auto& table : known_mlps) table.clear();
}

}  // namespace
