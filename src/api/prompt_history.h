// PromptHistory: the token ids of recent prompts and their answers, by caller, so that a request
// can be told where it parts from what was computed before. Bounded: the oldest go first. Any
// thread.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace fathom::api {

class PromptHistory {
 public:
  explicit PromptHistory(size_t max_bytes) : max_bytes_(max_bytes) {}

  void Add(std::string scope, std::vector<int32_t> token_ids);

  struct Nearest {
    size_t num_common_tokens = 0;
    std::optional<int32_t> next_token;  // of the earlier one, if it goes on
    double age_seconds = 0;
  };
  // The earlier prompt of that scope which begins most like this one. Nothing: there is none.
  std::optional<Nearest> Find(std::string_view scope, const std::vector<int32_t>& token_ids) const;

 private:
  struct Entry {
    std::string scope;
    std::vector<int32_t> token_ids;
    TimePoint time;
  };
  const size_t max_bytes_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;  // guarded, as is what follows
  size_t bytes_ = 0;
};

}  // namespace fathom::api
