// Products by PyTorch's batched matrix product, on views of x and y or between two transposes of them.
//
// What ksopt/batched.py (bmm) and ksopt/kernels/families/transpose_bmm.py do in Python, for a call that has been
// decided: the host's time is most of what a small one of them takes.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernel_table.hpp"

namespace {

// y = x K^T for the weights (a, b, c, d). Where b and d have to change places, kernels of these plans
// do it; torch's own copies, if there are none.
struct Batched {
  int64_t a, b, c, d;
  bool batch_last;
  int64_t before = NONE, after = NONE;

  int64_t groups() const { return a * d; }
  // Whether x, and y, can be seen as matrices in their own memory.
  bool sees_x() const { return d == 1 || c == 1 || (batch_last && a == 1); }
  bool sees_y() const { return d == 1 || b == 1 || (batch_last && a == 1); }
};

std::vector<Batched> batched_products;  // under plans_mutex

Batched batched_at(int64_t index) {
  const std::shared_lock lock(plans_mutex);
  return batched_products.at(static_cast<size_t>(index));
}

template <size_t N>
using Sizes = std::array<int64_t, N>;

// A tensor's memory, from its first element on, with other sizes and strides.
template <size_t N>
Tensor seen(const Tensor& tensor, const Sizes<N>& sizes, const Sizes<N>& strides) {
  AtenTensorHandle made = nullptr;
  if (aoti_torch__reinterpret_tensor(tensor.get(), N, sizes.data(), strides.data(), 0, &made) != 0) {
    throw std::runtime_error("ksopt: a tensor cannot be seen with other strides");
  }
  return Tensor(made);
}

// [groups, rows, columns] in some tensor's memory: a group's stride, a row's, a column's.
struct Matrices {
  Tensor memory;
  Sizes<3> sizes, strides;

  Matrices transposed() const {
    return {memory, {sizes[0], sizes[2], sizes[1]}, {strides[0], strides[2], strides[1]}};
  }
  Tensor tensor() const { return seen(memory, sizes, strides); }
  Tensor only() const { return seen(memory, Sizes<2>{sizes[1], sizes[2]}, Sizes<2>{strides[1], strides[2]}); }
};

// out = left @ right for each group. One group is an ordinary product, as in ksopt/batched.py.
void multiply_groups(const Matrices& left, const Matrices& right, const Matrices& out) {
  const bool one = out.sizes[0] == 1;
  std::array<StableIValue, 3> stack{
      torch::stable::detail::from(one ? left.only() : left.tensor()),
      torch::stable::detail::from(one ? right.only() : right.tensor()),
      torch::stable::detail::from(one ? out.only() : out.tensor())};
  if (torch_call_dispatcher(one ? "aten::mm" : "aten::bmm", "out", stack.data(), TORCH_ABI_VERSION) != 0) {
    throw std::runtime_error("ksopt: torch cannot multiply here");  // what multiplies in Python says why
  }
  torch::stable::detail::to<Tensor>(stack[0]);  // out once more, which is ours to let go
}

// to = from, both seen with these sizes.
void copy(const Tensor& to, const Sizes<4>& to_strides, const Tensor& from, const Sizes<4>& from_strides,
          const Sizes<4>& sizes) {
  Tensor target = seen(to, sizes, to_strides);
  torch::stable::copy_(target, seen(from, sizes, from_strides));
}

// The a*d matrices [c, b] of a weight (a, b, c, d) in its own memory; none if no product can read them
// there: their columns or their rows have to lie side by side.
std::optional<Matrices> matrices_in(const Tensor& weight) {
  const int64_t a = weight.size(0), b = weight.size(1), c = weight.size(2), d = weight.size(3);
  const int64_t along_b = weight.stride(1), along_c = weight.stride(2);
  const bool columns = along_b == 1 && along_c >= b, rows = along_c == 1 && along_b >= c;
  if (!columns && !rows && d > 1) return std::nullopt;  // for d = 1 torch copies it, as ever
  int64_t group = weight.stride(3);
  if (d == 1) {
    group = weight.stride(0);
  } else if (a > 1 && weight.stride(0) != d * group) {
    return std::nullopt;
  }
  return Matrices{weight, {a * d, c, b}, {group, along_c, along_b}};
}

// The same of a weight that was prepared: [a, d, b, c], contiguous.
Matrices matrices_of_prepared(const Batched& p, const Tensor& prepared) {
  return {prepared, {p.groups(), p.c, p.b}, {p.b * p.c, 1, p.c}};
}

// A weight (a, b, c, d) as the product wants it: [a, d, b, c].
Tensor prepare_matrices(const Tensor& weight) {
  const int64_t a = weight.size(0), b = weight.size(1), c = weight.size(2), d = weight.size(3);
  const Sizes<4> sizes = {a, d, b, c};
  const Sizes<4> strides = {weight.stride(0), weight.stride(3), weight.stride(1), weight.stride(2)};
  Tensor made = empty_like_in(weight, {a, d, b, c});
  copy(made, {d * b * c, b * c, c, 1}, weight, strides, sizes);
  return made;
}

// x or y, contiguous, as matrices in its own memory: [groups, batch, length] or, batch last,
// [groups, length, batch].
Matrices matrices_of(const Batched& p, const Tensor& rows, int64_t length, int64_t batch) {
  const int64_t n = p.groups();
  if (!p.batch_last) return {rows, {n, batch, length}, {length, n * length, 1}};
  const bool interleaved = p.a == 1 && p.d > 1 && length > 1;
  return {rows, {n, length, batch}, {interleaved ? batch : length * batch, interleaved ? p.d * batch : batch, 1}};
}

// The same of memory that holds the matrices one after another, as `lay_out` leaves them.
Matrices matrices_laid_out(const Batched& p, const Tensor& planes, int64_t length, int64_t batch) {
  const int64_t n = p.groups();
  if (!p.batch_last) return {planes, {n, batch, length}, {length, n * length, 1}};
  return {planes, {n, length, batch}, {length * batch, batch, 1}};
}

// Lets the dims of `length` and d change places: rows to planes, or planes back to rows.
bool change_places(const Batched& p, const Tensor& rows, const Tensor& planes, int64_t length, int64_t batch,
                   bool to_planes, int64_t plan, const Tensor& weight) {
  const Tensor& from = to_planes ? rows : planes;
  const Tensor& to = to_planes ? planes : rows;
  if (plan != NONE) return launch_plan(plan_at(plan), from, weight, to).has_value();
  const int64_t a = p.a, d = p.d, n = length, width = a * d * n;
  const Sizes<4> sizes = p.batch_last ? Sizes<4>{a, d, n, batch} : Sizes<4>{batch, a, d, n};
  const Sizes<4> in_planes = p.batch_last ? Sizes<4>{d * n * batch, n * batch, batch, 1}
                                          : Sizes<4>{width, d * n, n, 1};
  const Sizes<4> in_rows = p.batch_last ? Sizes<4>{d * n * batch, batch, d * batch, 1}
                                        : Sizes<4>{width, d * n, 1, d};
  copy(to, to_planes ? in_planes : in_rows, from, to_planes ? in_rows : in_planes, sizes);
  return true;
}

// x: (*batch, N) or, batch last, (N, *batch), contiguous and aligned to 16 bytes; matrices: of the weight,
// which is only passed on. out: as for `launch_plan`. None if that takes a kernel that was not compiled yet.
std::optional<Tensor> multiply_batched(const Batched& p, const Tensor& x, const Matrices& matrices,
                                       const Tensor& weight, const std::optional<Tensor>& out) {
  const int64_t dims = x.dim(), n = p.groups();
  const int64_t batch = x.numel() / (n * p.c);
  std::vector<int64_t> sizes(static_cast<size_t>(dims));
  for (int64_t i = 0; i < dims; ++i) sizes[static_cast<size_t>(i)] = x.size(i);
  sizes[static_cast<size_t>(p.batch_last ? 0 : dims - 1)] = n * p.b;

  const int32_t device = x.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  Tensor y = out ? *out : empty_like_in(x, sizes);
  if (batch == 0) return y;

  // As wide as x and as y: the plans of transposes look at the rows.
  const auto planes = [&](int64_t width) {
    return empty_like_in(x, p.batch_last ? std::vector<int64_t>{width, batch} : std::vector<int64_t>{batch, width});
  };
  std::optional<Tensor> x_planes, y_planes;
  if (!p.sees_x()) {
    x_planes = planes(n * p.c);
    if (!change_places(p, x, *x_planes, p.c, batch, true, p.before, weight)) return std::nullopt;
  }
  if (!p.sees_y()) y_planes = planes(n * p.b);
  const Matrices operand = x_planes ? matrices_laid_out(p, *x_planes, p.c, batch) : matrices_of(p, x, p.c, batch);
  const Matrices result = y_planes ? matrices_laid_out(p, *y_planes, p.b, batch) : matrices_of(p, y, p.b, batch);
  if (p.batch_last) {
    multiply_groups(matrices.transposed(), operand, result);
  } else {
    multiply_groups(operand, matrices, result);
  }
  if (y_planes && !change_places(p, y, *y_planes, p.b, batch, false, p.after, weight)) return std::nullopt;
  return y;
}

}  // namespace
