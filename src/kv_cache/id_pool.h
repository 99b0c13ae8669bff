// IdPool: the ids [0, capacity) of one kind of cache memory, free or in use, with reference counts.
// The id freed last is given out first: its memory is the likeliest to be warm. One thread (the
// engine's); no memory of its own is named by an id here.
//
// References are of two kinds: a sequence's, and the prefix cache's. What the cache alone holds is
// reclaimable: it can be made free whenever a sequence needs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fathom::kv_cache {

class IdPool {
 public:
  explicit IdPool(int32_t capacity);

  int32_t capacity() const { return static_cast<int32_t>(references_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return capacity() - num_free(); }
  int32_t num_reclaimable() const { return num_reclaimable_; }
  int32_t num_available() const { return num_free() + num_reclaimable_; }
  bool is_reclaimable(int32_t id) const {
    const References& r = references_[static_cast<size_t>(id)];
    return r.sequences == 0 && r.cache > 0;
  }

  // An id with one reference, a sequence's. The caller has looked at num_free().
  int32_t Allocate();
  void AddReference(int32_t id);
  // Drops a sequence's reference; the last one of both kinds frees the id.
  void Release(int32_t id);
  void AddCacheReference(int32_t id);
  void ReleaseCacheReference(int32_t id);

  // Every id is either in use or free once, never both. Linear in capacity: for tests.
  bool IsIntact() const;

 private:
  struct References {
    int32_t sequences = 0;
    int32_t cache = 0;
    bool none() const { return sequences == 0 && cache == 0; }
  };
  References& InUse(int32_t id);

  std::vector<int32_t> free_;           // a stack
  std::vector<References> references_;  // [capacity]; none: free
  int32_t num_reclaimable_ = 0;
};

}  // namespace fathom::kv_cache
