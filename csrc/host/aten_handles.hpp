// Tensors of ATen, their handles and their precision, for the files compiled with ATen.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "torch_ops.hpp"

namespace ksopt {

// Of a handle, which is a pointer to a tensor; null: an undefined one.
inline at::Tensor tensor_of(AtenTensorHandle handle) {
  return handle == nullptr ? at::Tensor() : *reinterpret_cast<at::Tensor*>(handle);
}

inline AtenTensorHandle new_handle(at::Tensor tensor) {
  return reinterpret_cast<AtenTensorHandle>(new at::Tensor(std::move(tensor)));
}

// The tensors of handles that belong to the caller, which are freed.
inline std::vector<at::Tensor> taken(const std::vector<AtenTensorHandle>& handles) {
  std::vector<at::Tensor> tensors;
  for (AtenTensorHandle one : handles) {
    const std::unique_ptr<at::Tensor> owned(reinterpret_cast<at::Tensor*>(one));
    tensors.push_back(*owned);
  }
  return tensors;
}

// Whether products of such operands have the accuracy of their dtype: as ksopt.precision.is_exact.
inline bool is_exact(const at::Tensor& x) {
  return x.scalar_type() != at::kFloat ||
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) !=
             at::Float32Precision::TF32;
}

}  // namespace ksopt
