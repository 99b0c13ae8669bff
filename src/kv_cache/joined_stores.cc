#include "kv_cache/joined_stores.h"

#include <utility>

#include "base/check.h"

namespace fathom::kv_cache {

using request::KvStoreEvent;

std::vector<KvStoreEvent> JoinedStores::Join(std::span<const KvStoreEvent> events) {
  std::vector<KvStoreEvent> joined;
  for (const KvStoreEvent& event : events) {
    const auto record_kind = static_cast<size_t>(event.record.kind);
    switch (event.kind) {
      case KvStoreEvent::Kind::kRead:
      case KvStoreEvent::Kind::kWrite:
        Add(event, event.host_slot, answers_[record_kind], joined);
        break;
      case KvStoreEvent::Kind::kFound:
        Add(event, event.record.hash, found_[record_kind], joined);
        break;
      case KvStoreEvent::Kind::kIndexed:
        num_indexed_ += event.num_ranks;
        CHECK_LE(num_indexed_, num_ranks_);
        if (num_indexed_ == num_ranks_) joined.push_back(event);
        break;
      case KvStoreEvent::Kind::kOff:
        if (!std::exchange(off_, true)) joined.push_back(event);
        break;
    }
  }
  return joined;
}

template <typename Key, typename Hasher>
void JoinedStores::Add(const KvStoreEvent& event, const Key& key, Votes<Key, Hasher>& votes,
                       std::vector<KvStoreEvent>& joined) const {
  const auto [it, is_first] = votes.try_emplace(key, event);
  KvStoreEvent& all = it->second;
  if (!is_first) {
    if (!(all.record == event.record)) return;  // two records of one name: incomplete, both
    all.ok = all.ok && event.ok;
    all.file_bytes += event.file_bytes;
    all.num_ranks += event.num_ranks;
  }
  if (all.num_ranks < num_ranks_) return;
  joined.push_back(std::move(all));
  votes.erase(it);
}

std::vector<request::KvRecord> JoinedStores::TakeIncomplete() {
  std::vector<request::KvRecord> records;
  for (auto& found : found_) {
    for (auto& [hash, event] : found) records.push_back(std::move(event.record));
    found.clear();
  }
  return records;
}

}  // namespace fathom::kv_cache
