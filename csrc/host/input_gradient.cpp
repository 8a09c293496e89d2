// The gradient of a trained chain's input in one launch, after the launch that packs the weights, if both are in the
// table: as ksopt/kernels/families/input_grad_wgmma16.py, without Python.
#include "input_gradient.hpp"

#include <torch/csrc/stable/library.h>

#include <array>
#include <map>

#include "weight_packing.hpp"

namespace {

// The same struct as in csrc/cuda/input_grad_tile.cuh.
struct InputGradArguments {
  const void* grad;
  const void* weights;
  void *between, *to;
  int64_t batch, grad_stride, rows_per_block;
};

// How they are computed; no kernel: by one launch per factor.
struct InputGradLaunch {
  WeightPacking packing;
  void* kernel;
  unsigned blocks, threads, shared_bytes;
  int64_t rows_per_block;
};

// Sizes of left, sizes of right, rows, dtype, device.
using InputGradKey = std::array<int64_t, 11>;
std::map<InputGradKey, InputGradLaunch> input_grad_launches;
std::shared_mutex input_grad_mutex;

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor.get(), &dtype);
  return dtype;
}

// None if the operands do not fit together.
std::optional<InputGradKey> input_grad_key(const Tensor& grad, const Tensor& left, const Tensor& right) {
  const int64_t dims = grad.dim();
  if (dims == 0 || left.dim() != 4 || right.dim() != 4) return std::nullopt;
  for (const Tensor* weight : {&left, &right}) {
    const bool is_like_grad =
        dtype_of(*weight) == dtype_of(grad) && weight->get_device_index() == grad.get_device_index();
    if (!is_like_grad) return std::nullopt;
  }
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < dims; ++i) rows *= grad.size(i);
  if (rows == 0 || grad.size(dims - 1) != left.size(0) * left.size(1) * left.size(3)) return std::nullopt;
  return InputGradKey{left.size(0),  left.size(1),  left.size(2),  left.size(3), right.size(0),   right.size(1),
                      right.size(2), right.size(3), rows,          dtype_of(grad), grad.get_device_index()};
}

std::optional<InputGradLaunch> input_grad_launch(const InputGradKey& key) {
  const std::shared_lock lock(input_grad_mutex);
  const auto at = input_grad_launches.find(key);
  return at == input_grad_launches.end() ? std::nullopt : std::optional(at->second);
}

// Like grad, with other features.
Tensor rows_like(const Tensor& grad, int64_t features) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i + 1 < grad.dim(); ++i) sizes.push_back(grad.size(i));
  sizes.push_back(features);
  return empty_like_in(grad, sizes);
}

struct InputGradient {
  Tensor of_x, of_between;
};

InputGradient launch_input_grad(const InputGradLaunch& launch, int64_t rows, int64_t grad_stride, const Tensor& grad,
                                const Tensor& left, const Tensor& right, const std::optional<Tensor>& already_packed) {
  const int32_t device = grad.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  const bool is_packed = already_packed && already_packed->numel() == launch.packing.elements;
  const Tensor packed = is_packed ? *already_packed : packed_weights(launch.packing, {left, right}, 1);
  InputGradient gradients{rows_like(grad, right.size(0) * right.size(2)), rows_like(grad, right.size(0) * right.size(1))};
  InputGradArguments arguments{grad.const_data_ptr(),
                               packed.const_data_ptr(),
                               gradients.of_between.mutable_data_ptr(),
                               gradients.of_x.mutable_data_ptr(),
                               rows,
                               grad_stride,
                               launch.rows_per_block};
  // It waits for the kernel before it, that which packs or another, which has waited for all before it.
  launch_on_current_stream({launch.kernel, launch.threads, launch.shared_bytes, true, &arguments}, device,
                           launch.blocks);
  return gradients;
}

// Registers the launch of `input_gradient_known` for operands like these; kernel 0: one launch per factor.
void know_input_grad(const Tensor& grad, const Tensor& left, const Tensor& right, int64_t pack, int64_t pack_blocks,
                     int64_t pack_threads, int64_t packed_elements, int64_t kernel, int64_t blocks, int64_t threads,
                     int64_t shared_bytes, int64_t rows_per_block) {
  const auto key = input_grad_key(grad, left, right);
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

AtenTensorHandle owned(const Tensor& tensor) {
  AtenTensorHandle own = nullptr;
  aoti_torch_new_tensor_handle(tensor.get(), &own);
  return own;
}

}  // namespace

ksopt::KnownInputGradient ksopt::input_gradient_known(AtenTensorHandle grad, AtenTensorHandle left,
                                                      AtenTensorHandle right, AtenTensorHandle packed) {
  const Tensor rows = borrowed(grad), of_left = borrowed(left), of_right = borrowed(right);
  const auto key = input_grad_key(rows, of_left, of_right);
  const auto launch = key ? input_grad_launch(*key) : std::nullopt;
  if (!launch) return {false, nullptr, nullptr};
  if (launch->kernel == nullptr) return {true, nullptr, nullptr};
  const auto stride = row_stride(rows);
  if (!stride) return {false, nullptr, nullptr};  // Python copies them
  const InputGradient gradients = launch_input_grad(*launch, (*key)[8], *stride, rows, of_left, of_right,
                                                    packed ? std::optional(borrowed(packed)) : std::nullopt);
  return {true, owned(gradients.of_x), owned(gradients.of_between)};
}

void ksopt::forget_input_gradients() {
  const std::unique_lock lock(input_grad_mutex);
  input_grad_launches.clear();
}

STABLE_TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def(
      "know_input_grad(Tensor grad, Tensor left, Tensor right, int pack, int pack_blocks, int pack_threads, "
      "int packed_elements, int kernel, int blocks, int threads, int shared_bytes, int rows_per_block) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CompositeExplicitAutograd, m) {
  m.impl("know_input_grad", TORCH_BOX(&know_input_grad));
}
