// torch_ops.hpp: what ksopt/batched.py, ksopt/kernels/backends/cpu.py and ksopt/epilogue.py do in Python, for a
// call that was decided: the same operations on the same memory, so the results have the same bits.
#undef TORCH_TARGET_VERSION  // this file alone is for the torch that it is made with

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "torch_ops.hpp"

namespace {

using at::Tensor;
using Shape = std::vector<int64_t>;

// Of a handle, which is a pointer to a tensor; null: an undefined one.
Tensor tensor_of(AtenTensorHandle handle) {
  return handle == nullptr ? Tensor() : *reinterpret_cast<Tensor*>(handle);
}
AtenTensorHandle new_handle(Tensor tensor) {
  return reinterpret_cast<AtenTensorHandle>(new Tensor(std::move(tensor)));
}

struct Pattern {
  int64_t a, b, c, d;
  int64_t in_features() const { return a * c * d; }
  int64_t out_features() const { return a * b * d; }
};

Tensor result(const Tensor& x, const Tensor& out, const Shape& shape) {
  return out.defined() ? out.view(shape) : at::empty(shape, x.options());
}

// For y before b and d change places: the result itself, where that moves nothing.
Tensor before_copy(const Tensor& x, const Tensor& out, const Pattern& p, const Shape& shape) {
  return result(x, p.b == 1 || p.d == 1 ? out : Tensor(), shape);
}

// y with dims merged: in out, if there is one.
Tensor merged(const Tensor& y, const Tensor& out, const Shape& shape) {
  if (!out.defined()) return y.reshape(shape);
  if (y.data_ptr() != out.data_ptr()) out.view(y.sizes()).copy_(y);
  return out;
}

Tensor product(const Tensor& left, const Tensor& right, Tensor out) {
  return out.defined() ? at::mm_out(out, left, right) : at::mm(left, right);
}

// [a*size*d, B] seen as [a*d, size, B], where a = 1 or d = 1.
Tensor groups_of(const Tensor& rows, int64_t a, int64_t size, int64_t d) {
  const int64_t batch = rows.size(1);
  return d == 1 ? rows.view({a, size, batch}) : rows.view({size, d, batch}).transpose(0, 1);
}

Tensor bmm_prepare(const Tensor& weight, const Pattern& p) {
  if (p.d == 1) return weight.squeeze(3);
  return weight.permute({0, 3, 1, 2}).reshape({p.a * p.d, p.b, p.c}).contiguous();
}

Tensor bmm_batch_last(const Tensor& x, const Tensor& weight, const Pattern& p, const Tensor& out) {
  const auto [a, b, c, d] = p;
  const int64_t batch = x.size(1);
  if (a == 1 && d == 1) return product(weight[0], x, out);
  if (c == 1) {
    Tensor y = result(x, out, {a, b, d, batch});
    at::mul_out(y, x.view({a, 1, d, batch}), weight.view({a, d, b, 1}).transpose(1, 2));
    return y.view({a * b * d, batch});
  }
  if (a == 1 || d == 1) {
    const Tensor y = result(x, out, {a * b * d, batch});
    Tensor groups = groups_of(y, a, b, d);
    at::bmm_out(groups, weight, groups_of(x, a, c, d));
    return y;
  }
  const Tensor groups = x.view({a, c, d, batch}).transpose(1, 2).reshape({a * d, c, batch});
  const Tensor y = before_copy(x, out, p, {a, d, b, batch});
  Tensor planes = y.view({a * d, b, batch});
  at::bmm_out(planes, weight, groups);
  return merged(y.transpose(1, 2), out, {a * b * d, batch});
}

Tensor bmm(const Tensor& x, const Tensor& weight, const Pattern& p, bool batch_last, const Tensor& out) {
  if (batch_last) return bmm_batch_last(x, weight, p, out);
  const auto [a, b, c, d] = p;
  const int64_t batch = x.size(0);
  if (a == 1 && d == 1) return product(x, weight[0].t(), out);
  if (c == 1) {
    Tensor y = result(x, out, {batch, a, b, d});
    at::mul_out(y, x.view({batch, a, 1, d}), weight.view({a, d, b}).transpose(1, 2));
    return y.view({batch, a * b * d});
  }
  if (batch == 1) {
    const Tensor column = out.defined() ? out.view({-1, 1}) : Tensor();
    return bmm_batch_last(x.view({-1, 1}), weight, p, column).view({1, -1});
  }
  if (d == 1) {
    const Tensor y = result(x, out, {batch, a * b});
    Tensor planes = y.view({batch, a, b}).transpose(0, 1);
    at::bmm_out(planes, x.view({batch, a, c}).transpose(0, 1), weight.mT());
    return y;
  }
  if (a > 1) {
    const Tensor groups = x.view({batch, a, c, d}).permute({1, 3, 0, 2}).reshape({a * d, batch, c});
    const Tensor y = at::bmm(groups, weight.mT()).view({a, d, batch, b});
    return merged(y.permute({2, 0, 3, 1}), out, {batch, a * b * d}).contiguous();
  }
  const Tensor groups = x.view({batch, a, c, d}).transpose(2, 3).reshape({batch, a * d, c}).transpose(0, 1);
  const Tensor y = before_copy(x, out, p, {batch, a, d, b});
  Tensor planes = y.view({batch, a * d, b}).transpose(0, 1);
  at::bmm_out(planes, groups, weight.mT());
  return merged(y.transpose(2, 3), out, {batch, a * b * d});
}

Tensor bmm_paper(const Tensor& x, const Tensor& weight, const Pattern& p, bool batch_last, const Tensor& out) {
  const auto [a, b, c, d] = p;
  if (batch_last) {
    const int64_t batch = x.size(1);
    const Tensor x_perm =
        x.view({a, c, d, batch}).transpose(1, 2).reshape({a * d, c, batch}).contiguous();
    Tensor y_perm = before_copy(x, out, p, {a * d, b, batch});
    at::bmm_out(y_perm, weight, x_perm);
    const Tensor y = y_perm.reshape({a, d, b, batch}).transpose(1, 2);
    return merged(y, out, {a * b * d, batch});
  }
  const int64_t batch = x.size(0);
  const Tensor x_perm = x.view({batch, a, c, d}).transpose(-1, -2).reshape({batch, a * d, c}).contiguous();
  Tensor y_perm = before_copy(x, out, p, {batch, a * d, b}).transpose(0, 1);
  at::bmm_out(y_perm, x_perm.transpose(0, 1), weight.transpose(-1, -2));
  const Tensor y = y_perm.transpose(0, 1).reshape({batch, a, d, b}).transpose(-1, -2);
  return merged(y, out, {batch, a * b * d});
}

Tensor bmm_loop(const Tensor& x, const Tensor& weight, const Pattern& p, const Tensor& out) {
  const auto [a, b, c, d] = p;
  const int64_t batch = x.size(1);
  const Tensor y = result(x, out, {a * b * d, batch});
  const int64_t axis = a <= d ? 0 : 1;
  const auto matrices = weight.view({a, d, b, c}).unbind(axis);
  const auto inputs = x.view({a, c, d, batch}).transpose(1, 2).unbind(axis);
  const auto outputs = y.view({a, b, d, batch}).transpose(1, 2).unbind(axis);
  for (size_t at = 0; at < matrices.size(); ++at) {
    Tensor place = outputs[at];
    at::bmm_out(place, matrices[at], inputs[at]);
  }
  return y;
}

Tensor einsum(const Tensor& x, const Tensor& weight, const Pattern& p, bool batch_last, const Tensor& out) {
  const auto [a, b, c, d] = p;
  if (out.defined() && (c == 1 || d == 1)) return bmm(x, bmm_prepare(weight, p), p, batch_last, out);
  if (batch_last) {
    const Tensor y = at::einsum("icjn,ibcj->ibjn", {x.view({a, c, d, -1}), weight});
    return merged(y, out, {a * b * d, x.size(1)}).contiguous();
  }
  const Tensor y = at::einsum("nicj,ibcj->nibj", {x.view({-1, a, c, d}), weight});
  return merged(y, out, {x.size(0), a * b * d}).contiguous();
}

Tensor dense(const Tensor& x, const Tensor& matrix, bool batch_last, Tensor out) {
  if (!out.defined()) return batch_last ? at::matmul(matrix, x) : at::linear(x, matrix);
  return batch_last ? at::mm_out(out, matrix, x) : at::mm_out(out, x, matrix.t());
}

Tensor dense_prepare(const Tensor& weight, const Pattern& p) {
  const auto [a, b, c, d] = p;
  const Tensor matrix = at::zeros({a, b, d, a, c, d}, weight.options());
  matrix.diagonal(0, 0, 3).diagonal(0, 1, 3).copy_(weight.permute({1, 2, 0, 3}));
  return matrix.view({a * b * d, a * c * d});
}

Tensor expand(const Tensor& x, const Tensor& weight, const Pattern& p, bool batch_last, const Tensor& out) {
  const auto [a, b, c, d] = p;
  Tensor blocks;
  if (d == 1) {
    blocks = weight.reshape({a, b, c});
  } else {
    const Tensor zeros = at::zeros({a, b, d, c, d}, weight.options());
    zeros.diagonal(0, 2, 4).copy_(weight);
    blocks = zeros.view({a, b * d, c * d});
  }
  if (a == 1) return dense(x, blocks[0], batch_last, out);
  return bmm(x, blocks, {a, b * d, c * d, 1}, batch_last, out);
}

bool is_finite(const Tensor& y) {
  const auto wide = y.element_size() < 4 ? at::kFloat : y.scalar_type();
  return std::isfinite(y.sum(wide).item<double>());
}

Tensor multiply(ksopt::TorchWay way, const Tensor& x, const Tensor& weight, const Pattern& p, bool batch_last,
                const Tensor& out) {
  using ksopt::TorchWay;
  switch (way) {
    case TorchWay::bmm: return bmm(x, bmm_prepare(weight, p), p, batch_last, out);
    case TorchWay::bmm_paper: return bmm_paper(x, bmm_prepare(weight, p), p, batch_last, out);
    case TorchWay::bmm_loop: return bmm_loop(x, bmm_prepare(weight, p), p, out);
    case TorchWay::einsum: return einsum(x, weight, p, batch_last, out);
    case TorchWay::expand:
    case TorchWay::dense: {
      // Stored zeros times infinity are NaN: then the product is computed again without them.
      const Tensor y = way == TorchWay::expand ? expand(x, weight, p, batch_last, out)
                                               : dense(x, dense_prepare(weight, p), batch_last, out);
      return is_finite(y) ? y : bmm(x, bmm_prepare(weight, p), p, batch_last, out);
    }
  }
  TORCH_CHECK(false, "ksopt: no such way to multiply");
}

}  // namespace

namespace ksopt {

AtenTensorHandle multiply_by_torch(TorchWay way, AtenTensorHandle x_handle, AtenTensorHandle weight_handle,
                                   bool batch_last, AtenTensorHandle out_handle) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor x = tensor_of(x_handle), weight = tensor_of(weight_handle), out = tensor_of(out_handle);
  const Pattern p{weight.size(0), weight.size(1), weight.size(2), weight.size(3)};
  Shape shape = x.sizes().vec();
  shape[batch_last ? 0 : shape.size() - 1] = p.out_features();
  if (x.dim() == 2) return new_handle(multiply(way, x, weight, p, batch_last, out));
  const Tensor rows = batch_last ? x.reshape({x.size(0), -1}) : x.reshape({-1, x.size(-1)});
  Tensor y_rows;
  if (out.defined()) y_rows = batch_last ? out.view({p.out_features(), -1}) : out.view({-1, p.out_features()});
  return new_handle(multiply(way, rows, weight, p, batch_last, y_rows).view(shape));
}

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
