// SimulatedMemory: the bytes behind PrefixCache's ids, for tests: every place keeps the tokens
// whose KV a model would have there, copies are carried out, a disk answers a few steps later, and
// each step checks that all a model would read of a sequence is in place. What is not comes back as
// an error text.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv_cache/prefix_cache.h"

namespace fathom::kv_cache {

class SimulatedMemory {
 public:
  explicit SimulatedMemory(const PrefixCacheOptions& options);

  // Runs the transfers of a step.
  void Run(const request::KvTransfers& transfers);
  // Runs tokens of a sequence at num_computed...; empty when all was in place.
  std::string Step(const request::BlockTable& table, std::span<const int32_t> token_ids,
                   int64_t num_computed, int64_t num_tokens);
  // What the disk answered meanwhile.
  std::vector<request::KvStoreEvent> TakeEvents();

  // A restart: everything but the disk is lost. What it holds is found.
  void Restart();
  // From now on every request of the disk fails.
  void BreakDisk();
  size_t num_disk_records() const { return disk_.size(); }

 private:
  using Page = std::vector<int32_t>;  // tokens
  struct Slot {
    int64_t num_tokens = 0;
    int64_t oldest = 0;  // the first position from which it can still go on
    std::vector<int32_t> rows = std::vector<int32_t>(kC4StateRows, -1);
  };
  struct Snapshot {
    std::vector<int32_t> rows;
    std::vector<Page> pages;
  };
  void Copy(const request::KvCopy& copy);
  request::KvStoreEvent Answer(const request::KvStoreRequest& request);

  int window_;
  std::vector<Page> blocks_, pages_, host_blocks_;
  std::vector<Slot> slots_;
  std::vector<Snapshot> snapshots_, host_snapshots_;
  struct Record {
    request::KvRecord record;
    Page block;
    Snapshot snapshot;
  };
  using DiskKey = std::pair<std::pair<uint64_t, uint64_t>, PartKind>;
  std::map<DiskKey, Record> disk_;
  bool disk_broken_ = false;
  std::deque<request::KvStoreRequest> waiting_;
  std::vector<request::KvStoreEvent> events_;
};

}  // namespace fathom::kv_cache
