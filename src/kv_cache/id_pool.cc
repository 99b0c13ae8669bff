#include "kv_cache/id_pool.h"

#include "base/check.h"

namespace fathom::kv_cache {

IdPool::IdPool(int32_t capacity) : num_references_(static_cast<size_t>(capacity)) {
  CHECK_GE(capacity, 0);
  free_.reserve(static_cast<size_t>(capacity));
  for (int32_t id = capacity - 1; id >= 0; --id) free_.push_back(id);
}

int32_t IdPool::Allocate() {
  CHECK(!free_.empty());
  const int32_t id = free_.back();
  free_.pop_back();
  num_references_[static_cast<size_t>(id)] = 1;
  return id;
}

void IdPool::AddReference(int32_t id) {
  CHECK(id >= 0 && id < capacity());
  CHECK_GT(num_references_[static_cast<size_t>(id)], 0);
  ++num_references_[static_cast<size_t>(id)];
}

void IdPool::Release(int32_t id) {
  CHECK(id >= 0 && id < capacity());
  CHECK_GT(num_references_[static_cast<size_t>(id)], 0);
  if (--num_references_[static_cast<size_t>(id)] == 0) free_.push_back(id);
}

bool IdPool::IsIntact() const {
  std::vector<bool> seen(num_references_.size());
  for (const int32_t id : free_) {
    if (id < 0 || id >= capacity() || seen[static_cast<size_t>(id)]) return false;
    seen[static_cast<size_t>(id)] = true;
  }
  for (size_t id = 0; id < seen.size(); ++id) {
    if (seen[id] != (num_references_[id] == 0)) return false;
  }
  return true;
}

}  // namespace fathom::kv_cache
