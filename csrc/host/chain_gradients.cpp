// Gradients of chains by the kernels of csrc/cuda/chain_grads_wgmma16.cuh, where a launch is known.
#include "chain_gradients.hpp"

#include <torch/csrc/stable/library.h>

#include <array>
#include <map>

#include "kernel_table.hpp"

namespace {

// The same structs as in csrc/cuda/common/weight_grad_shares.cuh and csrc/cuda/chain_grads_wgmma16.cuh.
struct SharesArguments {
  const void* shares;
  void* to;
  void* bias;
  int64_t count, elements, own;
};
struct ChainGradOperands {
  const void* grad;
  const void* x;
  void* to;
  void* bias;
  int64_t grad_stride, x_stride, rows_per_block, shares;
};
constexpr size_t MOST_SIBLINGS = 4;
struct ChainGradsArguments {
  ChainGradOperands left[MOST_SIBLINGS], right[MOST_SIBLINGS];
  int64_t batch;
};
struct ChainSharesArguments {
  SharesArguments left[MOST_SIBLINGS], right[MOST_SIBLINGS];
  int64_t left_blocks, blocks;
};

constexpr int64_t ADDED_BY_BLOCK = 128;

// As `ChainGradients.entry` of ksopt/kernels/families/chain_grads_wgmma16.py has it; no kernel: no launch for all.
enum Entry : size_t {
  KERNEL, ADDING, THREADS, SHARED_BYTES, ADDING_THREADS, BLOCKS, LEFT_SHARES, RIGHT_SHARES, LEFT_ROWS, RIGHT_ROWS,
  ADDING_BLOCKS, ENTRIES
};
using ChainGradsLaunch = std::array<int64_t, ENTRIES>;

// Sizes of left, sizes of right, rows, dtype, device, whether the biases' gradients are computed, siblings.
using ChainGradsKey = std::array<int64_t, 13>;
std::map<ChainGradsKey, ChainGradsLaunch> chain_grads_launches;
std::shared_mutex chain_grads_mutex;

// The operands of a call.
struct Operands {
  std::vector<Tensor> rows;  // as ksopt::ChainRows has them
  std::array<int64_t, 2> a, d;
  bool with_bias;

  size_t siblings() const { return rows.size() / 3; }
  const Tensor& grad(size_t sibling) const { return rows[sibling]; }
  const Tensor& between(size_t sibling) const { return rows[siblings() + sibling]; }
  const Tensor& grad_between(size_t sibling) const { return rows[2 * siblings() + sibling]; }
  const Tensor& x() const { return rows.back(); }
};

int64_t last_size(const Tensor& rows) { return rows.size(rows.dim() - 1); }

ChainGradsKey chain_grads_key(const Operands& operands) {
  const Tensor& x = operands.x();
  int32_t dtype = 0;
  aoti_torch_get_dtype(x.get(), &dtype);
  const int64_t left = operands.a[0] * operands.d[0], right = operands.a[1] * operands.d[1];
  return {operands.a[0],
          last_size(operands.grad(0)) / left,
          last_size(operands.between(0)) / left,
          operands.d[0],
          operands.a[1],
          last_size(operands.grad_between(0)) / right,
          last_size(x) / right,
          operands.d[1],
          x.numel() / last_size(x),
          dtype,
          x.get_device_index(),
          operands.with_bias,
          static_cast<int64_t>(operands.siblings())};
}

// In 16 bits: the gradients of the weights, and of the biases; none where the rows do not fit.
std::vector<Tensor> launch_chain_grads(const ChainGradsLaunch& launch, const ChainGradsKey& key,
                                       const Operands& operands) {
  const size_t siblings = operands.siblings();
  std::vector<int64_t> strides;
  for (const Tensor& one : operands.rows) {
    const auto stride = row_stride(one);
    if (!stride) return {};
    strides.push_back(*stride);
  }
  const int32_t device = operands.x().get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  std::vector<Tensor> results;
  for (size_t at = 0; at < siblings; ++at) {
    results.push_back(empty_like_in(operands.x(), {key[0], key[1], key[2], key[3]}));
    results.push_back(empty_like_in(operands.x(), {key[4], key[5], key[6], key[7]}));
  }
  const int64_t features = last_size(operands.grad(0));
  for (size_t at = 0; operands.with_bias && at < siblings; ++at) {
    results.push_back(empty_like_in(operands.x(), {features}));
  }
  const int64_t of_left = results[0].numel(), of_right = results[1].numel();
  const int64_t left_and_bias = of_left + (operands.with_bias ? features : 0);
  const int64_t left_shares = launch[LEFT_SHARES] > 1 ? launch[LEFT_SHARES] * left_and_bias : 0;
  const int64_t right_shares = launch[RIGHT_SHARES] > 1 ? launch[RIGHT_SHARES] * of_right : 0;
  std::optional<Tensor> shares;
  float* next = nullptr;
  if (left_shares + right_shares > 0) {
    const int64_t elements = static_cast<int64_t>(siblings) * (left_shares + right_shares);
    shares = empty_like_in(operands.x(), {elements}, aoti_torch_dtype_float32());
    next = static_cast<float*>(shares->mutable_data_ptr());
  }
  ChainGradsArguments arguments{};
  ChainSharesArguments adding{};
  arguments.batch = key[8];
  for (size_t at = 0; at < siblings; ++at) {
    void* const left = results[2 * at].mutable_data_ptr();
    void* const right = results[2 * at + 1].mutable_data_ptr();
    void* const bias = operands.with_bias ? results[2 * siblings + at].mutable_data_ptr() : nullptr;
    arguments.left[at] = {operands.grad(at).const_data_ptr(), operands.between(at).const_data_ptr(),
                          left_shares > 0 ? next : left, bias, strides[at], strides[siblings + at],
                          launch[LEFT_ROWS], launch[LEFT_SHARES]};
    if (left_shares > 0) adding.left[at] = {next, left, bias, launch[LEFT_SHARES], left_and_bias, of_left};
    next += left_shares;
    arguments.right[at] = {operands.grad_between(at).const_data_ptr(), operands.x().const_data_ptr(),
                           right_shares > 0 ? next : right, nullptr, strides[2 * siblings + at], strides.back(),
                           launch[RIGHT_ROWS], launch[RIGHT_SHARES]};
    if (right_shares > 0) adding.right[at] = {next, right, nullptr, launch[RIGHT_SHARES], of_right, of_right};
    next += right_shares;
  }
  launch_on_current_stream({reinterpret_cast<void*>(launch[KERNEL]), static_cast<unsigned>(launch[THREADS]),
                            static_cast<unsigned>(launch[SHARED_BYTES]), true, &arguments},
                           device, static_cast<unsigned>(launch[BLOCKS]));
  if (!shares) return results;
  adding.left_blocks = left_shares > 0 ? (left_and_bias + ADDED_BY_BLOCK - 1) / ADDED_BY_BLOCK : 0;
  adding.blocks = launch[ADDING_BLOCKS] / static_cast<int64_t>(siblings);
  launch_on_current_stream({reinterpret_cast<void*>(launch[ADDING]), static_cast<unsigned>(launch[ADDING_THREADS]), 0,
                            true, &adding},
                           device, static_cast<unsigned>(launch[ADDING_BLOCKS]));
  return results;
}

// Registers the launch for operands like these; all zeros: no launch for all.
void know_chain_grads(const std::vector<Tensor>& rows, int64_t left_a, int64_t left_d, int64_t right_a,
                      int64_t right_d, bool with_bias, std::vector<int64_t> entry) {
  if (entry.size() != ENTRIES) throw std::invalid_argument("ksopt: a chain's gradients have another entry");
  ChainGradsLaunch launch;
  for (size_t at = 0; at < ENTRIES; ++at) launch[at] = entry[at];
  const ChainGradsKey key = chain_grads_key({rows, {left_a, right_a}, {left_d, right_d}, with_bias});
  const std::unique_lock lock(chain_grads_mutex);
  chain_grads_launches.insert_or_assign(key, launch);
}

// A tensor of its own for a handle that stays the caller's, and the other way round.
Tensor borrowed(AtenTensorHandle handle) {
  AtenTensorHandle own = nullptr;
  aoti_torch_new_tensor_handle(handle, &own);
  return Tensor(own);
}
AtenTensorHandle owned(const Tensor& tensor) {
  AtenTensorHandle own = nullptr;
  aoti_torch_new_tensor_handle(tensor.get(), &own);
  return own;
}

}  // namespace

ksopt::KnownChainGradients ksopt::chain_gradients_known(const ChainRows& handles) {
  Operands operands{{}, {handles.a[0], handles.a[1]}, {handles.d[0], handles.d[1]}, handles.with_bias};
  for (AtenTensorHandle one : handles.rows) operands.rows.push_back(borrowed(one));
  const ChainGradsKey key = chain_grads_key(operands);
  std::optional<ChainGradsLaunch> launch;
  {
    const std::shared_lock lock(chain_grads_mutex);
    const auto it = chain_grads_launches.find(key);
    if (it != chain_grads_launches.end()) launch = it->second;
  }
  KnownChainGradients known{};
  if (!launch) return known;
  if ((*launch)[KERNEL] != 0) {
    for (const Tensor& one : launch_chain_grads(*launch, key, operands)) known.gradients.push_back(owned(one));
  }
  known.is_known = (*launch)[KERNEL] == 0 || !known.gradients.empty();
  return known;
}

void ksopt::forget_chain_gradients() {
  const std::unique_lock lock(chain_grads_mutex);
  chain_grads_launches.clear();
}

STABLE_TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def(
      "know_chain_grads(Tensor[] rows, int left_a, int left_d, int right_a, int right_d, bool with_bias, "
      "int[] entry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CompositeExplicitAutograd, m) {
  m.impl("know_chain_grads", TORCH_BOX(&know_chain_grads));
}
