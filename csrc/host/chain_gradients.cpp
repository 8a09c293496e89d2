// Gradients of chains by the kernels of csrc/cuda/chain_grads_wgmma16.cuh, where a launch is known.
#include "chain_gradients.hpp"

#include <torch/csrc/stable/library.h>

#include <array>
#include <map>

#include "kernel_table.hpp"

namespace {

// The same structs as in csrc/cuda/weight_grad_shares.cuh and csrc/cuda/chain_grads_wgmma16.cuh.
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
  int64_t grad_stride, x_stride, rows_per_block, shares;
};
struct ChainGradsArguments {
  ChainGradOperands left, right;
  void* bias;
  int64_t batch;
};
struct ChainSharesArguments {
  SharesArguments left, right;
  int64_t left_blocks;
};

constexpr int64_t ADDED_BY_BLOCK = 128;

// As `ChainGradients.entry` of ksopt/kernels/families/chain_grads_launcher.py has it; no kernel: one launch per factor.
enum Entry : size_t {
  KERNEL, ADDING, THREADS, SHARED_BYTES, ADDING_THREADS, BLOCKS, LEFT_SHARES, RIGHT_SHARES, LEFT_ROWS, RIGHT_ROWS,
  ADDING_BLOCKS, ENTRIES
};
using ChainGradsLaunch = std::array<int64_t, ENTRIES>;

// Sizes of left, sizes of right, rows, dtype, device, whether the bias's gradient is computed.
using ChainGradsKey = std::array<int64_t, 12>;
std::map<ChainGradsKey, ChainGradsLaunch> chain_grads_launches;
std::shared_mutex chain_grads_mutex;

// The operands of a call.
struct Rows {
  Tensor grad, between, grad_between, x;
  std::array<int64_t, 2> a, d;
  bool with_bias;
};

int64_t last_size(const Tensor& rows) { return rows.size(rows.dim() - 1); }

ChainGradsKey chain_grads_key(const Rows& rows) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(rows.x.get(), &dtype);
  const int64_t left = rows.a[0] * rows.d[0], right = rows.a[1] * rows.d[1];
  return {rows.a[0],
          last_size(rows.grad) / left,
          last_size(rows.between) / left,
          rows.d[0],
          rows.a[1],
          last_size(rows.grad_between) / right,
          last_size(rows.x) / right,
          rows.d[1],
          rows.x.numel() / last_size(rows.x),
          dtype,
          rows.x.get_device_index(),
          rows.with_bias};
}

struct ChainGradients {
  Tensor left, right;
  std::optional<Tensor> bias;
};

// In 16 bits; none where the rows do not fit.
std::optional<ChainGradients> launch_chain_grads(const ChainGradsLaunch& launch, const ChainGradsKey& key,
                                                 const Rows& rows) {
  const auto grad_stride = row_stride(rows.grad), between_stride = row_stride(rows.between);
  const auto grad_between_stride = row_stride(rows.grad_between), x_stride = row_stride(rows.x);
  if (!grad_stride || !between_stride || !grad_between_stride || !x_stride) return std::nullopt;
  const int32_t device = rows.x.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  ChainGradients results{empty_like_in(rows.x, {key[0], key[1], key[2], key[3]}),
                      empty_like_in(rows.x, {key[4], key[5], key[6], key[7]}), std::nullopt};
  if (rows.with_bias) results.bias = empty_like_in(rows.x, {last_size(rows.grad)});
  void* const of_bias = results.bias ? results.bias->mutable_data_ptr() : nullptr;
  const int64_t of_left = results.left.numel(), of_right = results.right.numel();
  const int64_t left_and_bias = of_left + (results.bias ? last_size(rows.grad) : 0);
  const int64_t left_shares = launch[LEFT_SHARES] > 1 ? launch[LEFT_SHARES] * left_and_bias : 0;
  const int64_t right_shares = launch[RIGHT_SHARES] > 1 ? launch[RIGHT_SHARES] * of_right : 0;
  std::optional<Tensor> shares;
  float* first = nullptr;
  if (left_shares + right_shares > 0) {
    shares = empty_like_in(rows.x, {left_shares + right_shares}, aoti_torch_dtype_float32());
    first = static_cast<float*>(shares->mutable_data_ptr());
  }
  ChainGradsArguments arguments{
      {rows.grad.const_data_ptr(), rows.between.const_data_ptr(),
       left_shares > 0 ? first : results.left.mutable_data_ptr(), *grad_stride, *between_stride, launch[LEFT_ROWS],
       launch[LEFT_SHARES]},
      {rows.grad_between.const_data_ptr(), rows.x.const_data_ptr(),
       right_shares > 0 ? first + left_shares : results.right.mutable_data_ptr(), *grad_between_stride, *x_stride,
       launch[RIGHT_ROWS], launch[RIGHT_SHARES]},
      of_bias,
      key[8]};
  launch_on_current_stream({reinterpret_cast<void*>(launch[KERNEL]), static_cast<unsigned>(launch[THREADS]),
                            static_cast<unsigned>(launch[SHARED_BYTES]), true, &arguments},
                           device, static_cast<unsigned>(launch[BLOCKS]));
  if (!shares) return results;
  ChainSharesArguments adding{};
  if (left_shares > 0) {
    adding.left = {first, results.left.mutable_data_ptr(), of_bias, launch[LEFT_SHARES], left_and_bias, of_left};
    adding.left_blocks = (left_and_bias + ADDED_BY_BLOCK - 1) / ADDED_BY_BLOCK;
  }
  if (right_shares > 0) {
    adding.right = {first + left_shares, results.right.mutable_data_ptr(), nullptr, launch[RIGHT_SHARES], of_right,
                    of_right};
  }
  launch_on_current_stream({reinterpret_cast<void*>(launch[ADDING]), static_cast<unsigned>(launch[ADDING_THREADS]), 0,
                            true, &adding},
                           device, static_cast<unsigned>(launch[ADDING_BLOCKS]));
  return results;
}

// Registers the launch for operands like these; all zeros: one launch per factor.
void know_chain_grads(const Tensor& grad, const Tensor& between, const Tensor& grad_between, const Tensor& x,
                      int64_t left_a, int64_t left_d, int64_t right_a, int64_t right_d, bool with_bias,
                      std::vector<int64_t> entry) {
  if (entry.size() != ENTRIES) throw std::invalid_argument("ksopt: a chain's gradients have another entry");
  ChainGradsLaunch launch;
  for (size_t at = 0; at < ENTRIES; ++at) launch[at] = entry[at];
  const ChainGradsKey key =
      chain_grads_key({grad, between, grad_between, x, {left_a, right_a}, {left_d, right_d}, with_bias});
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
  const Rows rows{borrowed(handles.grad),
                  borrowed(handles.between),
                  borrowed(handles.grad_between),
                  borrowed(handles.x),
                  {handles.a[0], handles.a[1]},
                  {handles.d[0], handles.d[1]},
                  handles.with_bias};
  const ChainGradsKey key = chain_grads_key(rows);
  std::optional<ChainGradsLaunch> launch;
  {
    const std::shared_lock lock(chain_grads_mutex);
    const auto it = chain_grads_launches.find(key);
    if (it != chain_grads_launches.end()) launch = it->second;
  }
  if (!launch) return {false, nullptr, nullptr, nullptr};
  if ((*launch)[KERNEL] == 0) return {true, nullptr, nullptr, nullptr};
  const auto results = launch_chain_grads(*launch, key, rows);
  if (!results) return {false, nullptr, nullptr, nullptr};
  return {true, owned(results->left), owned(results->right), results->bias ? owned(*results->bias) : nullptr};
}

void ksopt::forget_chain_gradients() {
  const std::unique_lock lock(chain_grads_mutex);
  chain_grads_launches.clear();
}

STABLE_TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def(
      "know_chain_grads(Tensor grad, Tensor between, Tensor grad_between, Tensor x, int left_a, int left_d, "
      "int right_a, int right_d, bool with_bias, int[] entry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CompositeExplicitAutograd, m) {
  m.impl("know_chain_grads", TORCH_BOX(&know_chain_grads));
}
