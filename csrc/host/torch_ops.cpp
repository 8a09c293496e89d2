// torch_ops.hpp: what follows a product, as ksopt/epilogue.py.
#undef TORCH_TARGET_VERSION  // for the torch that it is made with, as all files that use ATen

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include "aten_handles.hpp"
#include "torch_ops.hpp"

namespace {

using at::Tensor;
using Shape = std::vector<int64_t>;

}  // namespace

namespace ksopt {

void add_epilogue(AtenTensorHandle y_handle, AtenTensorHandle bias_handle, Activation activation,
                  AtenTensorHandle residual, bool batch_last) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensor y = tensor_of(y_handle);
  if (bias_handle != nullptr) {
    Tensor bias = tensor_of(bias_handle);
    if (batch_last) {
      Shape shape(static_cast<size_t>(y.dim()), 1);
      shape[0] = -1;
      bias = bias.view(shape);
    }
    y.add_(bias);
  }
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: at::relu_(y); break;
    case Activation::gelu: at::gelu_(y, "none"); break;
    case Activation::gelu_tanh: at::gelu_(y, "tanh"); break;
    case Activation::silu: at::silu_(y); break;
  }
  if (residual != nullptr) y.add_(tensor_of(residual));
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
