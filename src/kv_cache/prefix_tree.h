// PrefixTree: the full blocks that are known, in any tier, each under the block before it; and the
// tails at their ends. Says who is whose child and what is used by whom; which memory is given up
// is prefix_cache.h's and lower_tiers.h's business. Owned by PrefixCache; one thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kv_cache/chain_hash.h"
#include "kv_cache/eviction_queue.h"
#include "request/kv_transfers.h"
#include "request/scheduled_batch.h"

namespace fathom::kv_cache {

using PartKind = request::KvRecord::Kind;  // a block, or the snapshot at its end
inline constexpr std::array<PartKind, 2> kPartKinds = {PartKind::kBlock, PartKind::kSnapshot};

// Where one part of a node is; it may be in several tiers at once.
struct KeptPart {
  int32_t device_id = -1;      // block or snapshot
  std::vector<int32_t> pages;  // of a snapshot on the device: the window before its boundary
  int32_t host_slot = -1;
  bool reading = false;  // from disk into host_slot, which has nothing yet
  bool writing = false;  // from host_slot to disk
  bool forget = false;   // once the disk is done reading or writing it
  bool on_disk = false;
  int64_t file_bytes = 0;
  uint64_t last_use = 0;
  EvictionPlace device_place, host_place, disk_place;

  bool on_device() const { return device_id >= 0; }
  bool in_host() const { return host_slot >= 0 && !reading && !forget; }
  bool kept() const { return on_device() || host_slot >= 0 || on_disk; }
};

struct PrefixTail;

struct PrefixNode {
  request::KvHash hash;
  PrefixNode* parent = nullptr;
  int64_t num_tokens = 0;          // up to its end; 0: the root of a salt
  std::vector<int32_t> token_ids;  // empty: not known yet (a child was found on disk first)
  int num_children = 0;
  int num_users = 0;  // running sequences
  std::array<KeptPart, 2> parts;
  std::vector<PrefixTail*> tails;

  uint64_t serial = 0;
  std::vector<uint64_t> sessions;  // distinct ones that used it, at most kMaxCountedSessions

  KeptPart& part(PartKind kind) { return parts[static_cast<size_t>(kind)]; }
  const KeptPart& part(PartKind kind) const { return parts[static_cast<size_t>(kind)]; }
  KeptPart& block() { return part(PartKind::kBlock); }
  KeptPart& snapshot() { return part(PartKind::kSnapshot); }
};

// The exact end of a sequence after the full blocks of `node`. While it runs, `table` is the
// sequence's; when it has ended, `kept` holds what a continuation needs: at most one block, the
// window pages and the state slot.
struct PrefixTail {
  PrefixNode* node = nullptr;      // null: nowhere
  std::vector<int32_t> token_ids;  // after the node's: at most 255
  int64_t state_end = 0;           // the most tokens that the state slot has seen
  bool running = true;
  const request::BlockTable* table = nullptr;
  request::BlockTable kept;
  uint64_t session = 0;
  EvictionPlace place;  // once it has ended
  int64_t num_tokens() const { return node->num_tokens + static_cast<int64_t>(token_ids.size()); }
};

class PrefixTree {
 public:
  explicit PrefixTree(const HashKey& key) : hash_(key) {}

  PrefixNode& Root(std::string_view salt);
  // The child with these tokens; null when there is none.
  PrefixNode* Find(const PrefixNode& parent, const request::KvHash& hash,
                   std::span<const int32_t> token_ids) const;
  // Find, or a new one; null when another block has the same hash.
  PrefixNode* FindOrAdd(PrefixNode& parent, const request::KvHash& hash,
                        std::span<const int32_t> token_ids);
  // The node of a record that the disk found; null when it contradicts what is known.
  PrefixNode* AddFound(const request::KvRecord& record);
  PrefixNode* FindHash(const request::KvHash& hash) const;

  // Erases the node and then its ancestors, as far as nothing is kept there and nobody needs them.
  void Prune(PrefixNode* node);
  // The same for all.
  void PruneAll();

  static void Attach(PrefixTail& tail, PrefixNode& node);
  static void Detach(PrefixTail& tail);

  const ChainHash& hash() const { return hash_; }
  std::vector<PrefixNode*> Nodes() const;  // deepest first

 private:
  static bool IsNeeded(const PrefixNode& node);
  PrefixNode* Erase(PrefixNode& node);  // its parent
  PrefixNode& Add(const request::KvHash& hash, int64_t num_tokens);

  const ChainHash hash_;
  std::unordered_map<request::KvHash, std::unique_ptr<PrefixNode>, KvHashHasher> nodes_;
  uint64_t next_serial_ = 1;
};

inline constexpr size_t kMaxCountedSessions = 8;
// The eviction group of what several sessions share, and a session that is nobody's.
inline constexpr uint64_t kSharedGroup = 0;
inline constexpr uint64_t kNoSession = ~uint64_t{0};

void CountSession(PrefixNode& node, uint64_t session);
uint64_t EvictionGroup(const PrefixNode& node);
// Sharing counts as `session_credit` of time for every session after the first.
EvictionKey MakeEvictionKey(const PrefixNode& node, PartKind kind, uint64_t session_credit);

}  // namespace fathom::kv_cache
