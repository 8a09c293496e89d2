// Weight gradients by the kernels of csrc/cuda/common/weight_grad_shares.cuh, where a launch is known.
#pragma once

#include <array>
#include <map>

#include "kernel_table.hpp"

namespace {

// The same structs as in csrc/cuda/common/weight_grad_shares.cuh.
struct WeightGradArguments {
  const void* grad;
  const void* x;
  void* to;
  void* bias;
  int64_t batch, grad_stride, x_stride, rows_per_share, shares;
};
struct SharesArguments {
  const void* shares;
  void* to;
  void* bias;
  int64_t count, elements, own;
};

// How a gradient is computed; no kernel: by torch.
struct WeightGradLaunch {
  void* kernel;
  void* adding;  // adds the shares
  unsigned threads, shared_bytes, adding_threads;
  int64_t blocks, shares, rows_per_share, adding_blocks;
};

// a, b, c, d, rows, dtype, device, whether the gradient of a bias is computed beside it.
using WeightGradKey = std::array<int64_t, 8>;
std::map<WeightGradKey, WeightGradLaunch> weight_grad_launches;
std::shared_mutex weight_grad_mutex;

int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

WeightGradKey weight_grad_key(const Tensor& grad, const Tensor& x, int64_t a, int64_t d, bool with_bias) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(x.get(), &dtype);
  const int64_t last = x.dim() - 1;
  return {a, grad.size(last) / (a * d), x.size(last) / (a * d), d, rows_of(x), dtype, x.get_device_index(), with_bias};
}

std::optional<WeightGradLaunch> weight_grad_launch(const WeightGradKey& key) {
  const std::shared_lock lock(weight_grad_mutex);
  const auto it = weight_grad_launches.find(key);
  return it == weight_grad_launches.end() ? std::nullopt : std::optional(it->second);
}

// dK [a, b, c, d], and the gradient of a bias, if requested.
struct WeightGrad {
  Tensor of_weight;
  std::optional<Tensor> of_bias;
};

// Of grad [*batch, a*b*d] and x [*batch, a*c*d] in 16 bits; none where the rows do not fit.
std::optional<WeightGrad> launch_weight_grad(const WeightGradLaunch& launch, const WeightGradKey& key,
                                             const Tensor& grad, const Tensor& x) {
  const auto grad_stride = row_stride(grad), x_stride = row_stride(x);
  if (!grad_stride || !x_stride) return std::nullopt;
  const int32_t device = x.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  const int64_t own = key[0] * key[1] * key[2] * key[3], features = key[0] * key[1] * key[3];
  WeightGrad gradients{empty_like_in(x, std::vector<int64_t>(key.begin(), key.begin() + 4)), std::nullopt};
  if (key[7]) gradients.of_bias = empty_like_in(x, {features});
  void* const of_bias = gradients.of_bias ? gradients.of_bias->mutable_data_ptr() : nullptr;
  const int64_t elements = own + (gradients.of_bias ? features : 0);
  Tensor to = gradients.of_weight;
  if (launch.shares > 1) to = empty_like_in(x, {launch.shares, elements}, aoti_torch_dtype_float32());
  WeightGradArguments arguments{grad.const_data_ptr(), x.const_data_ptr(), to.mutable_data_ptr(), of_bias, key[4],
                                *grad_stride, *x_stride, launch.rows_per_share, launch.shares};
  launch_on_current_stream({launch.kernel, launch.threads, launch.shared_bytes, true, &arguments}, device,
                           static_cast<unsigned>(launch.blocks));
  if (launch.shares > 1) {
    SharesArguments adding{to.const_data_ptr(), gradients.of_weight.mutable_data_ptr(), of_bias, launch.shares, elements,
                           own};
    launch_on_current_stream({launch.adding, launch.adding_threads, 0, true, &adding}, device,
                             static_cast<unsigned>(launch.adding_blocks));
  }
  return gradients;
}

// kernel 0: by torch.
void know_weight_grad(const Tensor& grad, const Tensor& x, int64_t a, int64_t d, bool with_bias, int64_t kernel,
                      int64_t adding, int64_t threads, int64_t shared_bytes, int64_t adding_threads, int64_t blocks,
                      int64_t shares, int64_t rows_per_share, int64_t adding_blocks) {
  const WeightGradKey key = weight_grad_key(grad, x, a, d, with_bias);
  const std::unique_lock lock(weight_grad_mutex);
  weight_grad_launches.insert_or_assign(
      key, WeightGradLaunch{reinterpret_cast<void*>(kernel), reinterpret_cast<void*>(adding),
                            static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes),
                            static_cast<unsigned>(adding_threads), blocks, shares, rows_per_share, adding_blocks});
}

void forget_weight_grads() {
  const std::unique_lock lock(weight_grad_mutex);
  weight_grad_launches.clear();
}

}  // namespace
