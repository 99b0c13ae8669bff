// LowerTiers: what of the tree is in host memory and on disk. Every block that becomes full, and
// every snapshot worth keeping, is copied to host memory at once and from there to disk, so that
// its memory on the device can be given up without a copy and a crash loses little. Each tier keeps
// to its size by giving up what was used longest ago. Owned by PrefixCache; one thread.
//
// The disk answers later (OnEvents). A host slot that the disk reads or writes is not given up.
// What earlier runs left is found first; nothing is written before.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "kv_cache/id_pool.h"
#include "kv_cache/joined_stores.h"
#include "kv_cache/prefix_tree.h"
#include "request/kv_transfers.h"

namespace fathom::kv_cache {

struct LowerTiersOptions {
  std::array<int32_t, 2> num_host_slots = {};  // of blocks and of snapshots; 0: no such tier
  int64_t disk_bytes = 0;                      // 0: no disk
  int num_disk_ranks = 1;                      // that a record must be there for
  std::array<int64_t, 2> record_bytes = {};    // of a block's and a snapshot's contents
};

struct LowerTiersStats {
  std::array<uint64_t, 2> num_evicted_host = {};
  uint64_t num_evicted_disk = 0;
  uint64_t num_lost_disk = 0;
  uint64_t host_bytes_written = 0;
  uint64_t disk_bytes_written = 0;
};

class LowerTiers {
 public:
  LowerTiers(const LowerTiersOptions& options, PrefixTree& tree, uint64_t session_credit);

  // The part has just come to be on the device: copies it down, unless it is there already or all
  // slots are busy.
  void WriteThrough(PrefixNode& node, PartKind kind, uint64_t session,
                    std::vector<request::KvCopy>& copies);

  // Orders the part's copies anew after a use.
  void Requeue(PrefixNode& node, PartKind kind);

  // Whether `num` slots of the kind could be had for reading.
  bool HasRoomFor(PartKind kind, int64_t num) const;
  // Asks for a part that is on disk only.
  void StartRead(PrefixNode& node, PartKind kind, uint64_t session);

  void OnEvents(std::span<const request::KvStoreEvent> events, uint64_t time,
                std::vector<request::KvCopy>& copies);
  void TakeRequests(std::vector<request::KvStoreRequest>& out);

  // Nothing is left in either tier; what the disk is busy with goes when that is done.
  void Clear();

  bool has_requests() const { return !requests_.empty() || CanWrite(); }
  // Requests that the disk has not answered, or records of earlier runs that it has not told.
  bool is_waiting() const { return num_reads_ + num_writes_ > 0 || indexing_; }
  bool disk_on() const { return disk_on_; }
  int64_t disk_bytes_used() const { return disk_bytes_used_; }
  const LowerTiersStats& stats() const { return stats_; }

 private:
  struct WaitingWrite {
    request::KvHash hash;
    PartKind kind;
  };
  IdPool& host(PartKind kind) { return host_[static_cast<size_t>(kind)]; }
  bool CanWrite() const {
    return disk_on_ && !indexing_ && !waiting_writes_.empty() && num_writes_ < kMaxWrites;
  }
  bool MakeHostRoom(PartKind kind, uint64_t session);
  void PutInHostQueue(PrefixNode& node, PartKind kind);
  void PutInDiskQueue(PrefixNode& node, PartKind kind);
  void DropHostSlot(PrefixNode& node, PartKind kind);
  void ForgetOnDisk(PrefixNode& node, PartKind kind);
  void DeleteOnDisk(request::KvRecord record);
  void ForgetAfterClear(PrefixNode& node, PartKind kind);
  void KeepDiskBudget();
  void StartWrites();
  void OnRead(const request::KvStoreEvent& event, std::vector<request::KvCopy>& copies);
  void OnWrite(const request::KvStoreEvent& event);
  void OnFound(const request::KvStoreEvent& event, uint64_t time);
  void OnIndexed();
  void TurnDiskOff(std::vector<request::KvCopy>& copies);
  static request::KvRecord MakeRecord(const PrefixNode& node, PartKind kind);

  // Writes that the disk has at once; the rest wait, and lapse when their host copy is given up.
  static constexpr int kMaxWrites = 16;

  const LowerTiersOptions options_;
  const uint64_t session_credit_;
  PrefixTree& tree_;
  std::array<IdPool, 2> host_;
  std::array<EvictionQueue<PrefixNode>, 2> host_queue_;
  std::array<EvictionQueue<PrefixNode>, 2> disk_queue_;
  std::deque<WaitingWrite> waiting_writes_;
  std::vector<request::KvStoreRequest> requests_;
  JoinedStores stores_;
  int num_reads_ = 0, num_writes_ = 0;
  bool disk_on_ = false;
  bool indexing_ = false;
  bool forget_found_ = false;  // cleared before the disk had told its records
  int64_t disk_bytes_used_ = 0;
  LowerTiersStats stats_;
};

}  // namespace fathom::kv_cache
