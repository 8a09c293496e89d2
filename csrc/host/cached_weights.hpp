// What ksopt/kernels/weight_cache.py keeps of weights, as far as calls have to know that run without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ksopt {

// The tensor that counts a weight's versions: what it is a view of, or itself.
at::Tensor root_of(const at::Tensor& weight);

// The same of a weight that is said to be a view of `owner`, which may be null.
at::Tensor root_of(const at::Tensor& weight, const at::Tensor* owner);

// Whether this thread says that weights are about to change, as ksopt/kernels/weight_scopes.py; none until it has
// said something.
std::optional<bool> are_marked_changing();
void mark_changing(bool changing);

// Whether something may be kept with a tensor, which a training step has to forget.
bool may_be_cached(const at::Tensor& root);

// Notes that a weight is trained of which nothing is kept.
void count_forgotten();

// As PreparedWeight, and held.
struct CachedWeight {
  at::Tensor prepared;
  int64_t of, form, stream;
};

// What was prepared of these values of weights, of each alone and of all together, and of the one factor that all
// were multiplied to, and is still kept; of each the newest first: what ksopt/kernels/weight_table.py has noted.
// roots: of each.
std::vector<CachedWeight> cached_of(at::TensorList weights, at::TensorList roots);

}  // namespace ksopt
