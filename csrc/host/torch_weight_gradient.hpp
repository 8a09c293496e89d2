// The gradient of a factor's weight by torch's products, with fewer calls than weight_grad_decomposed of
// ksopt/ops/weight_gradient.py, which says why many rows are divided into parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

namespace ksopt {

// Of two-dimensional grad and x.
struct TorchWeightGradient {
  int64_t a, b, c, d;
  bool batch_last;

  at::Tensor operator()(const at::Tensor& grad, const at::Tensor& x) const {
    const int64_t rows = x.size(batch_last ? 1 : 0);
    const int64_t parts = parts_of(rows, x);
    if (parts > 1) return in_order(in_parts(grad, x, parts));
    at::Tensor of_weight = d > 1 ? at::empty({a, d, b, c}, x.options()) : at::empty({a, b, c, 1}, x.options());
    at::Tensor out = of_weight.view({a * d, b, c});
    at::bmm_out(out, groups(grad, b), groups(x, c).mT());
    return d == 1 ? of_weight : in_order(of_weight);
  }

 private:
  // [a*d, n, rows] with the fewest copies, as ksopt/ops/weight_gradient.py.
  at::Tensor groups(const at::Tensor& t, int64_t n) const {
    if (batch_last) return t.view({a, n, d, -1}).transpose(1, 2).reshape({a * d, n, -1});
    if (d == 1) return t.view({-1, a, n}).permute({1, 2, 0});
    return t.view({-1, a, n, d}).transpose(2, 3).reshape({-1, a * d, n}).contiguous().permute({1, 2, 0});
  }

  // The sums over equal parts of the rows, added up, and over the rows left over: [a*d, b, c].
  at::Tensor in_parts(const at::Tensor& grad, const at::Tensor& x, int64_t parts) const {
    const int64_t dim = batch_last ? 1 : 0, rows = x.size(dim) / parts, left_over = x.size(dim) - parts * rows;
    const auto split = [&](const at::Tensor& t, int64_t n) {  // [parts*a*d, n, rows]
      const at::Tensor whole = t.narrow(dim, 0, parts * rows);
      if (batch_last) {
        return whole.reshape({a, n, d, parts, rows}).permute({3, 0, 2, 1, 4}).reshape({parts * a * d, n, rows});
      }
      const at::Tensor by_part = whole.reshape({parts, rows, a, n, d}).permute({0, 2, 4, 1, 3});
      return by_part.reshape({parts * a * d, rows, n}).mT();
    };
    at::Tensor total = at::bmm(split(grad, b), split(x, c).mT()).view({parts, a * d, b, c}).sum(0);
    if (left_over > 0) {
      const auto rest = [&](const at::Tensor& t) { return t.narrow(dim, parts * rows, left_over).contiguous(); };
      total.add_(at::bmm(groups(rest(grad), b), groups(rest(x), c).mT()));
    }
    return total;
  }

  // As _parts_of_rows in ksopt/ops/weight_gradient.py, which says why.
  int64_t parts_of(int64_t rows, const at::Tensor& x) const {
    constexpr int64_t BLOCKS = 264, BLOCK_OUTPUTS = 128, BLOCK_SUMS = 64, LEAST_ROWS = 256;
    if (!x.is_cuda() || x.element_size() < 4 || a * d == 1) return 1;
    const int64_t tiles = a * d * ((b + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS) * ((c + BLOCK_SUMS - 1) / BLOCK_SUMS);
    const int64_t most = std::min(BLOCKS / tiles, rows / LEAST_ROWS);
    if (most < 2) return 1;
    int64_t even = most;
    while (rows % even != 0) --even;
    return 2 * even >= most ? even : most;
  }

  // The matrices of each i and j in the order of the weight's elements.
  at::Tensor in_order(const at::Tensor& matrices) const {
    return d == 1 ? matrices.view({a, b, c, 1}) : matrices.view({a, d, b, c}).permute({0, 2, 3, 1}).contiguous();
  }
};

}  // namespace ksopt
