// Tensors of ATen and their handles, for the files that are made with ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "torch_ops.hpp"

namespace ksopt {

// Of a handle, which is a pointer to a tensor; null: an undefined one.
inline at::Tensor tensor_of(AtenTensorHandle handle) {
  return handle == nullptr ? at::Tensor() : *reinterpret_cast<at::Tensor*>(handle);
}

inline AtenTensorHandle new_handle(at::Tensor tensor) {
  return reinterpret_cast<AtenTensorHandle>(new at::Tensor(std::move(tensor)));
}

}  // namespace ksopt
