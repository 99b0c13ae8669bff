// ResponseStore: responses that later requests may build on (previous_response_id), name parts of
// (item_reference), fetch and delete. Kept in memory only, each within its caller's scope, bounded
// in bytes; the least recently used goes first. Any thread.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json/json.h"

namespace fathom::api::responses {

struct StoredResponse {
  std::string previous_id;  // empty: none
  json::Value input;        // the items that this request added
  json::Value response;     // the object that was answered; its `output` are items, too
};

class ResponseStore {
 public:
  explicit ResponseStore(size_t max_bytes) : max_bytes_(max_bytes) {}

  void Put(std::string_view scope, const std::string& id, StoredResponse response);
  // Null: never known, deleted or forgotten.
  std::shared_ptr<const StoredResponse> Find(std::string_view scope, std::string_view id);
  // An input or output item by its own id; null as above.
  json::Value FindItem(std::string_view scope, std::string_view item_id);
  bool Delete(std::string_view scope, std::string_view id);

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const StoredResponse> response;
    std::vector<std::string> item_keys;
    size_t num_bytes = 0;
  };
  using Entries = std::list<Entry>;
  static std::string FullKey(std::string_view scope, std::string_view id);
  void Drop(Entries::iterator entry);

  const size_t max_bytes_;
  std::mutex mutex_;  // guards the rest
  Entries entries_;   // most recently used first
  std::unordered_map<std::string, Entries::iterator> by_key_;
  std::unordered_map<std::string, Entries::iterator> by_item_;
  size_t num_bytes_ = 0;
};

}  // namespace fathom::api::responses
