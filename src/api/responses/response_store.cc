#include "api/responses/response_store.h"

#include <utility>

namespace fathom::api::responses {

using json::Value;

namespace {

// What a parsed value costs: its text, and the nodes that hold it.
size_t NumBytes(const Value& value) {
  size_t bytes = sizeof(Value);
  if (value.is_string()) bytes += value.AsString().size();
  if (value.is_array()) {
    for (const Value& item : value.items()) bytes += NumBytes(item);
  }
  if (value.is_object()) {
    for (const json::Member& member : value.members()) {
      bytes += sizeof(member.key) + member.key.size() + NumBytes(member.value);
    }
  }
  return bytes;
}

const Value* OutputOf(const StoredResponse& response) { return response.response.Find("output"); }

// Calls `visit(id, item)` for each item of a list that has an id.
template <typename Visit>
void ForEachItem(const Value* items, const Visit& visit) {
  if (items == nullptr || !items->is_array()) return;
  for (const Value& item : items->items()) {
    const Value* id = item.Find("id");
    if (id != nullptr && id->is_string()) visit(id->AsString(), item);
  }
}

}  // namespace

std::string ResponseStore::FullKey(std::string_view scope, std::string_view id) {
  std::string full(scope);
  full += '\0';
  return full += id;
}

void ResponseStore::Put(std::string_view scope, const std::string& id, StoredResponse response) {
  Entry entry;
  entry.key = FullKey(scope, id);
  const auto add = [&](const std::string& item_id, const Value&) {
    entry.item_keys.push_back(FullKey(scope, item_id));
    entry.num_bytes += 2 * (sizeof(std::string) + entry.item_keys.back().size());
  };
  ForEachItem(&response.input, add);
  ForEachItem(OutputOf(response), add);
  entry.num_bytes += 2 * entry.key.size() + NumBytes(response.input) + NumBytes(response.response);
  entry.response = std::make_shared<const StoredResponse>(std::move(response));
  if (entry.num_bytes > max_bytes_) return;
  const std::lock_guard lock(mutex_);
  if (const auto it = by_key_.find(entry.key); it != by_key_.end()) Drop(it->second);
  while (num_bytes_ + entry.num_bytes > max_bytes_) Drop(std::prev(entries_.end()));
  num_bytes_ += entry.num_bytes;
  entries_.push_front(std::move(entry));
  by_key_[entries_.front().key] = entries_.begin();
  for (const std::string& key : entries_.front().item_keys) by_item_[key] = entries_.begin();
}

std::shared_ptr<const StoredResponse> ResponseStore::Find(std::string_view scope,
                                                          std::string_view id) {
  const std::lock_guard lock(mutex_);
  const auto it = by_key_.find(FullKey(scope, id));
  if (it == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, it->second);
  return it->second->response;
}

Value ResponseStore::FindItem(std::string_view scope, std::string_view item_id) {
  std::shared_ptr<const StoredResponse> response;
  {
    const std::lock_guard lock(mutex_);
    const auto it = by_item_.find(FullKey(scope, item_id));
    if (it == by_item_.end()) return Value();
    entries_.splice(entries_.begin(), entries_, it->second);
    response = it->second->response;
  }
  Value found;
  const auto take = [&](const std::string& id, const Value& item) {
    if (id == item_id) found = item;
  };
  ForEachItem(&response->input, take);
  ForEachItem(OutputOf(*response), take);
  return found;
}

bool ResponseStore::Delete(std::string_view scope, std::string_view id) {
  const std::lock_guard lock(mutex_);
  const auto it = by_key_.find(FullKey(scope, id));
  if (it == by_key_.end()) return false;
  Drop(it->second);
  return true;
}

void ResponseStore::Drop(Entries::iterator entry) {
  by_key_.erase(entry->key);
  for (const std::string& key : entry->item_keys) {
    const auto it = by_item_.find(key);
    if (it != by_item_.end() && it->second == entry) by_item_.erase(it);
  }
  num_bytes_ -= entry->num_bytes;
  entries_.erase(entry);
}

}  // namespace fathom::api::responses
