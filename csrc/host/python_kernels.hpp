// Code shared by the library's kernels, which override Python's. Python's serve the calls that are in no table.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>

#include <vector>

#include "aten_handles.hpp"
#include "cached_weights.hpp"
#include "dispatch.hpp"

namespace ksopt {

inline AtenTensorHandle handle_of(const at::Tensor* tensor) {
  return reinterpret_cast<AtenTensorHandle>(const_cast<at::Tensor*>(tensor));
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
