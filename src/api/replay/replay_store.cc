#include "api/replay/replay_store.h"

#include <utility>

namespace fathom::api {
namespace {

// What maps, lists and the record's own members cost besides the bytes that are counted.
constexpr size_t kEntryOverhead = 512;

size_t NumBytes(const ReplayRecord& record, const std::vector<std::string>& keys) {
  size_t bytes = kEntryOverhead + record.turn.token_ids.size() * sizeof(int32_t) +
                 record.message.reasoning.size() + record.message.content.size();
  for (const text::OutputMessage::ToolCall& call : record.message.tool_calls) {
    bytes += sizeof(call) + call.name.size() + call.arguments.size();
  }
  for (const std::string& key : keys) bytes += 2 * (sizeof(key) + key.size());
  return bytes;
}

}  // namespace

std::string ReplayStore::FullKey(std::string_view scope, std::string_view key) {
  std::string full(scope);
  full += '\0';
  return full += key;
}

void ReplayStore::Put(std::string_view scope, const std::vector<std::string>& keys,
                      ReplayRecord record) {
  Entry entry;
  for (const std::string& key : keys) entry.keys.push_back(FullKey(scope, key));
  entry.num_bytes = NumBytes(record, entry.keys);
  entry.record = std::make_shared<const ReplayRecord>(std::move(record));
  if (entry.keys.empty() || entry.num_bytes > max_bytes_) return;
  const std::lock_guard lock(mutex_);
  for (const std::string& key : entry.keys) {
    if (const auto it = by_key_.find(key); it != by_key_.end()) Drop(it->second);
  }
  while (num_bytes_ + entry.num_bytes > max_bytes_) Drop(std::prev(entries_.end()));
  num_bytes_ += entry.num_bytes;
  entries_.push_front(std::move(entry));
  for (const std::string& key : entries_.front().keys) by_key_[key] = entries_.begin();
}

std::shared_ptr<const ReplayRecord> ReplayStore::Find(std::string_view scope,
                                                      std::string_view key) {
  const std::lock_guard lock(mutex_);
  const auto it = by_key_.find(FullKey(scope, key));
  if (it == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, it->second);
  return it->second->record;
}

size_t ReplayStore::num_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_bytes_;
}

void ReplayStore::Drop(std::list<Entry>::iterator entry) {
  for (const std::string& key : entry->keys) by_key_.erase(key);
  num_bytes_ -= entry->num_bytes;
  entries_.erase(entry);
}

}  // namespace fathom::api
