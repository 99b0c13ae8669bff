#include "kv_cache/lower_tiers.h"

#include <utility>

#include "base/check.h"

namespace fathom::kv_cache {

using request::KvCopy;
using request::KvRecord;
using request::KvStoreEvent;
using request::KvStoreRequest;

LowerTiers::LowerTiers(const LowerTiersOptions& options, PrefixTree& tree, uint64_t session_credit)
    : options_(options),
      session_credit_(session_credit),
      tree_(tree),
      host_{IdPool(options.num_host_slots[0]), IdPool(options.num_host_slots[1])},
      stores_(options.num_disk_ranks),
      disk_on_(options.disk_bytes > 0),
      indexing_(disk_on_) {
  // The disk reads and writes host memory.
  CHECK(!disk_on_ || (host_[0].capacity() > 0 && host_[1].capacity() > 0));
}

void LowerTiers::WriteThrough(PrefixNode& node, PartKind kind, uint64_t session,
                              std::vector<KvCopy>& copies) {
  KeptPart& part = node.part(kind);
  CHECK(part.on_device());
  if (part.host_slot >= 0 || !MakeHostRoom(kind, session)) return;
  part.host_slot = host(kind).Allocate();
  copies.push_back({.kind = kind == PartKind::kBlock ? KvCopy::Kind::kBlockToHost
                                                     : KvCopy::Kind::kSnapshotToHost,
                    .from = part.device_id,
                    .to = part.host_slot,
                    .position = static_cast<int32_t>(node.num_tokens),
                    .pages = part.pages});
  stats_.host_bytes_written += static_cast<uint64_t>(options_.record_bytes[size_t(kind)]);
  PutInHostQueue(node, kind);
  if (!disk_on_ || part.on_disk) return;
  // A disk that cannot keep up loses the oldest.
  const auto most = static_cast<size_t>(host_[0].capacity() + host_[1].capacity());
  if (waiting_writes_.size() >= most) waiting_writes_.pop_front();
  waiting_writes_.push_back({node.hash, kind});
}

bool LowerTiers::MakeHostRoom(PartKind kind, uint64_t session) {
  if (host(kind).num_free() > 0) return true;
  PrefixNode* oldest = host_queue_[size_t(kind)].First(session);
  if (oldest == nullptr) return false;
  DropHostSlot(*oldest, kind);
  ++stats_.num_evicted_host[size_t(kind)];
  tree_.Prune(oldest);
  return true;
}

void LowerTiers::PutInHostQueue(PrefixNode& node, PartKind kind) {
  KeptPart& part = node.part(kind);
  if (part.reading || part.writing) return;
  host_queue_[size_t(kind)].Put(node, part.host_place, EvictionGroup(node),
                                MakeEvictionKey(node, kind, session_credit_));
}

void LowerTiers::PutInDiskQueue(PrefixNode& node, PartKind kind) {
  disk_queue_[size_t(kind)].Put(node, node.part(kind).disk_place, EvictionGroup(node),
                                MakeEvictionKey(node, kind, session_credit_));
}

void LowerTiers::Requeue(PrefixNode& node, PartKind kind) {
  if (node.part(kind).host_slot >= 0) PutInHostQueue(node, kind);
  if (node.part(kind).on_disk) PutInDiskQueue(node, kind);
}

void LowerTiers::DropHostSlot(PrefixNode& node, PartKind kind) {
  KeptPart& part = node.part(kind);
  host_queue_[size_t(kind)].Remove(part.host_place);
  host(kind).Release(std::exchange(part.host_slot, -1));
}

bool LowerTiers::HasRoomFor(PartKind kind, int64_t num) const {
  return num <=
         host_[size_t(kind)].num_free() + static_cast<int64_t>(host_queue_[size_t(kind)].size());
}

void LowerTiers::StartRead(PrefixNode& node, PartKind kind, uint64_t session) {
  KeptPart& part = node.part(kind);
  if (part.host_slot >= 0 || !part.on_disk || !MakeHostRoom(kind, session)) return;
  part.host_slot = host(kind).Allocate();
  part.reading = true;
  ++num_reads_;
  requests_.push_back({KvStoreRequest::Kind::kRead, MakeRecord(node, kind), part.host_slot});
}

KvRecord LowerTiers::MakeRecord(const PrefixNode& node, PartKind kind) {
  KvRecord record{
      .kind = kind, .hash = node.hash, .num_tokens = static_cast<int32_t>(node.num_tokens)};
  if (kind == PartKind::kBlock) {
    record.parent = node.parent->hash;
    record.token_ids = node.token_ids;
  }
  return record;
}

void LowerTiers::StartWrites() {
  while (CanWrite()) {
    const WaitingWrite next = waiting_writes_.front();
    waiting_writes_.pop_front();
    PrefixNode* node = tree_.FindHash(next.hash);
    if (node == nullptr) continue;
    KeptPart& part = node->part(next.kind);
    if (!part.in_host() || part.on_disk || part.writing) continue;
    part.writing = true;
    host_queue_[size_t(next.kind)].Remove(part.host_place);
    ++num_writes_;
    requests_.push_back(
        {KvStoreRequest::Kind::kWrite, MakeRecord(*node, next.kind), part.host_slot});
  }
}

void LowerTiers::TakeRequests(std::vector<KvStoreRequest>& out) {
  StartWrites();
  out.insert(out.end(), requests_.begin(), requests_.end());
  requests_.clear();
}

void LowerTiers::OnEvents(std::span<const KvStoreEvent> events, uint64_t time,
                          std::vector<KvCopy>& copies) {
  for (const KvStoreEvent& event : stores_.Join(events)) {
    switch (event.kind) {
      case KvStoreEvent::Kind::kRead:
        OnRead(event, copies);
        break;
      case KvStoreEvent::Kind::kWrite:
        OnWrite(event);
        break;
      case KvStoreEvent::Kind::kFound:
        OnFound(event, time);
        break;
      case KvStoreEvent::Kind::kIndexed:
        OnIndexed();
        break;
      case KvStoreEvent::Kind::kOff:
        TurnDiskOff(copies);
        break;
    }
  }
  KeepDiskBudget();
}

void LowerTiers::OnRead(const KvStoreEvent& event, std::vector<KvCopy>& copies) {
  --num_reads_;
  PrefixNode* node = tree_.FindHash(event.record.hash);
  CHECK(node != nullptr);  // its host slot keeps it
  KeptPart& part = node->part(event.record.kind);
  CHECK(part.reading && part.host_slot == event.host_slot);
  part.reading = false;
  if (part.forget) return ForgetAfterClear(*node, event.record.kind);
  if (event.ok) {
    PutInHostQueue(*node, event.record.kind);
    return;
  }
  ++stats_.num_lost_disk;
  DropHostSlot(*node, event.record.kind);
  ForgetOnDisk(*node, event.record.kind);
  DeleteOnDisk(event.record);  // what other ranks have of it
  // It was computed meanwhile: a part that is being read is not written.
  if (part.on_device()) WriteThrough(*node, event.record.kind, kNoSession, copies);
  tree_.Prune(node);
}

void LowerTiers::OnWrite(const KvStoreEvent& event) {
  --num_writes_;
  PrefixNode* node = tree_.FindHash(event.record.hash);
  CHECK(node != nullptr);
  KeptPart& part = node->part(event.record.kind);
  CHECK(part.writing && part.host_slot == event.host_slot);
  part.writing = false;
  if (part.forget) return ForgetAfterClear(*node, event.record.kind);
  PutInHostQueue(*node, event.record.kind);
  if (!event.ok || !disk_on_) return;
  part.on_disk = true;
  part.file_bytes = event.file_bytes;
  disk_bytes_used_ += event.file_bytes;
  stats_.disk_bytes_written += static_cast<uint64_t>(event.file_bytes);
  PutInDiskQueue(*node, event.record.kind);
}

void LowerTiers::OnFound(const KvStoreEvent& event, uint64_t time) {
  if (!disk_on_) return;
  if (forget_found_) return DeleteOnDisk(event.record);
  PrefixNode* node = tree_.AddFound(event.record);
  if (node == nullptr || node->part(event.record.kind).on_disk) return;
  KeptPart& part = node->part(event.record.kind);
  if (part.last_use == 0) part.last_use = time;
  part.on_disk = true;
  part.file_bytes = event.file_bytes;
  disk_bytes_used_ += event.file_bytes;
  PutInDiskQueue(*node, event.record.kind);
}

void LowerTiers::OnIndexed() {
  indexing_ = false;
  for (KvRecord& record : stores_.TakeIncomplete()) DeleteOnDisk(std::move(record));
}

void LowerTiers::DeleteOnDisk(KvRecord record) {
  if (disk_on_) requests_.push_back({KvStoreRequest::Kind::kDelete, std::move(record), -1});
}

void LowerTiers::ForgetOnDisk(PrefixNode& node, PartKind kind) {
  KeptPart& part = node.part(kind);
  if (!part.on_disk) return;
  part.on_disk = false;
  disk_bytes_used_ -= std::exchange(part.file_bytes, 0);
  disk_queue_[size_t(kind)].Remove(part.disk_place);
}

void LowerTiers::ForgetAfterClear(PrefixNode& node, PartKind kind) {
  node.part(kind).forget = false;
  DropHostSlot(node, kind);
  DeleteOnDisk(MakeRecord(node, kind));
  tree_.Prune(&node);
}

// The older of the oldest block and the oldest snapshot goes.
void LowerTiers::KeepDiskBudget() {
  while (disk_bytes_used_ > options_.disk_bytes) {
    PrefixNode* block = disk_queue_[0].First(kNoSession);
    PrefixNode* snapshot = disk_queue_[1].First(kNoSession);
    if (block == nullptr && snapshot == nullptr) return;
    const bool take_block =
        snapshot == nullptr ||
        (block != nullptr && block->block().disk_place.key < snapshot->snapshot().disk_place.key);
    PrefixNode* node = take_block ? block : snapshot;
    const PartKind kind = take_block ? PartKind::kBlock : PartKind::kSnapshot;
    DeleteOnDisk(MakeRecord(*node, kind));
    ForgetOnDisk(*node, kind);
    ++stats_.num_evicted_disk;
    tree_.Prune(node);
  }
}

void LowerTiers::TurnDiskOff(std::vector<KvCopy>& copies) {
  disk_on_ = indexing_ = false;
  waiting_writes_.clear();
  for (const KvStoreRequest& r : std::exchange(requests_, {})) {
    KvStoreEvent failed{.record = r.record, .host_slot = r.host_slot};
    if (r.kind == KvStoreRequest::Kind::kRead) OnRead(failed, copies);
    if (r.kind == KvStoreRequest::Kind::kWrite) OnWrite(failed);
  }
  for (PrefixNode* node : tree_.Nodes()) {
    for (const PartKind kind : kPartKinds) ForgetOnDisk(*node, kind);
  }
  tree_.PruneAll();
}

void LowerTiers::Clear() {
  waiting_writes_.clear();
  forget_found_ = indexing_;
  for (PrefixNode* node : tree_.Nodes()) {
    for (KeptPart& part : node->parts) part.forget = part.reading || part.writing;
  }
  for (const PartKind kind : kPartKinds) {
    while (PrefixNode* node = host_queue_[size_t(kind)].First(kNoSession)) {
      DropHostSlot(*node, kind);
      tree_.Prune(node);
    }
    while (PrefixNode* node = disk_queue_[size_t(kind)].First(kNoSession)) {
      if (!node->part(kind).forget) DeleteOnDisk(MakeRecord(*node, kind));
      ForgetOnDisk(*node, kind);
      tree_.Prune(node);
    }
  }
}

}  // namespace fathom::kv_cache
