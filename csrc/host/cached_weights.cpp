// cached_weights.hpp. Python stores prepared weights and decides for how long; here they are looked up without it.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include "cached_weights.hpp"

#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dispatch.hpp"

namespace {

using at::Tensor;
using c10::TensorImpl;

std::shared_mutex cache_mutex;
// Addresses of tensors that may have cached forms; for some of them Python has dropped the forms since.
std::unordered_set<const TensorImpl*> roots;
std::atomic<int64_t> forgotten{0};
thread_local std::optional<bool> marked_repacked;
thread_local bool marked_recorded = false;

// The state of a weight when a form of it was prepared. The reference keeps the tensor that counts its versions
// from being mistaken for a later one at its address.
struct Part {
  c10::weak_intrusive_ptr<TensorImpl> root;
  int64_t version;
  const c10::StorageImpl* storage;
  const void* address;
  std::vector<int64_t> strides;

  Part(const Tensor& weight, const Tensor& root, int64_t version)
      : root(root.getIntrusivePtr()),
        version(version),
        storage(weight.storage().unsafeGetStorageImpl()),
        address(weight.const_data_ptr()),
        strides(weight.strides().vec()) {}

  bool is_in_place_of(const Part& other) const { return address == other.address && strides == other.strides; }

  bool is_of(const Tensor& weight, const Tensor& its_root) const {
    return root._unsafe_get_target() == its_root.unsafeGetTensorImpl() && has_values_of(weight, its_root._version());
  }

  bool has_values_of(const Tensor& weight, int64_t its_version) const {
    return version == its_version && address == weight.const_data_ptr() &&
           storage == weight.storage().unsafeGetStorageImpl() && weight.strides() == at::IntArrayRef(strides);
  }
};

// A form of a weight, or of several together, that Python caches. `token` lives as long as Python's entry, which holds
// the weights' storages: while it lives, no other storage has the address of one of theirs. It is an alias of
// `prepared`, for which Python has entries of its own where forms of that are prepared in turn.
struct Note {
  c10::weak_intrusive_ptr<TensorImpl> token, prepared;
  std::vector<Part> parts;
  int64_t form, stream;

  bool replaces(const Note& other) const {
    return form == other.form && stream == other.stream &&
           std::equal(parts.begin(), parts.end(), other.parts.begin(), other.parts.end(),
                      [](const Part& mine, const Part& its) { return mine.is_in_place_of(its); });
  }

  // Which of a call's weights it is of, if it is of `at`, or of all of them, the first of which is `at`.
  std::optional<int64_t> is_of(at::TensorList weights, at::TensorList roots, size_t at) const {
    if (!parts[0].is_of(weights[at], roots[at])) return std::nullopt;
    if (parts.size() == 1) return static_cast<int64_t>(at);
    if (at != 0 || parts.size() != weights.size()) return std::nullopt;
    for (size_t other = 1; other < parts.size(); ++other) {
      if (!parts[other].is_of(weights[other], roots[other])) return std::nullopt;
    }
    return ksopt::ALL;
  }
};

// The forms of weights that one tensor owns, the newest first.
using Notes = std::vector<std::shared_ptr<const Note>>;
std::unordered_map<const TensorImpl*, Notes> notes;  // under cache_mutex

// Weights as calls had them last, by the tensors that count their versions.
std::unordered_map<const TensorImpl*, Part> seen;  // under seen_mutex
std::shared_mutex seen_mutex;
size_t most_seen = 1024;  // before those are dropped whose tensors are gone

void set_cached(int64_t root, bool is_cached) {
  const auto* place = reinterpret_cast<const TensorImpl*>(root);
  const std::unique_lock lock(cache_mutex);
  if (is_cached) {
    roots.insert(place);
  } else {
    roots.erase(place);
  }
}

void clear_cached() {
  const std::unique_lock lock(cache_mutex);
  roots.clear();
  notes.clear();
}

int64_t times_forgotten() { return forgotten.load(); }

// The noted prepared tensors of a weight, and their forms.
std::tuple<std::vector<Tensor>, std::vector<int64_t>> prepared_of(const Tensor& weight,
                                                                  const std::optional<Tensor>& owner) {
  std::vector<Tensor> tensors;
  std::vector<int64_t> forms;
  for (auto& one : ksopt::cached_of(weight, ksopt::root_of(weight, owner ? &*owner : nullptr))) {
    tensors.push_back(std::move(one.prepared));
    forms.push_back(one.form);
  }
  return {std::move(tensors), std::move(forms)};
}

void note_prepared(const std::vector<Tensor>& weights, const std::vector<Tensor>& owners,
                   const std::vector<int64_t>& versions, const Tensor& token, const Tensor& prepared, int64_t form,
                   int64_t stream) {
  auto note = std::make_shared<Note>(Note{c10::weak_intrusive_ptr<TensorImpl>(token.getIntrusivePtr()),
                                          c10::weak_intrusive_ptr<TensorImpl>(prepared.getIntrusivePtr()),
                                          {},
                                          form,
                                          stream});
  for (size_t at = 0; at < weights.size(); ++at) note->parts.emplace_back(weights[at], owners[at], versions[at]);
  const std::unique_lock lock(cache_mutex);
  for (auto& [_, of_root] : notes) {
    std::erase_if(of_root, [](const auto& one) { return one->token.expired(); });
  }
  std::erase_if(notes, [](const auto& entry) { return entry.second.empty(); });
  Notes& of_root = notes[owners[0].unsafeGetTensorImpl()];
  std::erase_if(of_root, [&](const auto& one) { return note->replaces(*one); });
  of_root.insert(of_root.begin(), std::move(note));
}

}  // namespace

namespace ksopt {

Tensor root_of(const Tensor& weight) { return weight.is_view() ? Tensor(weight._base()) : weight; }

Tensor root_of(const Tensor& weight, const Tensor* owner) {
  return root_of(owner == nullptr || weight.is_view() ? weight : *owner);
}

std::optional<bool> are_marked_repacked() { return marked_repacked; }

void mark_repacked(bool repacked) { marked_repacked = repacked; }

bool are_marked_recorded() { return marked_recorded; }

void mark_recorded(bool recorded) { marked_recorded = recorded; }

bool may_be_cached(const Tensor& root) {
  const std::shared_lock lock(cache_mutex);
  return roots.count(root.unsafeGetTensorImpl()) > 0;
}

bool was_seen(const Tensor& weight, const Tensor& root) {
  const bool counts_writes = !root.is_inference() &&
                             root.storage().unsafeGetStorageImpl() == weight.storage().unsafeGetStorageImpl();
  if (!counts_writes) return false;
  const auto* key = root.unsafeGetTensorImpl();
  {
    const std::shared_lock lock(seen_mutex);
    const auto it = seen.find(key);
    if (it != seen.end() && it->second.is_of(weight, root)) return true;
  }
  const std::unique_lock lock(seen_mutex);
  if (seen.size() >= most_seen) {
    std::erase_if(seen, [](const auto& entry) { return entry.second.root.expired(); });
    most_seen = std::max<size_t>(1024, 2 * seen.size());
  }
  seen.insert_or_assign(key, Part(weight, root, root._version()));
  return false;
}

void count_forgotten() { forgotten.fetch_add(1); }

namespace {

// Adds the forms prepared of a factor that was itself prepared of several weights; `token`: that factor.
void add_cached_of_product(const Note& product, const Tensor& token, std::vector<CachedWeight>& cached) {
  std::vector<std::shared_ptr<const Note>> serving;
  {
    const std::shared_lock lock(cache_mutex);
    const auto it = notes.find(product.prepared._unsafe_get_target());
    if (it == notes.end()) return;
    for (const auto& note : it->second) {
      if (note->parts.size() == 1 && note->parts[0].has_values_of(token, token._version())) serving.push_back(note);
    }
  }
  for (const auto& note : serving) {
    if (auto own = note->token.lock()) cached.push_back({Tensor(std::move(own)), OF_PRODUCT, note->form, note->stream});
  }
}

}  // namespace

std::vector<CachedWeight> cached_of(at::TensorList weights, at::TensorList roots) {
  std::vector<std::pair<std::shared_ptr<const Note>, int64_t>> serving;
  {
    const std::shared_lock lock(cache_mutex);
    for (size_t at = 0; at < weights.size(); ++at) {
      const auto it = notes.find(roots[at].unsafeGetTensorImpl());
      if (it == notes.end()) continue;
      for (const auto& note : it->second) {
        if (const auto of = note->is_of(weights, roots, at)) serving.emplace_back(note, *of);
      }
    }
  }
  // Out of the lock: to hold a tensor may wait for the interpreter.
  std::vector<CachedWeight> cached, of_products;
  for (const auto& [note, of] : serving) {
    auto token = note->token.lock();
    if (!token) continue;
    cached.push_back({Tensor(std::move(token)), of, note->form, note->stream});
    if (of == ALL && cached.back().prepared.dim() == 4) add_cached_of_product(*note, cached.back().prepared, of_products);
  }
  for (auto& one : of_products) cached.push_back(std::move(one));
  return cached;
}

}  // namespace ksopt

TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def("set_cached(int root, bool is_cached) -> ()", set_cached);
  m.def("clear_cached() -> ()", clear_cached);
  m.def("times_forgotten() -> int", times_forgotten);
  m.def("prepared_of(Tensor weight, Tensor? owner) -> (Tensor[], int[])", prepared_of);
  m.def("mark_repacked(bool repacked) -> ()", ksopt::mark_repacked);
  m.def("mark_recorded(bool recorded) -> ()", ksopt::mark_recorded);
  m.def(
      "note_prepared(Tensor[] weights, Tensor[] owners, int[] versions, Tensor token, Tensor prepared, int form, "
      "int stream) -> ()",
      note_prepared);
}
