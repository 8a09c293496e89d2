// The view of the weight cache (ksopt/kernels/weight_cache.py) for calls that run without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ksopt {

// The tensor that counts a weight's versions: what it is a view of, or itself.
at::Tensor root_of(const at::Tensor& weight);

// The same for a weight that is declared a view of `owner`, which may be null.
at::Tensor root_of(const at::Tensor& weight, const at::Tensor* owner);

// Whether this thread is in a scope of changing weights (ksopt/kernels/weight_scopes.py); none until Python has called
// mark_repacked.
std::optional<bool> are_marked_repacked();
void mark_repacked(bool repacked);

// Whether this thread is in a scope of graphs whose weights are prepared before replays (`recorded_by`, there).
bool are_marked_recorded();
void mark_recorded(bool recorded);

// Whether a tensor may have cached forms, which a training step has to drop.
bool may_be_cached(const at::Tensor& root);

// Whether an earlier call had these values of a stored weight; this call will have been one for later ones. Then the
// kernel that wrote them is not the one launched right before this call, but for writes that torch does not count.
bool was_seen(const at::Tensor& weight, const at::Tensor& root);

// Counts that a weight without cached forms is trained.
void count_forgotten();

// A PreparedWeight that owns its tensor.
struct CachedWeight {
  at::Tensor prepared;
  int64_t of, form, stream;
};

// The cached forms of these values of weights, of each alone and of all together, and of the one factor that all
// were multiplied to; of each the newest first: those that ksopt/kernels/weight_table.py has noted.
// roots: of each.
std::vector<CachedWeight> cached_of(at::TensorList weights, at::TensorList roots);

}  // namespace ksopt
