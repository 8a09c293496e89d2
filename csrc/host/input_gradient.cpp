// The gradient of the input of a trained chain, or of siblings, in one launch, after the launch that packs the weights,
// if both are in the table: as ksopt/kernels/families/input_grad_wgmma16.py, without Python.
#include "input_gradient.hpp"

#include <torch/csrc/stable/library.h>

#include <array>
#include <map>

#include "weight_packing.hpp"

namespace {

// The same struct as in csrc/cuda/input_grad_tile.cuh.
struct InputGradArguments {
  const void* grads[MOST_SIBLINGS];
  const void* weights;
  void *between, *to;
  int64_t batch, grad_strides[MOST_SIBLINGS], rows_per_block;
  const void* h;  // what the chains read an activation of, or null
  void* activated;
};

// How they are computed; no kernel: by several launches.
struct InputGradLaunch {
  WeightPacking packing;
  void* kernel;
  unsigned blocks, threads, shared_bytes;
  int64_t rows_per_block;
};

// Sizes of left, sizes of right, rows, dtype, device, siblings, activation.
using InputGradKey = std::array<int64_t, 13>;
std::map<InputGradKey, InputGradLaunch> input_grad_launches;
std::shared_mutex input_grad_mutex;

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor.get(), &dtype);
  return dtype;
}

// None if the operands do not fit together.
std::optional<InputGradKey> input_grad_key(const std::vector<Tensor>& grads, const std::vector<Tensor>& weights,
                                           const std::string& activation) {
  const size_t siblings = grads.size();
  if (siblings == 0 || siblings > MOST_SIBLINGS || weights.size() != 2 * siblings) return std::nullopt;
  const Tensor& grad = grads[0];
  const int64_t dims = grad.dim();
  if (dims == 0) return std::nullopt;
  const auto is_like = [&](const Tensor& one, const Tensor& first, int64_t count) {
    if (dtype_of(one) != dtype_of(grad) || one.get_device_index() != grad.get_device_index()) return false;
    if (one.dim() != count || first.dim() != count) return false;
    for (int64_t i = 0; i < count; ++i) {
      if (one.size(i) != first.size(i)) return false;
    }
    return true;
  };
  for (const Tensor& one : grads) {
    if (!is_like(one, grad, dims)) return std::nullopt;
  }
  for (size_t at = 0; at < weights.size(); ++at) {
    if (!is_like(weights[at], weights[at % 2], 4)) return std::nullopt;
  }
  const Tensor &left = weights[0], &right = weights[1];
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < dims; ++i) rows *= grad.size(i);
  if (rows == 0 || grad.size(dims - 1) != left.size(0) * left.size(1) * left.size(3)) return std::nullopt;
  return InputGradKey{left.size(0),  left.size(1),  left.size(2),   left.size(3),
                      right.size(0), right.size(1), right.size(2),  right.size(3),
                      rows,          dtype_of(grad), grad.get_device_index(), static_cast<int64_t>(siblings),
                      activation_of(activation)};
}

std::optional<InputGradLaunch> input_grad_launch(const InputGradKey& key) {
  const std::shared_lock lock(input_grad_mutex);
  const auto at = input_grad_launches.find(key);
  return at == input_grad_launches.end() ? std::nullopt : std::optional(at->second);
}

// Like grad, with other features, so many times.
Tensor rows_like(const Tensor& grad, int64_t features, size_t times) {
  std::vector<int64_t> sizes;
  if (times > 1) sizes.push_back(static_cast<int64_t>(times));
  for (int64_t i = 0; i + 1 < grad.dim(); ++i) sizes.push_back(grad.size(i));
  sizes.push_back(features);
  return empty_like_in(grad, sizes);
}

// The gradients of what the chains read and between their factors, and what they read where it is an activation of h;
// none where rows of a gradient, or h, cannot be read as they are.
std::vector<Tensor> launch_input_grad(const InputGradLaunch& launch, int64_t rows, const std::vector<Tensor>& grads,
                                      const std::vector<Tensor>& weights,
                                      const std::optional<Tensor>& already_packed, const std::optional<Tensor>& h) {
  InputGradArguments arguments{};
  for (size_t at = 0; at < grads.size(); ++at) {
    const auto stride = row_stride(grads[at]);
    if (!stride) return {};
    arguments.grads[at] = grads[at].const_data_ptr();
    arguments.grad_strides[at] = *stride;
  }
  const Tensor &grad = grads[0], &right = weights[1];
  const int64_t features = right.size(0) * right.size(2);
  const bool is_readable = !h || (h->is_contiguous() && aligned_16(h->const_data_ptr()) &&
                                  h->numel() == rows * features && dtype_of(*h) == dtype_of(grad) &&
                                  h->get_device_index() == grad.get_device_index());
  if (!is_readable) return {};
  const int32_t device = grad.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  const bool is_packed = already_packed && already_packed->numel() == launch.packing.elements;
  const Tensor packed = is_packed ? *already_packed : packed_weights(launch.packing, weights, grads.size());
  std::vector<Tensor> gradients{rows_like(grad, features, 1),
                                rows_like(grad, right.size(0) * right.size(1), grads.size())};
  if (h) {
    gradients.push_back(rows_like(grad, features, 1));
    arguments.h = h->const_data_ptr();
    arguments.activated = gradients[2].mutable_data_ptr();
  }
  arguments.weights = packed.const_data_ptr();
  arguments.between = gradients[1].mutable_data_ptr();
  arguments.to = gradients[0].mutable_data_ptr();
  arguments.batch = rows;
  arguments.rows_per_block = launch.rows_per_block;
  // It waits for the kernel before it, that which packs or another, which has waited for all before it.
  launch_on_current_stream({launch.kernel, launch.threads, launch.shared_bytes, true, &arguments}, device,
                           launch.blocks);
  return gradients;
}

// Registers the launch of `input_gradient_known` for operands like these; kernel 0: several launches.
void know_input_grad(std::vector<Tensor> grads, std::vector<Tensor> weights, std::string activation, int64_t pack,
                     int64_t pack_blocks, int64_t pack_threads, int64_t packed_elements, int64_t kernel,
                     int64_t blocks, int64_t threads, int64_t shared_bytes, int64_t rows_per_block) {
  const auto key = input_grad_key(grads, weights, activation);
  if (!key) return;
  const std::unique_lock lock(input_grad_mutex);
  input_grad_launches.insert_or_assign(
      *key, InputGradLaunch{packing_of(pack, pack_blocks, pack_threads, packed_elements),
                            reinterpret_cast<void*>(kernel),
                            static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                            static_cast<unsigned>(shared_bytes), rows_per_block});
}

Tensor borrowed(AtenTensorHandle handle) {
  AtenTensorHandle own = nullptr;
  aoti_torch_new_tensor_handle(handle, &own);
  return Tensor(own);
}

std::optional<Tensor> borrowed_if_any(AtenTensorHandle handle) {
  return handle == nullptr ? std::nullopt : std::optional(borrowed(handle));
}

std::vector<Tensor> borrowed(const std::vector<AtenTensorHandle>& handles) {
  std::vector<Tensor> tensors;
  for (AtenTensorHandle handle : handles) tensors.push_back(borrowed(handle));
  return tensors;
}

AtenTensorHandle owned(const Tensor& tensor) {
  AtenTensorHandle own = nullptr;
  aoti_torch_new_tensor_handle(tensor.get(), &own);
  return own;
}

}  // namespace

ksopt::KnownInputGradient ksopt::input_gradient_known(const std::vector<AtenTensorHandle>& grads,
                                                      const std::vector<AtenTensorHandle>& weights,
                                                      AtenTensorHandle packed, AtenTensorHandle h,
                                                      const std::string& activation) {
  const std::vector<Tensor> rows = borrowed(grads), of_factors = borrowed(weights);
  const auto key = input_grad_key(rows, of_factors, activation);
  const auto launch = key ? input_grad_launch(*key) : std::nullopt;
  if (!launch) return {false, {}};
  if (launch->kernel == nullptr) return {true, {}};
  KnownInputGradient known{};
  for (const Tensor& one : launch_input_grad(*launch, (*key)[8], rows, of_factors, borrowed_if_any(packed),
                                             borrowed_if_any(h))) {
    known.gradients.push_back(owned(one));
  }
  known.is_known = !known.gradients.empty();  // else Python copies the operands
  return known;
}

void ksopt::forget_input_gradients() {
  const std::unique_lock lock(input_grad_mutex);
  input_grad_launches.clear();
}

STABLE_TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def(
      "know_input_grad(Tensor[] grads, Tensor[] weights, str activation, int pack, int pack_blocks, int pack_threads, "
      "int packed_elements, int kernel, int blocks, int threads, int shared_bytes, int rows_per_block) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CompositeExplicitAutograd, m) {
  m.impl("know_input_grad", TORCH_BOX(&know_input_grad));
}
