// IdPool: the ids [0, capacity) of one kind of cache memory, free or in use, with reference counts.
// The id freed last is given out first: its memory is the likeliest to be warm. One thread (the
// engine's); no memory of its own is named by an id here.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom::kv_cache {

class IdPool {
 public:
  explicit IdPool(int32_t capacity);

  int32_t capacity() const { return static_cast<int32_t>(num_references_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return capacity() - num_free(); }

  // An id with one reference. The caller has looked at num_free().
  int32_t Allocate();
  void AddReference(int32_t id);
  // Drops a reference; the last one frees the id.
  void Release(int32_t id);

  // Every id is either in use or free once, never both. Linear in capacity: for tests.
  bool IsIntact() const;

 private:
  std::vector<int32_t> free_;            // a stack
  std::vector<int32_t> num_references_;  // [capacity]; 0: free
};

}  // namespace fathom::kv_cache
