// torch_ops.hpp: products by torch's operations, on a CPU and on CUDA.
//
// Without this library ksopt/batched.py multiplies. Only that module defines the prepared form of a weight.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_convolution.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "aten_handles.hpp"
#include "torch_ops.hpp"

namespace {

using at::Tensor;
using ksopt::TorchProduct;
using ksopt::TorchWay;
using Sizes = std::vector<int64_t>;

// Whether the matrices hold zeros beside the weight's elements.
bool holds_zeros(const TorchProduct& p, const Tensor& weight) { return p.groups() * p.b * p.c > weight.numel(); }

// Nothing to sum: one multiplication for each output.
bool is_elementwise(const TorchProduct& p, const Tensor& weight) {
  return p.c == 1 && p.groups() > 1 && !holds_zeros(p, weight);
}

// A weight's matrices [a*d, b, c] in its own memory; undefined if no product can read them there: their columns or
// their rows have to lie side by side.
Tensor matrices_in(const TorchProduct& p, const Tensor& weight) {
  if (holds_zeros(p, weight)) return {};
  const int64_t along_b = weight.stride(1), along_c = weight.stride(2);
  const bool columns = along_b == 1 && along_c >= p.b, rows = along_c == 1 && along_b >= p.c;
  if (!columns && !rows && p.d > 1) return {};  // for d = 1 torch copies it, as ever
  const int64_t group = p.d == 1 ? weight.stride(0) : weight.stride(3);
  if (p.d > 1 && p.a > 1 && weight.stride(0) != p.d * group) return {};
  return weight.as_strided({p.groups(), p.b, p.c}, {group, along_b, along_c});
}

// The weight's matrices, prepared. Those of a transposed weight have their columns side by side, as the weight has, so
// that neighbours stay neighbours in the copy.
Tensor prepare(const TorchProduct& p, const Tensor& weight) {
  const Sizes sizes = {p.groups(), p.b, p.c};
  if (!holds_zeros(p, weight) && weight.stride(1) < weight.stride(2)) {
    const Tensor copy = at::empty({p.groups(), p.c, p.b}, weight.options());
    copy.as_strided(weight.sizes(), {p.d * p.b * p.c, 1, p.b, p.b * p.c}).copy_(weight);
    return copy.transpose(1, 2);
  }
  Tensor copy = holds_zeros(p, weight) ? at::zeros(sizes, weight.options()) : at::empty(sizes, weight.options());
  copy.as_strided(weight.sizes(), p.strides).copy_(weight);
  return copy;
}

Tensor matrices_of_prepared(const TorchProduct& p, const Tensor& prepared) {
  return prepared.as_strided({p.groups(), p.b, p.c}, {p.b * p.c, p.c, 1});
}

// out = left @ right for each group. One group is an ordinary product.
void multiply_groups(const Tensor& left, const Tensor& right, Tensor out) {
  if (out.size(0) > 1) {
    at::bmm_out(out, left, right);
  } else {
    Tensor only = out[0];
    at::mm_out(only, left[0], right[0]);
  }
}

// A product on rows of x, contiguous: batch last, or one row, which is one column.
struct Rows {
  const TorchProduct& p;
  int64_t batch;
  bool last;

  // Whether x, and y, can be seen as matrices in their own memory.
  bool is_seen(int64_t length) const {
    if (p.d == 1) return true;
    return last ? length == 1 || p.a == 1 : length == 1 && !p.by_groups;
  }

  // x or y, contiguous, as matrices in its own memory: [groups, batch, length] or, batch last,
  // [groups, length, batch].
  Tensor seen(const Tensor& rows, int64_t length) const {
    const int64_t n = p.groups();
    if (!last) return rows.as_strided({n, batch, length}, {length, n * length, 1});
    const bool interleaved = p.a == 1 && p.d > 1 && length > 1;
    return rows.as_strided({n, length, batch},
                           {interleaved ? batch : length * batch, interleaved ? p.d * batch : batch, 1});
  }

  // Memory for the matrices where they are laid out.
  Tensor planes(const Tensor& like, int64_t length) const {
    const int64_t width = p.groups() * length;
    return at::empty(last ? Sizes{width, batch} : Sizes{batch, width}, like.options());
  }

  // The matrices that are laid out there.
  Tensor laid_out(const Tensor& planes, int64_t length) const {
    const int64_t n = p.groups();
    if (last) return planes.as_strided({n, length, batch}, {length * batch, batch, 1});
    return planes.as_strided({n, batch, length}, p.by_groups ? Sizes{batch * length, length, 1}
                                                             : Sizes{length, n * length, 1});
  }

  // Lets the dims of `length` and d change places: rows to planes, or planes back to rows. Whether it can.
  bool change_places(Tensor rows, Tensor planes, int64_t length, bool to_planes, const Tensor& weight) const {
    const int64_t plan = to_planes ? p.before : p.after;
    Tensor &from = to_planes ? rows : planes, &to = to_planes ? planes : rows;
    if (plan != ksopt::NO_PLAN && last == p.batch_last) {
      Tensor taken = weight;
      return ksopt::launch_into(plan, reinterpret_cast<AtenTensorHandle>(&from),
                                reinterpret_cast<AtenTensorHandle>(&taken), reinterpret_cast<AtenTensorHandle>(&to));
    }
    const int64_t a = p.a, d = p.d, n = length, width = a * d * n;
    const Sizes sizes = last ? Sizes{a, d, n, batch} : Sizes{batch, a, d, n};
    Sizes in_planes = last ? Sizes{d * n * batch, n * batch, batch, 1} : Sizes{width, d * n, n, 1};
    if (!last && p.by_groups) in_planes = {n, d * batch * n, batch * n, 1};
    const Sizes in_rows = last ? Sizes{d * n * batch, batch, d * batch, 1} : Sizes{width, d * n, 1, d};
    to.as_strided(sizes, to_planes ? in_planes : in_rows).copy_(from.as_strided(sizes, to_planes ? in_rows : in_planes));
    return true;
  }

  // Writes y; returns whether that is possible.
  bool multiply(const Tensor& x, const Tensor& matrices, const Tensor& weight, const Tensor& y) const {
    Tensor x_planes, y_planes;
    if (!is_seen(p.c)) {
      x_planes = planes(x, p.c);
      if (!change_places(x, x_planes, p.c, true, weight)) return false;
    }
    if (!is_seen(p.b)) y_planes = planes(x, p.b);
    const Tensor operand = x_planes.defined() ? laid_out(x_planes, p.c) : seen(x, p.c);
    const Tensor result = y_planes.defined() ? laid_out(y_planes, p.b) : seen(y, p.b);
    if (last) {
      multiply_groups(matrices, operand, result);
    } else {
      multiply_groups(operand, matrices.transpose(1, 2), result);
    }
    return !y_planes.defined() || change_places(y, y_planes, p.b, false, weight);
  }

  // x: [B, a, 1, d] or, batch last, [a, 1, d, B].
  void multiply_elements(const Tensor& x, const Tensor& weight, const Tensor& y) const {
    const Tensor factors = weight.squeeze(2);
    Tensor out = y.view(last ? Sizes{p.a, p.b, p.d, batch} : Sizes{batch, p.a, p.b, p.d});
    if (last) {
      at::mul_out(out, x.view({p.a, 1, p.d, batch}), factors.unsqueeze(3));
    } else {
      at::mul_out(out, x.view({batch, p.a, 1, p.d}), factors);
    }
  }

  // Batch last, with one call for each i, or each j, nothing has to be laid out.
  void multiply_in_turns(const Tensor& x, const Tensor& matrices, const Tensor& y) const {
    const int64_t a = p.a, d = p.d;
    const bool of_i = a <= d;
    const auto part = [&](const Tensor& rows, int64_t length, int64_t at) {
      const int64_t block = length * d * batch;
      return rows.as_strided({of_i ? d : a, length, batch}, {of_i ? batch : block, d * batch, 1},
                             rows.storage_offset() + at * (of_i ? block : batch));
    };
    const Tensor all = matrices.view({a, d, p.b, p.c});
    for (int64_t at = 0; at < (of_i ? a : d); ++at) {
      multiply_groups(all.select(of_i ? 0 : 1, at), part(x, p.c, at), part(y, p.b, at));
    }
  }
};

// Batch first: the rows of x become columns, [groups, c, batch], and those of y come back.
void multiply_weight_first(const TorchProduct& p, const Tensor& x, const Tensor& matrices, const Tensor& y) {
  const Tensor rows = x.view({-1, p.a, p.c, p.d});
  const Tensor columns = rows.permute({1, 3, 2, 0}).reshape({p.groups(), p.c, -1});
  const Tensor results = at::bmm(matrices, columns).view({p.a, p.d, p.b, -1});
  y.view({-1, p.a, p.b, p.d}).copy_(results.permute({3, 0, 2, 1}));
}

Tensor by_einsum(const TorchProduct& p, const Tensor& x, const Tensor& weight) {
  if (p.batch_last) return at::einsum("icjn,ibcj->ibjn", {x.view({p.a, p.c, p.d, -1}), weight});
  return at::einsum("nicj,ibcj->nibj", {x.view({-1, p.a, p.c, p.d}), weight});
}

Tensor by_einsum_weight_first(const TorchProduct& p, const Tensor& x, const Tensor& weight) {
  if (p.batch_last) return at::einsum("ibcj,icjn->ibjn", {weight, x.view({p.a, p.c, p.d, -1})});
  return at::einsum("ibcj,nicj->nibj", {weight, x.view({-1, p.a, p.c, p.d})});
}

// One place an image: TF32 is a switch of its own for convolutions, and here the products'.
Tensor by_conv(const TorchProduct& p, const Tensor& x, const Tensor& weight) {
  const auto& context = at::globalContext();
  const Tensor images = p.batch_last ? x.view({1, p.a * p.c, -1}) : x.view({-1, p.a * p.c, 1});
  return at::_convolution(images, weight.reshape({p.a * p.b, p.c, 1}), {}, {1}, {0}, {1}, false, {0}, p.a,
                          context.benchmarkCuDNN(), context.deterministicCuDNN(), true, !ksopt::is_exact(x));
}

// By the weight as it is; undefined for the other ways.
Tensor by_torch(const TorchProduct& p, const Tensor& x, const Tensor& weight) {
  switch (p.way) {
    case TorchWay::einsum: return by_einsum(p, x, weight);
    case TorchWay::einsum_weight_first: return by_einsum_weight_first(p, x, weight);
    case TorchWay::conv: return by_conv(p, x, weight);
    default: return {};
  }
}

bool takes_any_weight(TorchWay way) {
  return way == TorchWay::einsum || way == TorchWay::einsum_weight_first || way == TorchWay::conv;
}

// Whether it multiplies by the weight's matrices also where there is nothing to sum.
bool takes_matrices(TorchWay way) { return way == TorchWay::loop || way == TorchWay::bmm_weight_first; }

// Whether y is correct though the matrices hold zeros: a kernel repairs it, or, without one, all of it is finite.
bool is_right(const TorchProduct& p, const Tensor& x, const Tensor& weight, const Tensor& y) {
  if (p.repair != ksopt::NO_PLAN) {
    Tensor from = x, taken = weight, to = y;
    return ksopt::launch_into(p.repair, reinterpret_cast<AtenTensorHandle>(&from),
                              reinterpret_cast<AtenTensorHandle>(&taken), reinterpret_cast<AtenTensorHandle>(&to));
  }
  const auto wide = y.element_size() < 4 ? at::kFloat : y.scalar_type();
  return std::isfinite(y.sum(wide).item<double>());
}

}  // namespace

namespace ksopt {

bool takes_as_it_is(const TorchProduct& p, AtenTensorHandle handle) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor weight = tensor_of(handle);
  const bool in_matrices = takes_matrices(p.way) || !is_elementwise(p, weight);
  return takes_any_weight(p.way) || !in_matrices || matrices_in(p, weight).defined();
}

AtenTensorHandle multiply_by_torch(const TorchProduct& p, AtenTensorHandle x_handle, AtenTensorHandle weight_handle,
                                   AtenTensorHandle prepared, AtenTensorHandle out_handle) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor x = tensor_of(x_handle), weight = tensor_of(weight_handle), out = tensor_of(out_handle);
  const int64_t batch = x.numel() / (p.groups() * p.c);
  Sizes shape = x.sizes().vec();
  shape[p.batch_last ? 0 : shape.size() - 1] = p.groups() * p.b;
  // Where torch computes one product, its y is in order and written straight.
  const bool is_written = p.way == TorchWay::einsum && out.defined() && (p.c == 1 || p.d == 1);
  if (takes_any_weight(p.way) && !is_written) {
    const Tensor y = by_torch(p, x, weight);
    if (!out.defined()) return new_handle(y.contiguous().view(shape));
    out.view(y.sizes()).copy_(y);
    return new_handle(out);
  }
  const Tensor y = out.defined() ? out : at::empty(shape, x.options());
  const Rows rows{p, batch, p.batch_last || batch == 1};
  if (!takes_matrices(p.way) && is_elementwise(p, weight)) {
    rows.multiply_elements(x, weight, y);
    return new_handle(y);
  }
  Tensor matrices = matrices_in(p, weight);
  if (!matrices.defined()) {
    matrices = prepared == nullptr ? prepare(p, weight) : matrices_of_prepared(p, tensor_of(prepared));
  }
  if (p.way == TorchWay::loop) {
    rows.multiply_in_turns(x, matrices, y);
  } else if (p.way == TorchWay::bmm_weight_first) {
    multiply_weight_first(p, x, matrices, y);
  } else if (!rows.multiply(x, matrices, weight, y)) {
    return nullptr;
  }
  if (holds_zeros(p, weight) && !is_right(p, x, weight, y)) return nullptr;
  return new_handle(y);
}

AtenTensorHandle by_groups(AtenTensorHandle weight) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return new_handle(tensor_of(weight).permute({0, 3, 1, 2}).contiguous());
}

// As `times_matrix` of ksopt/kernels/merged.py.
AtenTensorHandle multiply_by_matrix(AtenTensorHandle x_handle, AtenTensorHandle matrix_handle,
                                    AtenTensorHandle bias_handle, bool batch_last, AtenTensorHandle out_handle) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor x = tensor_of(x_handle), matrix = tensor_of(matrix_handle), out = tensor_of(out_handle);
  const int64_t outputs = matrix.size(0), inputs = matrix.size(1);
  Sizes shape = x.sizes().vec();
  shape[batch_last ? 0 : shape.size() - 1] = outputs;
  const Tensor y = out.defined() ? out : at::empty(shape, x.options());
  if (batch_last) {
    Tensor result = y.view({outputs, -1});
    at::mm_out(result, matrix, x.view({inputs, -1}));
    if (bias_handle != nullptr) result.add_(tensor_of(bias_handle).unsqueeze(1));
    return new_handle(y);
  }
  Tensor result = y.view({-1, outputs});
  const Tensor rows = x.view({-1, inputs});
  if (bias_handle == nullptr) {
    at::mm_out(result, rows, matrix.t());
  } else {
    at::addmm_out(result, tensor_of(bias_handle), rows, matrix.t());
  }
  return new_handle(y);
}

}  // namespace ksopt
