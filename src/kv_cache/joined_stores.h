// JoinedStores: what the disks of all ranks say, as if they were one. A record's bytes are with the
// ranks that run its sequence: each stage has those of its layers, tensor ranks the same. A store
// (kv_store/) speaks for the ranks of its process that have the same bytes. All stores get the same
// requests; an answer is given when it has come for all ranks, and is "yes" when all say yes, so
// that a record is there for every rank or for none. Owned by LowerTiers; one thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv_cache/chain_hash.h"
#include "request/kv_transfers.h"

namespace fathom::kv_cache {

class JoinedStores {
 public:
  explicit JoinedStores(int num_ranks) : num_ranks_(num_ranks) {}

  // What is now known for all ranks, with the bytes of all files. The first store that is off turns
  // all off.
  std::vector<request::KvStoreEvent> Join(std::span<const request::KvStoreEvent> events);

  // Once all is indexed: records of earlier runs that some rank lacks.
  std::vector<request::KvRecord> TakeIncomplete();

 private:
  template <typename Key, typename Hasher>
  using Votes = std::unordered_map<Key, request::KvStoreEvent, Hasher>;
  template <typename Key, typename Hasher>
  void Add(const request::KvStoreEvent& event, const Key& key, Votes<Key, Hasher>& votes,
           std::vector<request::KvStoreEvent>& joined) const;

  const int num_ranks_;
  // By kind of record.
  std::array<Votes<int32_t, std::hash<int32_t>>, 2> answers_;  // of a host slot
  std::array<Votes<request::KvHash, KvHashHasher>, 2> found_;
  int num_indexed_ = 0;  // ranks
  bool off_ = false;
};

}  // namespace fathom::kv_cache
