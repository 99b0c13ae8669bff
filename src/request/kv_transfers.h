// KvTransfers: the copies of KV memory that go with a step, and what the disk is asked for. Planned
// by kv_cache/prefix_cache.h with ids only; carried out by the runtime, which has the bytes. Plain
// values.
//
// Tiers: the device's pools (kv_cache/kv_layout.h), pinned host memory (slots of one block, and
// slots of one snapshot with its window pages), and the disk (kv_store/), which reads and writes
// host slots only.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom::request {

// A copy on the worker's stream. Copies run in their order.
struct KvCopy {
  enum class Kind : uint8_t {
    kBlock,             // device block to device block
    kWindowPage,        // device page to device page
    kStateSlot,         // state slot to state slot, whole
    kSaveSnapshot,      // state slot -> device snapshot, at `position`
    kLoadSnapshot,      // device snapshot -> state slot, at `position`
    kBlockToHost,       // device block -> host block
    kBlockFromHost,     // host block -> device block
    kSnapshotToHost,    // device snapshot and its `pages` -> host snapshot
    kSnapshotFromHost,  // host snapshot -> state slot, at `position`, and `pages`
  };
  Kind kind = Kind::kBlock;
  int32_t from = 0;
  int32_t to = 0;
  int32_t position = 0;  // a multiple of 256: the tokens before it are what the snapshot holds
  std::vector<int32_t> pages = {};  // device window pages before `position`, oldest first
  bool operator==(const KvCopy&) const = default;
};

// The name of a block's or snapshot's content: a keyed hash over the tokens up to its end, the
// model, the layout and the salt.
struct KvHash {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const KvHash&) const = default;
};

// What the disk keeps: a block, or the snapshot at a block's end.
struct KvRecord {
  enum class Kind : uint8_t { kBlock, kSnapshot };
  Kind kind = Kind::kBlock;
  KvHash hash;
  KvHash parent = {};                   // of the block before; of the salt for the first
  int32_t num_tokens = 0;               // up to the end: a multiple of 256
  std::vector<int32_t> token_ids = {};  // of a block: its 256
  bool operator==(const KvRecord&) const = default;
};

// Asked of the disk. A read or write holds its host slot until it is answered.
struct KvStoreRequest {
  enum class Kind : uint8_t { kRead, kWrite, kDelete };
  Kind kind = Kind::kRead;
  KvRecord record = {};
  int32_t host_slot = -1;  // of the record's kind
  bool operator==(const KvStoreRequest&) const = default;
};

// A store's answer, or news. A data rank may have several stores, which get the same requests: each
// speaks for its ranks.
struct KvStoreEvent {
  enum class Kind : uint8_t {
    kRead,     // `ok`: the host slot has the bytes; else the record is gone
    kWrite,    // `ok`: the record can be read from now on
    kFound,    // a record of an earlier run; no host slot
    kIndexed,  // every record of earlier runs has been told
    kOff,      // the disk failed: nothing more is read or written; all requests get their answers
  };
  Kind kind = Kind::kRead;
  KvRecord record = {};
  int32_t host_slot = -1;
  int64_t file_bytes = 0;  // kWrite, kFound: on the disk
  bool ok = false;
  int32_t num_ranks = 1;  // that it is true of
};

struct KvTransfers {
  std::vector<KvCopy> copies;         // before the forward pass
  std::vector<KvStoreRequest> store;  // started when the copies are done
  // Nothing runs until the disk has answered: the worker waits a moment for it.
  bool wait_for_store = false;
  bool empty() const { return copies.empty() && store.empty() && !wait_for_store; }
};

}  // namespace fathom::request
