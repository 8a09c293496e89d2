// kept_weights.hpp. Python keeps what was prepared and decides how long; here it is found without Python.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is made with

#include "kept_weights.hpp"

#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::TensorImpl;

std::shared_mutex kept_mutex;
// Addresses of tensors with which something is kept, and maybe of some more: Python then finds nothing.
std::unordered_set<const TensorImpl*> roots;
std::atomic<int64_t> forgotten{0};

// As Note of weight_table.py. `token` goes with what Python keeps, and that holds the weight's storage: while it
// lives, no other storage has this address.
struct Note {
  c10::weak_intrusive_ptr<TensorImpl> token;
  const c10::StorageImpl* storage;
  const void* address;
  std::vector<int64_t> strides;
  int64_t version, form, stream;

  bool is_of(const Tensor& weight, int64_t root_version) const {
    return version == root_version && address == weight.const_data_ptr() &&
           storage == weight.storage().unsafeGetStorageImpl() && weight.strides() == at::IntArrayRef(strides);
  }
};

// Of one tensor, which cannot be mistaken for a later one at its address.
struct Notes {
  c10::weak_intrusive_ptr<TensorImpl> root;
  std::vector<Note> newest_first;
};
std::unordered_map<const TensorImpl*, Notes> notes;  // under kept_mutex
constexpr size_t MOST = 16;                          // as in weight_table.py

void keep(int64_t root, bool is_kept) {
  const auto* place = reinterpret_cast<const TensorImpl*>(root);
  const std::unique_lock lock(kept_mutex);
  if (is_kept) {
    roots.insert(place);
  } else {
    roots.erase(place);
  }
}

void keep_nothing() {
  const std::unique_lock lock(kept_mutex);
  roots.clear();
  notes.clear();
}

int64_t times_forgotten() { return forgotten.load(); }

void note_prepared(const Tensor& weight, const Tensor& root, const Tensor& token, int64_t version, int64_t form,
                   int64_t stream) {
  Note note{c10::weak_intrusive_ptr<TensorImpl>(token.getIntrusivePtr()),
            weight.storage().unsafeGetStorageImpl(),
            weight.const_data_ptr(),
            weight.strides().vec(),
            version,
            form,
            stream};
  const std::unique_lock lock(kept_mutex);
  for (auto& [_, of_root] : notes) {
    std::erase_if(of_root.newest_first, [](const Note& one) { return one.token.expired(); });
  }
  std::erase_if(notes, [](const auto& entry) { return entry.second.newest_first.empty(); });
  auto& of_root =
      notes.try_emplace(root.unsafeGetTensorImpl(), c10::weak_intrusive_ptr<TensorImpl>(root.getIntrusivePtr()),
                        std::vector<Note>{})
          .first->second.newest_first;
  std::erase_if(of_root, [&](const Note& one) {
    return one.form == form && one.stream == stream && one.address == note.address && one.strides == note.strides;
  });
  of_root.insert(of_root.begin(), std::move(note));
  if (of_root.size() > MOST) of_root.pop_back();
}

}  // namespace

namespace ksopt {

Tensor root_of(const Tensor& weight) { return weight.is_view() ? Tensor(weight._base()) : weight; }

bool may_be_kept(const Tensor& root) {
  const std::shared_lock lock(kept_mutex);
  return roots.count(root.unsafeGetTensorImpl()) > 0;
}

void count_forgotten() { forgotten.fetch_add(1); }

std::vector<KeptWeight> kept_of(const Tensor& weight, const Tensor& root) {
  std::vector<Note> serving;
  {
    const std::shared_lock lock(kept_mutex);
    const auto found = notes.find(root.unsafeGetTensorImpl());
    if (found == notes.end()) return {};
    const int64_t version = root._version();
    for (const Note& note : found->second.newest_first) {
      if (note.is_of(weight, version)) serving.push_back(note);
    }
  }
  // Out of the lock: to hold a tensor may wait for the interpreter.
  std::vector<KeptWeight> kept;
  for (const Note& note : serving) {
    if (auto token = note.token.lock()) kept.push_back({Tensor(std::move(token)), note.form, note.stream});
  }
  return kept;
}

}  // namespace ksopt

TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def("keep(int root, bool is_kept) -> ()", keep);
  m.def("keep_nothing() -> ()", keep_nothing);
  m.def("times_forgotten() -> int", times_forgotten);
  m.def(
      "note_prepared(Tensor weight, Tensor root, Tensor token, int version, int form, int stream) -> ()",
      note_prepared);
}
