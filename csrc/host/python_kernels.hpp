// Code shared by the library's kernels, which override Python's. Python's serve the calls that are in no table.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "aten_handles.hpp"
#include "cached_weights.hpp"
#include "dispatch.hpp"

namespace ksopt {

inline AtenTensorHandle handle_of(const at::Tensor* tensor) {
  return reinterpret_cast<AtenTensorHandle>(const_cast<at::Tensor*>(tensor));
}

inline std::vector<AtenTensorHandle> handles_of(const std::vector<at::Tensor>& tensors) {
  std::vector<AtenTensorHandle> handles;
  for (const at::Tensor& one : tensors) handles.push_back(handle_of(&one));
  return handles;
}

// Whether kernels may read tensors as they are, and no cached form of a weight, of which all are read, is dropped.
inline bool are_ordinary(const std::vector<at::Tensor>& rows, const std::vector<at::Tensor>& weights) {
  const auto is_neg = [](const at::Tensor& one) { return one.is_neg(); };
  const auto is_cached = [](const at::Tensor& one) { return may_be_cached(root_of(one)); };
  return std::none_of(rows.begin(), rows.end(), is_neg) && std::none_of(weights.begin(), weights.end(), is_neg) &&
         std::none_of(weights.begin(), weights.end(), is_cached);
}

inline std::vector<PreparedWeight> handles_of(const std::vector<CachedWeight>& cached) {
  std::vector<PreparedWeight> handles;
  for (const CachedWeight& one : cached) handles.push_back({handle_of(&one.prepared), one.of, one.form, one.stream});
  return handles;
}

// Python's kernel of an operator for a device.
inline c10::SafeKernelFunction python_kernel(const char* name, const char* overload, c10::DispatchKey key) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).getComputedKernelForDispatchKey(key);
}

// Drops torch's warnings.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// ks_chain_inner and ks_chain.out: takes note of Python's kernels, and registers those above them.
void find_python_layers();
void register_layers(torch::Library& library);
// The same for ks_mlp_inner and ks_mlp.out.
void find_python_mlps();
void register_mlps(torch::Library& library);

}  // namespace ksopt
