#include "api/prompt_history.h"

#include <algorithm>
#include <utility>

namespace fathom::api {
namespace {

constexpr size_t kEntryBytes = 128;  // besides its tokens

}  // namespace

void PromptHistory::Add(std::string scope, std::vector<int32_t> token_ids) {
  const TimePoint now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  bytes_ += kEntryBytes + token_ids.size() * sizeof(int32_t);
  entries_.push_back({std::move(scope), std::move(token_ids), now});
  while (bytes_ > max_bytes_) {
    bytes_ -= kEntryBytes + entries_.front().token_ids.size() * sizeof(int32_t);
    entries_.pop_front();
  }
}

std::optional<PromptHistory::Nearest> PromptHistory::Find(
    std::string_view scope, const std::vector<int32_t>& token_ids) const {
  const TimePoint now = std::chrono::steady_clock::now();
  std::optional<Nearest> nearest;
  const std::lock_guard lock(mutex_);
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (entry->scope != scope) continue;
    const auto parted = std::mismatch(token_ids.begin(), token_ids.end(), entry->token_ids.begin(),
                                      entry->token_ids.end());
    const auto num_common = static_cast<size_t>(parted.first - token_ids.begin());
    if (nearest && num_common <= nearest->num_common_tokens) continue;
    nearest = Nearest{.num_common_tokens = num_common,
                      .next_token = std::nullopt,
                      .age_seconds = Seconds(now - entry->time)};
    if (parted.second != entry->token_ids.end()) nearest->next_token = *parted.second;
  }
  return nearest;
}

}  // namespace fathom::api
