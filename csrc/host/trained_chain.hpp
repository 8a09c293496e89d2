// The forward pass of a trained chain, or of siblings, in one launch, after the launch that packs the weights, if both
// are in the table: as ksopt/kernels/families/chain_wgmma16.py (LaunchKeeping), without Python.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "plan_table.hpp"

namespace {

// Sizes of left, sizes of right, siblings, bias, bits of the batch, dtype, device, elements packed for the gradient of
// the input, activation.
using TrainedChainKey = std::array<int64_t, 15>;
std::map<TrainedChainKey, ChainKernel> trained_chains;  // those that store the values between the factors
std::shared_mutex trained_chains_mutex;

TrainedChainKey trained_chain_key(const Layer& layer, const Rows& x, int64_t of_grad) {
  const Tensor &left = layer.weights[0], &right = layer.weights[1];
  return {left.size(0),  left.size(1),  left.size(2),   left.size(3),           right.size(0),    right.size(1),
          right.size(2), right.size(3), layer.siblings, layer.bias.has_value(), bits_of(x.batch), x.dtype,
          x.device,      of_grad,       layer.activation};
}

// Where a trained chain's launch is looked up; none if a kernel cannot read x as it is.
std::optional<TrainedChainKey> key_of_trained_chain(const Layer& layer, int64_t of_grad) {
  const bool are_chains = layer.siblings > 0 && layer.weights.size() == 2 * static_cast<size_t>(layer.siblings);
  if (!are_chains || layer.x.dim() == 0 || layer.x.numel() == 0) return std::nullopt;
  const Rows x = rows_of(layer.x, false);
  if (!features_of_result(layer, x) || !row_stride(layer.x)) return std::nullopt;
  return trained_chain_key(layer, x, of_grad);
}

std::optional<ChainKernel> trained_chain_at(const TrainedChainKey& key) {
  const std::shared_lock lock(trained_chains_mutex);
  const auto at = trained_chains.find(key);
  return at == trained_chains.end() ? std::nullopt : std::optional(at->second);
}

// y [*batch, M], of siblings side by side; the values between the factors, of siblings one after the other; the weights
// packed for the gradient of x. None if their launch is not in the table or cannot read the operands without copies.
std::vector<Tensor> run_trained_chain(const Layer& layer, int64_t of_grad) {
  const auto key = key_of_trained_chain(layer, of_grad);
  const auto known = key && is_readable(layer.bias) ? trained_chain_at(*key) : std::nullopt;
  if (!known) return {};
  const ChainKernel& chain = *known;
  const Tensor& right = layer.weights[1];
  const int32_t device = layer.x.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  const PackedWeights packed = packed_for_both(chain.packing, layer.weights, static_cast<size_t>(layer.siblings));
  Tensor y = empty_like_in(layer.x, sizes_of_result(layer, chain.out_features));
  std::vector<int64_t> sizes = sizes_of_result(layer, right.size(0) * right.size(1) * right.size(3));
  if (layer.siblings > 1) sizes.insert(sizes.begin(), layer.siblings);
  Tensor between = empty_like_in(layer.x, sizes);
  const int64_t rows = y.numel() / chain.out_features;
  const ChainGrid grid = chain.grid_of(rows);
  ChainArguments arguments{layer.x.const_data_ptr(),
                           packed.packed.const_data_ptr(),
                           layer.bias ? layer.bias->const_data_ptr() : nullptr,
                           nullptr,
                           y.mutable_data_ptr(),
                           rows,
                           *row_stride(layer.x),
                           chain.out_features,
                           0,
                           grid.rows_per_block,
                           between.mutable_data_ptr()};
  launch_on_current_stream({chain.kernel, chain.threads, chain.shared_bytes, true, &arguments}, device, grid.blocks);
  return {y, between, packed.of_grad};
}

// Registers the launch of `run_trained_chain` for operands like these.
void know_trained_chain_of(const Layer& layer, const ChainKernel& launch) {
  const auto key = key_of_trained_chain(layer, launch.packing.elements_of_grad);
  if (!key) return;
  const std::unique_lock lock(trained_chains_mutex);
  trained_chains.insert_or_assign(*key, launch);
}

void forget_trained_chains() {
  const std::unique_lock lock(trained_chains_mutex);
  trained_chains.clear();
}

}  // namespace
