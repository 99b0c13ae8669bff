#include "kv_cache/id_pool.h"

#include "base/check.h"

namespace fathom::kv_cache {

IdPool::IdPool(int32_t capacity) : references_(static_cast<size_t>(capacity)) {
  CHECK_GE(capacity, 0);
  free_.reserve(static_cast<size_t>(capacity));
  for (int32_t id = capacity - 1; id >= 0; --id) free_.push_back(id);
}

int32_t IdPool::Allocate() {
  CHECK(!free_.empty());
  const int32_t id = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(id)].sequences = 1;
  return id;
}

IdPool::References& IdPool::InUse(int32_t id) {
  CHECK(id >= 0 && id < capacity());
  CHECK(!references_[static_cast<size_t>(id)].none());
  return references_[static_cast<size_t>(id)];
}

void IdPool::AddReference(int32_t id) {
  References& r = InUse(id);
  if (r.sequences++ == 0) --num_reclaimable_;
}

void IdPool::Release(int32_t id) {
  References& r = InUse(id);
  CHECK_GT(r.sequences, 0);
  if (--r.sequences > 0) return;
  if (r.cache > 0) {
    ++num_reclaimable_;
  } else {
    free_.push_back(id);
  }
}

void IdPool::AddCacheReference(int32_t id) { ++InUse(id).cache; }

void IdPool::ReleaseCacheReference(int32_t id) {
  References& r = InUse(id);
  CHECK_GT(r.cache, 0);
  if (--r.cache > 0 || r.sequences > 0) return;
  --num_reclaimable_;
  free_.push_back(id);
}

bool IdPool::IsIntact() const {
  std::vector<bool> seen(references_.size());
  for (const int32_t id : free_) {
    if (id < 0 || id >= capacity() || seen[static_cast<size_t>(id)]) return false;
    seen[static_cast<size_t>(id)] = true;
  }
  int32_t num_reclaimable = 0;
  for (size_t id = 0; id < seen.size(); ++id) {
    if (seen[id] != references_[id].none()) return false;
    if (is_reclaimable(static_cast<int32_t>(id))) ++num_reclaimable;
  }
  return num_reclaimable == num_reclaimable_;
}

}  // namespace fathom::kv_cache
