// What ksopt/kernels/weight_cache.py keeps of weights, as far as calls have to know that run without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ksopt {

// The tensor that counts a weight's versions: what it is a view of, or itself.
at::Tensor root_of(const at::Tensor& weight);

// Whether something may be kept with a tensor, which a training step has to forget.
bool may_be_kept(const at::Tensor& root);

// Notes that a weight is trained of which nothing is kept.
void count_forgotten();

// A weight that was prepared, and what for.
struct KeptWeight {
  at::Tensor prepared;
  int64_t form, stream;
};

// What was prepared of these values of a weight and is still kept, the newest first; see
// ksopt/kernels/weight_table.py.
std::vector<KeptWeight> kept_of(const at::Tensor& weight, const at::Tensor& root);

}  // namespace ksopt
