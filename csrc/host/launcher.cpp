// Launches compiled kernels on the current stream: the C++ half of ksopt/kernels.
//
// Built on PyTorch's stable ABI, so that one binary serves several torch versions, and without any
// CUDA header: the two driver functions it needs are looked up when the first kernel is launched,
// which lets the same file build and load on a machine that has no GPU.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using torch::stable::Tensor;

// The same struct as in csrc/cuda/problem.cuh.
struct Arguments {
  const void* x;
  const void* weight;
  void* y;
  int64_t batch;
  int64_t x_batch_stride, x_feature_stride;
  int64_t y_batch_stride, y_feature_stride;
  int64_t weight_stride_a, weight_stride_b, weight_stride_c, weight_stride_d;
};

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
  int64_t fallback = -1;       // plan for operands that are not fit for 16-byte access; -1: none needed
};

std::vector<Plan> plans;
std::shared_mutex plans_mutex;

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

void launch_on_current_stream(const Plan& plan, Arguments arguments, int32_t device, unsigned blocks) {
  static const auto current_stream = reinterpret_cast<CurrentStream>(
      required("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"));
  static const auto launch_kernel =
      reinterpret_cast<LaunchKernel>(required("libcuda.so.1", "cuLaunchKernelEx"));
  static const auto error_string =
      reinterpret_cast<GetErrorString>(required("libcuda.so.1", "cuGetErrorString"));
  void* stream = nullptr;
  if (current_stream(device, &stream) != 0) {
    throw std::runtime_error("ksopt: the current CUDA stream is not available");
  }
  void* parameters[] = {&arguments};
  LaunchAttribute early{};
  early.id = PROGRAMMATIC_STREAM_SERIALIZATION;
  early.programmatic_stream_serialization = 1;
  const LaunchConfig config{{blocks, 1, 1}, {plan.threads, 1, 1}, plan.shared_bytes, stream,
                            &early,         plan.early ? 1u : 0u};
  const int status = launch_kernel(&config, plan.kernel, parameters, nullptr);
  if (status != 0) {
    const char* words = "unknown error";
    error_string(status, &words);
    throw std::runtime_error(std::string("ksopt: the kernel could not be launched: ") + words);
  }
}

// Whether the dimensions [first, last) can be walked with one stride.
bool one_stride(const Tensor& x, int64_t first, int64_t last) {
  for (int64_t i = first; i + 1 < last; ++i) {
    if (x.size(i) != 1 && x.stride(i) != x.stride(i + 1) * x.size(i + 1)) return false;
  }
  return true;
}

Plan plan_at(int64_t index) {
  const std::shared_lock lock(plans_mutex);
  return plans.at(static_cast<size_t>(index));
}

bool aligned_16(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// Whether x and y can be accessed in whole 16-byte vectors along their fastest dimension, and a
// contiguous weight read so.
bool fit_for_vectors(const Arguments& arguments, bool batch_last, int64_t element) {
  const int64_t fast = batch_last ? arguments.x_batch_stride : arguments.x_feature_stride;
  const int64_t slow = batch_last ? arguments.x_feature_stride : arguments.x_batch_stride;
  const int64_t slow_y = batch_last ? arguments.y_feature_stride : arguments.y_batch_stride;
  return fast == 1 && slow * element % 16 == 0 && slow_y * element % 16 == 0 &&
         aligned_16(arguments.x) && aligned_16(arguments.weight) && aligned_16(arguments.y);
}

// x: (*batch, N) or, batch last, (N, *batch); weight: (a, b, c, d). Returns y in the same layout.
Tensor launch(const Tensor& x_given, const Tensor& weight_given, int64_t plan_index) {
  Plan plan = plan_at(plan_index);
  // A transposed weight (every backward pass has one) is small beside x: laying it out anew keeps
  // the fast kernel.
  const bool lay_out = plan.fallback >= 0 && !weight_given.is_contiguous();
  const Tensor weight = lay_out ? torch::stable::contiguous(weight_given) : weight_given;
  const int64_t dims = x_given.dim();
  const int64_t first = plan.batch_last ? 1 : 0, last = plan.batch_last ? dims : dims - 1;
  const Tensor x = one_stride(x_given, first, last) ? x_given : torch::stable::contiguous(x_given);

  std::vector<int64_t> sizes(static_cast<size_t>(dims));
  int64_t batch = 1;
  for (int64_t i = 0; i < dims; ++i) sizes[static_cast<size_t>(i)] = x.size(i);
  for (int64_t i = first; i < last; ++i) batch *= sizes[static_cast<size_t>(i)];
  sizes[static_cast<size_t>(plan.batch_last ? 0 : dims - 1)] = plan.out_features;
  const torch::headeronly::IntHeaderOnlyArrayRef shape(sizes.data(), sizes.size());

  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor y = torch::stable::new_empty(x, shape);
  if (batch == 0) return y;

  Arguments arguments{};
  arguments.x = x.const_data_ptr();
  arguments.weight = weight.const_data_ptr();
  arguments.y = y.mutable_data_ptr();
  arguments.batch = batch;
  arguments.x_batch_stride = last > first ? x.stride(last - 1) : 0;
  arguments.x_feature_stride = x.stride(plan.batch_last ? 0 : dims - 1);
  arguments.y_batch_stride = plan.batch_last ? 1 : plan.out_features;
  arguments.y_feature_stride = plan.batch_last ? batch : 1;
  arguments.weight_stride_a = weight.stride(0);
  arguments.weight_stride_b = weight.stride(1);
  arguments.weight_stride_c = weight.stride(2);
  arguments.weight_stride_d = weight.stride(3);

  if (plan.fallback >= 0 &&
      !fit_for_vectors(arguments, plan.batch_last, static_cast<int64_t>(x.element_size()))) {
    plan = plan_at(plan.fallback);
  }
  const int64_t tiles =
      (batch + plan.rows_per_tile - 1) / plan.rows_per_tile * plan.tiles_per_row_tile;
  launch_on_current_stream(plan, arguments, device,
                           static_cast<unsigned>(tiles < plan.max_blocks ? tiles : plan.max_blocks));
  return y;
}

// Registers a kernel (a CUkernel handle of the driver) and returns its index for `launch`.
int64_t add_plan(int64_t kernel, int64_t out_features, bool batch_last, int64_t threads,
                 int64_t shared_bytes, int64_t rows_per_tile, int64_t tiles_per_row_tile,
                 int64_t max_blocks, bool early, int64_t fallback) {
  const std::unique_lock lock(plans_mutex);
  plans.push_back({reinterpret_cast<void*>(kernel), out_features, batch_last,
                   static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes),
                   rows_per_tile, tiles_per_row_tile, max_blocks, early, fallback});
  return static_cast<int64_t>(plans.size()) - 1;
}

}  // namespace

STABLE_TORCH_LIBRARY(ksopt_host, m) {
  m.def("launch(Tensor x, Tensor weight, int plan) -> Tensor");
  m.def(
      "add_plan(int kernel, int out_features, bool batch_last, int threads, int shared_bytes, "
      "int rows_per_tile, int tiles_per_row_tile, int max_blocks, bool early, int fallback) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CUDA, m) { m.impl("launch", TORCH_BOX(&launch)); }

STABLE_TORCH_LIBRARY_IMPL(ksopt_host, CompositeExplicitAutograd, m) {
  m.impl("add_plan", TORCH_BOX(&add_plan));
}
