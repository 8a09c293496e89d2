// torch_ops.hpp: the epilogue of a product, as ksopt/epilogue.py.
#undef TORCH_TARGET_VERSION  // for the torch that it is compiled with, as all files that use ATen

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include "aten_handles.hpp"
#include "torch_ops.hpp"

namespace {

using at::Tensor;
using Shape = std::vector<int64_t>;
using ksopt::Activation;

void activate(Tensor& y, Activation activation) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: at::relu_(y); break;
    case Activation::gelu: at::gelu_(y, "none"); break;
    case Activation::gelu_tanh: at::gelu_(y, "tanh"); break;
    case Activation::silu: at::silu_(y); break;
  }
}

void add_bias(Tensor& y, Tensor bias, bool batch_last) {
  if (batch_last) {
    Shape shape(static_cast<size_t>(y.dim()), 1);
    shape[0] = -1;
    bias = bias.view(shape);
  }
  y.add_(bias);
}

}  // namespace

namespace ksopt {

void add_epilogue(AtenTensorHandle y_handle, AtenTensorHandle bias, Activation activation, AtenTensorHandle residual,
                  bool batch_last) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensor y = tensor_of(y_handle);
  if (bias != nullptr) add_bias(y, tensor_of(bias), batch_last);
  activate(y, activation);
  if (residual != nullptr) y.add_(tensor_of(residual));
}

AtenTensorHandle in_float32(AtenTensorHandle y_handle) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor y = tensor_of(y_handle);
  return new_handle(y.element_size() == 2 ? y.to(at::kFloat) : y);
}

AtenTensorHandle gate(AtenTensorHandle first_handle, AtenTensorHandle second_handle, AtenTensorHandle bias_handle,
                      Activation activation, bool batch_last, AtenTensorHandle out_handle) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensor first = tensor_of(first_handle), second = tensor_of(second_handle);
  if (bias_handle != nullptr) {
    const Tensor bias = tensor_of(bias_handle);
    const int64_t features = bias.size(0) / 2;
    add_bias(first, bias.narrow(0, 0, features), batch_last);
    add_bias(second, bias.narrow(0, features, features), batch_last);
  }
  activate(first, activation);
  if (out_handle == nullptr) return new_handle(at::mul(first, second));
  Tensor out = tensor_of(out_handle);
  return new_handle(at::mul_out(out, first, second));
}

std::pair<AtenTensorHandle, AtenTensorHandle> halves(AtenTensorHandle y_handle, bool batch_last) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor y = tensor_of(y_handle);
  const int64_t dim = batch_last ? 0 : y.dim() - 1, features = y.size(dim) / 2;
  return {new_handle(y.narrow(dim, 0, features)), new_handle(y.narrow(dim, features, features))};
}

AtenTensorHandle side_by_side(const std::vector<AtenTensorHandle>& parts, bool batch_last,
                              AtenTensorHandle out_handle) {
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Tensor> tensors;
  for (AtenTensorHandle part : parts) tensors.push_back(tensor_of(part));
  const int64_t dim = batch_last ? 0 : -1;
  if (out_handle == nullptr) return new_handle(at::cat(tensors, dim));
  Tensor out = tensor_of(out_handle);
  return new_handle(at::cat_out(out, tensors, dim));
}

}  // namespace ksopt
