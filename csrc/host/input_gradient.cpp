// The gradient of the input of a trained chain, or of siblings, in one launch, after the launch that packs the weights,
// if both are in the table: as ksopt/kernels/families/input_grad_wgmma16.py, without Python.
#include "input_gradient.hpp"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <map>

#include "weight_packing.hpp"

namespace {

// The same struct as in csrc/cuda/common/input_grad_tile.cuh.
struct InputGradArguments {
  const void* grads[MOST_SIBLINGS];
  const void* weights;
  void *between, *to;
  int64_t batch, grad_strides[MOST_SIBLINGS], rows_per_block;
  const void *below, *bias;  // of the product of which the chain reads an activation, or null
};

// How they are computed; no kernel: by several launches.
struct InputGradLaunch {
  WeightPacking packing;
  void* kernel;
  unsigned blocks, threads, shared_bytes;
  int64_t rows_per_block;
};

// Sizes of left, of right, and of the factor below or zeros, rows, dtype, device, siblings, activation.
using InputGradKey = std::array<int64_t, 17>;
constexpr size_t ROWS_OF_KEY = 12;
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
  const size_t siblings = grads.size(), of_chains = 2 * siblings;
  const int64_t of_activation = activation_of(activation);
  const bool is_activated = of_activation != 0;
  if (siblings == 0 || siblings > MOST_SIBLINGS || weights.size() != of_chains + is_activated) return std::nullopt;
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
    if (!is_like(weights[at], weights[at < of_chains ? at % 2 : at], 4)) return std::nullopt;
  }
  const Tensor &left = weights[0], &right = weights[1];
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < dims; ++i) rows *= grad.size(i);
  if (rows == 0 || grad.size(dims - 1) != left.size(0) * left.size(1) * left.size(3)) return std::nullopt;
  InputGradKey key{};
  for (int64_t i = 0; i < 4; ++i) {
    key[i] = left.size(i), key[4 + i] = right.size(i);
    if (is_activated) key[8 + i] = weights[of_chains].size(i);
  }
  const std::array<int64_t, 5> others{rows, dtype_of(grad), grad.get_device_index(), static_cast<int64_t>(siblings),
                                      of_activation};
  std::copy(others.begin(), others.end(), key.begin() + ROWS_OF_KEY);
  return key;
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

// Whether the kernel can read a tensor beside the gradients as it is: it has so many elements.
bool is_readable(const std::optional<Tensor>& one, const Tensor& grad, int64_t elements) {
  return !one || (one->is_contiguous() && aligned_16(one->const_data_ptr()) && one->numel() == elements &&
                  dtype_of(*one) == dtype_of(grad) && one->get_device_index() == grad.get_device_index());
}

// The gradients of what the chains read, or of what is activated to that, and between their factors; none where rows of
// a gradient, or what is below, cannot be read as they are.
std::vector<Tensor> launch_input_grad(const InputGradLaunch& launch, int64_t rows, const std::vector<Tensor>& grads,
                                      const std::vector<Tensor>& weights, const std::optional<Tensor>& already_packed,
                                      const std::optional<Tensor>& below, const std::optional<Tensor>& bias) {
  InputGradArguments arguments{};
  for (size_t at = 0; at < grads.size(); ++at) {
    const auto stride = row_stride(grads[at]);
    if (!stride) return {};
    arguments.grads[at] = grads[at].const_data_ptr();
    arguments.grad_strides[at] = *stride;
  }
  const Tensor &grad = grads[0], &right = weights[1];
  const int64_t features = right.size(0) * right.size(2);
  const int64_t of_below = below ? weights.back().size(2) * weights.back().size(3) : 0;
  if (!is_readable(below, grad, rows * of_below) || !is_readable(bias, grad, features)) return {};
  const int32_t device = grad.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  const bool is_packed = already_packed && already_packed->numel() == launch.packing.elements;
  const Tensor packed = is_packed ? *already_packed : packed_weights(launch.packing, weights, grads.size());
  std::vector<Tensor> gradients{rows_like(grad, features, 1),
                                rows_like(grad, right.size(0) * right.size(1), grads.size())};
  if (below) arguments.below = below->const_data_ptr();
  if (bias) arguments.bias = bias->const_data_ptr();
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
                                                      AtenTensorHandle packed, AtenTensorHandle below,
                                                      AtenTensorHandle bias, const std::string& activation) {
  const std::vector<Tensor> rows = borrowed(grads), of_factors = borrowed(weights);
  const auto key = input_grad_key(rows, of_factors, activation);
  const auto launch = key ? input_grad_launch(*key) : std::nullopt;
  if (!launch) return {false, {}};
  if (launch->kernel == nullptr) return {true, {}};
  KnownInputGradient known{};
  for (const Tensor& one : launch_input_grad(*launch, (*key)[ROWS_OF_KEY], rows, of_factors, borrowed_if_any(packed),
                                             borrowed_if_any(below), borrowed_if_any(bias))) {
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
