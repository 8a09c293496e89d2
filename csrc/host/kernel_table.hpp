// Compiled kernels and how they are launched, on the current stream of x's device.
//
// Without any CUDA header: the driver functions are looked up when the first kernel is launched,
// which lets the library build and load on a machine that has no GPU.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using torch::stable::Tensor;

// Activations, those of ksopt/epilogue.py: behind those of csrc/cuda/common/epilogue.cuh the gates, in their order.
constexpr int64_t FIRST_GATE = 5, ALL_ACTIVATIONS = 9;

int64_t activation_of(const std::string& name) {
  static const std::array<std::string, ALL_ACTIVATIONS> names = {
      "none", "relu", "gelu", "gelu_tanh", "silu", "relu_gate", "gelu_gate", "gelu_tanh_gate", "silu_gate"};
  return std::find(names.begin(), names.end(), name) - names.begin();
}

// ``EpilogueArguments`` of csrc/cuda/common/kernel_params.cuh, whose beginning other kernels take.
struct Arguments {
  const void* x;
  const void* weight;
  void* y;
  int64_t batch;
  int64_t x_batch_stride, x_feature_stride;
  int64_t y_batch_stride, y_feature_stride;
  int64_t weight_stride_a, weight_stride_b, weight_stride_c, weight_stride_d;
  int64_t weight_is_settled;
  const void* bias;
  const void* residual;
};

// Instead of a plan's index: no other is needed; one is, but it was not compiled yet.
constexpr int64_t NONE = -1, LATER = -2;

// A kernel and how to launch it on any batch.
struct Plan {
  void* kernel;
  int64_t out_features;
  bool batch_last;
  unsigned threads;
  unsigned shared_bytes;
  int64_t rows_per_tile;       // batch rows that one tile covers
  int64_t tiles_per_row_tile;  // tiles that cover all features of those rows
  int64_t max_blocks;          // blocks loop over tiles beyond this count
  bool early;                  // it waits for earlier kernels by itself, so it may start before their end
  int64_t fallback = NONE;     // plan for operands that are not fit for 16-byte access
  bool in_float32 = false;     // its results are, of operands of another type
};

std::vector<Plan> plans;
std::shared_mutex plans_mutex;

// The epilogue of a product, which is no gate, in the launch of another plan.
struct Within {
  int64_t plan;
  std::optional<Tensor> bias, residual;  // contiguous; the residual of y's shape
};

// A plan with an epilogue: which, activation, bias, residual, whether results are in float32 -> the plan that computes
// both; NONE: no plan does.
std::map<std::array<int64_t, 5>, int64_t> plans_within;  // under plans_mutex

void* required(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_GLOBAL);
  void* symbol = handle ? dlsym(handle, name) : nullptr;
  if (!symbol) throw std::runtime_error(std::string("ksopt: ") + name + " was not found in " + library);
  return symbol;
}

// The driver's CUlaunchAttribute and CUlaunchConfig (cuda.h), as they have been since CUDA 11.8.
struct LaunchAttribute {
  unsigned id;
  unsigned padding;
  union {
    int programmatic_stream_serialization;
    char bytes[64];
  };
};
struct LaunchConfig {
  unsigned blocks[3], threads[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
constexpr unsigned PROGRAMMATIC_STREAM_SERIALIZATION = 6;

using LaunchKernel = int (*)(const LaunchConfig*, void*, void**, void**);
using GetErrorString = int (*)(int, const char**);
using CurrentStream = AOTITorchError (*)(int32_t, void**);

constexpr int INVALID_CONTEXT = 201;

// Gives the device's context, which torch shares, to a thread that has none: one whose first use of
// CUDA is a launch, for memory from torch's cache takes no call that would do it.
int take_context(int32_t device) {
  static const auto get_device = reinterpret_cast<int (*)(int*, int)>(required("libcuda.so.1", "cuDeviceGet"));
  static const auto retain =
      reinterpret_cast<int (*)(void**, int)>(required("libcuda.so.1", "cuDevicePrimaryCtxRetain"));
  static const auto set_current =
      reinterpret_cast<int (*)(void*)>(required("libcuda.so.1", "cuCtxSetCurrent"));
  int handle = 0;
  void* context = nullptr;
  if (const int status = get_device(&handle, device)) return status;
  if (const int status = retain(&context, handle)) return status;
  return set_current(context);
}

// The current stream of a device; the null pointer is the default one.
void* current_stream(int32_t device) {
  static const auto ask = reinterpret_cast<CurrentStream>(
      required("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"));
  void* stream = nullptr;
  if (ask(device, &stream) != 0) {
    throw std::runtime_error("ksopt: the current CUDA stream is not available");
  }
  return stream;
}

// Whether work on a stream becomes part of a CUDA graph, as far as the driver can tell. Torch never
// captures the default stream, for which the driver refuses this query during a capture.
bool is_capturing(void* stream) {
  static const auto ask =
      reinterpret_cast<int (*)(void*, int*)>(required("libcuda.so.1", "cuStreamIsCapturing"));
  int capturing = 0;
  return stream != nullptr && (ask(stream, &capturing) != 0 || capturing != 0);
}

// How a kernel is launched; `arguments` is what it takes by value.
struct Launch {
  void* kernel;
  unsigned threads, shared_bytes;
  bool early;
  void* arguments;
};

void launch_on_current_stream(const Launch& launch, int32_t device, unsigned blocks) {
  static const auto launch_kernel =
      reinterpret_cast<LaunchKernel>(required("libcuda.so.1", "cuLaunchKernelEx"));
  static const auto error_string =
      reinterpret_cast<GetErrorString>(required("libcuda.so.1", "cuGetErrorString"));
  void* stream = current_stream(device);
  void* parameters[] = {launch.arguments};
  LaunchAttribute early{};
  early.id = PROGRAMMATIC_STREAM_SERIALIZATION;
  early.programmatic_stream_serialization = 1;
  const LaunchConfig config{{blocks, 1, 1}, {launch.threads, 1, 1}, launch.shared_bytes, stream,
                            &early,         launch.early ? 1u : 0u};
  int status = launch_kernel(&config, launch.kernel, parameters, nullptr);
  if (status == INVALID_CONTEXT && (status = take_context(device)) == 0) {
    status = launch_kernel(&config, launch.kernel, parameters, nullptr);
  }
  if (status != 0) {
    const char* words = "unknown error";
    error_string(status, &words);
    throw std::runtime_error(std::string("ksopt: the kernel could not be launched: ") + words);
  }
}

// The stride with which the dimensions [first, last) are walked as one; none if no stride does that.
// Dimensions of size 1 do not count: theirs may be anything, also in what torch calls contiguous.
std::optional<int64_t> common_stride(const Tensor& x, int64_t first, int64_t last) {
  std::optional<int64_t> stride;
  int64_t next = 0;
  for (int64_t i = last; i-- > first;) {
    if (x.size(i) == 1) continue;
    if (!stride) {
      stride = x.stride(i);
    } else if (x.stride(i) != next) {
      return std::nullopt;
    }
    next = x.stride(i) * x.size(i);
  }
  return stride.value_or(first == 0 ? 0 : 1);  // of one row: batch last, it is one run of elements
}

Plan plan_at(int64_t index) {
  const std::shared_lock lock(plans_mutex);
  return plans.at(static_cast<size_t>(index));
}

bool aligned_16(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// The distance of rows that begin at multiples of 16 bytes and lie in one run of elements each.
std::optional<int64_t> row_stride(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  const auto stride = common_stride(x, 0, last);
  const bool fits = stride && x.stride(last) == 1 && aligned_16(x.const_data_ptr()) &&
                    *stride * static_cast<int64_t>(x.element_size()) % 16 == 0;
  return fits ? stride : std::nullopt;
}

// Whether x can be read in whole 16-byte vectors along its fastest dimension, and a contiguous weight, and
// y written so. Batch first, the pattern decides how the rows of y are aligned: families refuse patterns
// whose rows they cannot write.
bool fit_for_vectors(const Arguments& arguments, bool batch_last, int64_t element) {
  const int64_t fast = batch_last ? arguments.x_batch_stride : arguments.x_feature_stride;
  const int64_t slow = batch_last ? arguments.x_feature_stride : arguments.x_batch_stride;
  const bool is_y_aligned = !batch_last || arguments.y_feature_stride * element % 16 == 0;
  return fast == 1 && slow * element % 16 == 0 && is_y_aligned &&
         aligned_16(arguments.x) && aligned_16(arguments.weight) && aligned_16(arguments.y) &&
         aligned_16(arguments.bias) && aligned_16(arguments.residual);
}

// A new contiguous tensor of x's dtype, or another, and device. (The operator new_empty would go through the
// dispatcher, boxed: a microsecond.)
Tensor empty_like_in(const Tensor& x, const std::vector<int64_t>& sizes, std::optional<int32_t> other = std::nullopt) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 0 ? sizes[i] : 1);
  int32_t dtype = 0, type = 0;
  aoti_torch_get_dtype(x.get(), &dtype);
  if (other) dtype = *other;
  aoti_torch_get_device_type(x.get(), &type);
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, type,
                               x.get_device_index(), &handle) != 0) {
    throw std::runtime_error("ksopt: there is no memory for the result");  // launcher.py asks torch why
  }
  return Tensor(handle);
}

// The dtype of results, where it is not that of the operands.
std::optional<int32_t> type_of_results(bool in_float32) {
  return in_float32 ? std::optional(aoti_torch_dtype_float32()) : std::nullopt;
}

// The weight as it lies in memory, which may be in any order.
void set_weight(Arguments& arguments, const Tensor& weight) {
  arguments.weight = weight.const_data_ptr();
  arguments.weight_stride_a = weight.stride(0);
  arguments.weight_stride_b = weight.stride(1);
  arguments.weight_stride_c = weight.stride(2);
  arguments.weight_stride_d = weight.stride(3);
}

// Launches a plan's kernel with the blocks that the arguments' batch takes.
void launch_rows(const Plan& plan, Arguments& arguments, int32_t device) {
  const int64_t tiles =
      (arguments.batch + plan.rows_per_tile - 1) / plan.rows_per_tile * plan.tiles_per_row_tile;
  launch_on_current_stream({plan.kernel, plan.threads, plan.shared_bytes, plan.early, &arguments}, device,
                           static_cast<unsigned>(tiles < plan.max_blocks ? tiles : plan.max_blocks));
}

// x: (*batch, N) or, batch last, (N, *batch), whose batch dims have one stride; weight: (a, b, c, d).
// out: where y is written, contiguous and aligned to 16 bytes, sharing no memory with the operands; a
// new tensor if there is none.
// within: what the kernel computes beside the product, if it does.
// settled: the kernel launched right before this one does not write the weight.
// None if that takes a kernel that was not compiled yet.
std::optional<Tensor> launch_plan(Plan plan, const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& out, const Within* within = nullptr,
                                  bool settled = false) {
  const int64_t dims = x.dim();
  const int64_t first = plan.batch_last ? 1 : 0, last = plan.batch_last ? dims : dims - 1;
  std::vector<int64_t> sizes(static_cast<size_t>(dims));
  int64_t batch = 1;
  for (int64_t i = 0; i < dims; ++i) sizes[static_cast<size_t>(i)] = x.size(i);
  for (int64_t i = first; i < last; ++i) batch *= sizes[static_cast<size_t>(i)];
  sizes[static_cast<size_t>(plan.batch_last ? 0 : dims - 1)] = plan.out_features;

  const int32_t device = x.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  Tensor y = out ? *out : empty_like_in(x, sizes, type_of_results(plan.in_float32));
  if (batch == 0) return y;

  Arguments arguments{};
  arguments.x = x.const_data_ptr();
  set_weight(arguments, weight);
  arguments.weight_is_settled = settled;
  arguments.y = y.mutable_data_ptr();
  arguments.batch = batch;
  arguments.x_batch_stride = common_stride(x, first, last).value();
  arguments.x_feature_stride = x.stride(plan.batch_last ? 0 : dims - 1);
  arguments.y_batch_stride = plan.batch_last ? 1 : plan.out_features;
  arguments.y_feature_stride = plan.batch_last ? batch : 1;
  if (within && within->bias) arguments.bias = within->bias->const_data_ptr();
  if (within && within->residual) arguments.residual = within->residual->const_data_ptr();

  if (plan.fallback != NONE &&
      !fit_for_vectors(arguments, plan.batch_last, static_cast<int64_t>(x.element_size()))) {
    if (plan.fallback == LATER) return std::nullopt;
    plan = plan_at(plan.fallback);
  }
  launch_rows(plan, arguments, device);
  return y;
}

// What a plan's kernel packs of a weight of any strides, of four dims.
Tensor launch_packing(const Plan& plan, const Tensor& weight) {
  const int32_t device = weight.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  const Tensor packed = empty_like_in(weight, {1, 1, 1, plan.out_features});
  Arguments arguments{};
  set_weight(arguments, weight);
  arguments.y = packed.mutable_data_ptr();
  arguments.batch = 1;
  launch_rows(plan, arguments, device);
  return packed;
}

}  // namespace
