// RememberingRuntime: a runtime without a model. It marks every entry of the cache with the tokens
// that it stands for, so that a batch which reads anything but its own past is found out (a gtest
// failure). What a sequence samples depends on its tokens alone.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <vector>

#include "request/scheduled_batch.h"
#include "scheduler/scheduler.h"

namespace fathom::scheduler {

class RememberingRuntime {
 public:
  static constexpr int kWindow = 128;

  explicit RememberingRuntime(const SchedulerOptions& options)
      : options_(options),
        blocks_(static_cast<size_t>(options.pools.num_blocks) * kv_cache::kBlockTokens),
        pages_(static_cast<size_t>(options.pools.num_window_pages) * kv_cache::kWindowPageTokens),
        states_(static_cast<size_t>(options.pools.num_state_slots)) {}

  request::StepResult Run(const request::ScheduledBatch& batch) {
    CheckBatch(batch);
    request::StepResult result;
    result.step = batch.step;
    for (const auto& s : batch.sequences) {
      const Tokens tokens = Hash(s);
      Write(s, tokens);
      CheckReadable(s, tokens);
      request::SequenceResult r;
      r.request_id = s.request_id;
      if (s.sample) r.sampled_token_ids = {NextToken(tokens, options_.vocab_size)};
      result.sequences.push_back(std::move(r));
    }
    return result;
  }

 private:
  // [i]: a hash of the first i + 1 tokens: what an entry at position i stands for.
  using Tokens = const std::vector<uint64_t>&;

  static int32_t NextToken(Tokens tokens, int vocab_size) {
    return static_cast<int32_t>((tokens.back() >> 33) % static_cast<uint64_t>(vocab_size));
  }

  Tokens Hash(const request::ScheduledSequence& s) {
    std::vector<uint64_t>& hashes = hashes_[s.request_id];
    uint64_t hash = hashes.empty() ? 0x9e3779b97f4a7c15u : hashes.back();
    for (size_t i = hashes.size(); i < s.all_token_ids.size(); ++i) {
      hash = (hash ^ static_cast<uint64_t>(s.all_token_ids[i] + 1)) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 29;
      hashes.push_back(hash);
    }
    return hashes;
  }

  void CheckBatch(const request::ScheduledBatch& batch) {
    ASSERT_LE(batch.num_tokens(), options_.max_num_batched_tokens);
    ASSERT_LE(static_cast<int>(batch.sequences.size()), options_.max_num_seqs);
    std::set<int32_t> slots;
    for (const auto& s : batch.sequences) {
      ASSERT_FALSE(s.token_ids.empty());
      const auto end = static_cast<size_t>(s.num_computed_tokens) + s.token_ids.size();
      ASSERT_LE(end, s.all_token_ids.size());
      ASSERT_EQ(s.token_ids.data(), s.all_token_ids.data() + s.num_computed_tokens);
      ASSERT_EQ(s.sample, end == s.all_token_ids.size());
      ASSERT_TRUE(slots.insert(s.block_table.state_slot).second);
    }
  }

  uint64_t& Entry(const request::ScheduledSequence& s, int64_t position) {
    const auto block =
        s.block_table.blocks.at(static_cast<size_t>(position / kv_cache::kBlockTokens));
    return blocks_.at(
        static_cast<size_t>(block * kv_cache::kBlockTokens + position % kv_cache::kBlockTokens));
  }
  uint64_t& WindowEntry(const request::ScheduledSequence& s, int64_t position) {
    const int64_t i = position / kv_cache::kWindowPageTokens - s.block_table.first_window_page;
    const auto page = s.block_table.window_pages.at(static_cast<size_t>(i));
    return pages_.at(static_cast<size_t>(page * kv_cache::kWindowPageTokens +
                                         position % kv_cache::kWindowPageTokens));
  }

  void Write(const request::ScheduledSequence& s, Tokens tokens) {
    const auto begin = static_cast<size_t>(s.num_computed_tokens);
    uint64_t& state = states_.at(static_cast<size_t>(s.block_table.state_slot));
    ASSERT_TRUE(begin == 0 || state == tokens[begin - 1]) << "not this sequence's state";
    for (size_t i = begin; i < begin + s.token_ids.size(); ++i) {
      const auto position = static_cast<int64_t>(i);
      Entry(s, position) = tokens[i];
      WindowEntry(s, position) = tokens[i];
      state = tokens[i];
    }
  }

  // An entry's hash stands for every token before it, too: a few places show the rest.
  void CheckReadable(const request::ScheduledSequence& s, Tokens tokens) {
    const auto end = s.num_computed_tokens + static_cast<int64_t>(s.token_ids.size());
    for (int64_t i = 0; i < end; i += kv_cache::kBlockTokens) {
      const int64_t last = std::min(end, i + kv_cache::kBlockTokens) - 1;
      ASSERT_EQ(Entry(s, i), tokens[static_cast<size_t>(i)]);
      ASSERT_EQ(Entry(s, last), tokens[static_cast<size_t>(last)]);
    }
    const int64_t reach = std::max<int64_t>(0, s.num_computed_tokens - (kWindow - 1));
    for (int64_t i = reach; i < end; i = (i / 8 + 1) * 8) {
      ASSERT_EQ(WindowEntry(s, i), tokens[static_cast<size_t>(i)]);
    }
  }

  const SchedulerOptions options_;
  std::vector<uint64_t> blocks_, pages_, states_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> hashes_;  // by request
};

}  // namespace fathom::scheduler
