// ReplayStore: what the model sampled for recent answers, by what clients send back of them:
// tool-call ids, ids of responses and their items, ids in signatures. Each belongs to a scope (an
// API key and a cache salt), and nothing of another scope is ever found. Bounded in bytes; the
// least recently used goes first. Any thread.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/sampled_turn.h"
#include "text/tool_call_parser.h"

namespace fathom::api {

struct ReplayRecord {
  text::SampledTurn turn;
  text::OutputMessage message;  // the same turn as its client was shown it
};

class ReplayStore {
 public:
  explicit ReplayStore(size_t max_bytes) : max_bytes_(max_bytes) {}

  // Remembers `record` under every key. One that is larger than the store is not kept.
  void Put(std::string_view scope, const std::vector<std::string>& keys, ReplayRecord record);
  // Null: never known, or forgotten.
  std::shared_ptr<const ReplayRecord> Find(std::string_view scope, std::string_view key);

  size_t num_bytes() const;

 private:
  struct Entry {
    std::shared_ptr<const ReplayRecord> record;
    std::vector<std::string> keys;
    size_t num_bytes = 0;
  };
  static std::string FullKey(std::string_view scope, std::string_view key);
  void Drop(std::list<Entry>::iterator entry);

  const size_t max_bytes_;
  mutable std::mutex mutex_;  // guards the rest
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
  size_t num_bytes_ = 0;
};

}  // namespace fathom::api
