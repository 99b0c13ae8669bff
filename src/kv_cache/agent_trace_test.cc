// An agent's traffic as it was recorded, in shape: three sessions of forty turns that grow to 150K
// tokens each. They share a system prompt; every turn has a header (date, reminders) that the next
// turn replaces; tool results extend a turn exactly; side requests (titles, summaries) come
// between. Of what any earlier request computed, 98% is found again. Metadata only.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>

#include "kv_cache/prefix_cache.h"
#include "kv_cache/testing/simulated_memory.h"

namespace fathom::kv_cache {
namespace {

using Tokens = std::vector<int32_t>;
constexpr int32_t kTurn = 7;  // begins a user's turn

int64_t CommonLength(const Tokens& a, const Tokens& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

class AgentTrace : public testing::Test {
 protected:
  static PrefixCacheOptions Options() {
    return {.pools = {.num_blocks = 1200,
                      .num_window_pages = 600,
                      .num_state_slots = 8,
                      .num_snapshots = 150},
            .turn_token_id = kTurn,
            .num_host_blocks = 2500,
            .num_host_snapshots = 400,
            .disk_bytes = int64_t{1} << 40,
            .block_bytes = 100,
            .snapshot_bytes = 100};
  }

  Tokens Text(int count) {
    Tokens text(static_cast<size_t>(count));
    for (int32_t& t : text) t = 100 + static_cast<int32_t>(random_() % 120000);
    return text;
  }
  int Between(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<uint32_t>(high - low + 1));
  }
  static void Append(Tokens& to, const Tokens& more) {
    to.insert(to.end(), more.begin(), more.end());
  }

  void RunTransfers() {
    memory_->Run(cache_->TakeTransfers(true));
    cache_->OnStoreEvents(memory_->TakeEvents());
  }
  void Settle() {
    while (cache_->HasWork()) RunTransfers();
  }
  void Start(bool restart) {
    if (restart) {
      Settle();
      memory_->Restart();
    } else {
      memory_ = std::make_unique<SimulatedMemory>(Options());
    }
    cache_ = std::make_unique<PrefixCache>(Options());
    RunTransfers();
  }

  void RunTo(SequenceKv& kv, const Tokens& tokens, int64_t& computed, int64_t end, int64_t chunk) {
    while (computed < end) {
      int64_t n = cache_->NumRunnable(kv, computed, std::min(chunk, end - computed));
      n = cache_->ClipChunk(kv, computed, n);
      ASSERT_GT(n, 0);
      cache_->Extend(kv, computed, n);
      RunTransfers();
      computed += n;
      cache_->OnComputed(kv, tokens, computed);
    }
  }

  // Runs a request and counts what it could and did reuse. Returns the answer.
  Tokens Ask(const std::string& session, const Tokens& prompt, int answer_length) {
    SequenceKv kv;
    Admission admission;
    do {
      admission = cache_->Admit({.id = ++next_id_,
                                 .session = session,
                                 .token_ids = prompt,
                                 .num_prompt_tokens = static_cast<int64_t>(prompt.size()),
                                 .num_tokens = static_cast<int64_t>(prompt.size()) + 1},
                                kv);
      RunTransfers();
    } while (admission.outcome == Admission::Outcome::kWait);
    EXPECT_EQ(admission.outcome, Admission::Outcome::kAdmitted);
    Count(session, prompt, admission.num_cached_tokens);
    int64_t computed = admission.num_cached_tokens;
    Tokens tokens = prompt;
    RunTo(kv, tokens, computed, static_cast<int64_t>(prompt.size()), 8192);
    const Tokens answer = Text(answer_length);
    Append(tokens, answer);
    // Token by token would see the same boundaries.
    while (computed + 1 < static_cast<int64_t>(tokens.size())) {
      const int64_t next = (computed / kBlockTokens + 1) * kBlockTokens;
      RunTo(kv, tokens, computed, std::min<int64_t>(next, static_cast<int64_t>(tokens.size()) - 1),
            kBlockTokens);
    }
    cache_->Release(kv, tokens, computed);
    tokens.resize(static_cast<size_t>(computed));
    last_[session] = tokens;
    earlier_.push_back(std::move(tokens));
    return answer;
  }

  // Reusable: the longest common prefix with any earlier request, in whole blocks; to the token
  // where it goes on from the end of its session's last one.
  void Count(const std::string& session, const Tokens& prompt, int64_t cached) {
    int64_t reusable = 0;
    for (const Tokens& tokens : earlier_) {
      reusable = std::max(reusable, CommonLength(prompt, tokens) / kBlockTokens * kBlockTokens);
    }
    const Tokens& last = last_[session];
    const bool goes_on = !restarted_ && !last.empty() && last.size() < prompt.size() &&
                         CommonLength(prompt, last) == static_cast<int64_t>(last.size());
    if (goes_on) reusable = std::max(reusable, static_cast<int64_t>(last.size()));
    reusable = std::min(reusable, static_cast<int64_t>(prompt.size()) - 1);
    num_reusable_ += reusable;
    num_reused_ += std::min(cached, reusable);
    num_tokens_ += static_cast<int64_t>(prompt.size());
  }

  struct Session {
    std::string name;
    Tokens history;  // without the headers
  };

  void RunTurn(Session& session) {
    Tokens turn = {kTurn};
    Tokens message = Text(Between(100, 500));
    // The header is at the beginning of the turn, and another one next time.
    Tokens prompt = session.history;
    Append(prompt, turn);
    Append(prompt, Text(60));
    Append(prompt, message);
    const Tokens call = Ask(session.name, prompt, Between(150, 500));
    Tokens result = Text(Between(1500, 4200));
    Append(prompt, call);
    Append(prompt, result);
    const Tokens answer = Ask(session.name, prompt, Between(200, 700));
    Append(session.history, turn);
    Append(session.history, message);
    Append(session.history, call);
    Append(session.history, result);
    Append(session.history, answer);
  }

  void RunTurns(int from, int to) {
    for (int turn = from; turn < to; ++turn) {
      for (Session& session : sessions_) {
        RunTurn(session);
        if (turn % 3 == 0) {  // a title, a summary
          Tokens side = side_system_;
          Append(side, {kTurn});
          Append(side, Text(Between(300, 750)));
          Ask(session.name, side, 30);
        }
      }
    }
  }

  void MakeSessions() {
    const Tokens system = Text(12000);
    side_system_ = Text(400);
    for (const char* name : {"a", "b", "c"}) sessions_.push_back({name, system});
  }

  double share() const {
    return static_cast<double>(num_reused_) / static_cast<double>(num_reusable_);
  }

  std::mt19937 random_{4};
  std::unique_ptr<SimulatedMemory> memory_;
  std::unique_ptr<PrefixCache> cache_;
  std::vector<Session> sessions_;
  Tokens side_system_;
  std::vector<Tokens> earlier_;
  std::map<std::string, Tokens> last_;
  bool restarted_ = false;
  request::RequestId next_id_ = 0;
  int64_t num_tokens_ = 0, num_reusable_ = 0, num_reused_ = 0;
};

TEST_F(AgentTrace, FindsNearlyAllThatCanBeFound) {
  Start(false);
  MakeSessions();
  RunTurns(0, 40);
  for (const Session& session : sessions_) EXPECT_GT(session.history.size(), 140000u);
  RecordProperty("reused_permille", static_cast<int>(share() * 1000));
  EXPECT_GE(share(), 0.98) << num_reused_ << " of " << num_reusable_;
  RecordProperty("reused_of_all_permille", static_cast<int>(num_reused_ * 1000 / num_tokens_));
  EXPECT_GT(num_reusable_, num_tokens_ * 9 / 10);
  const PrefixCacheStats stats = cache_->stats();
  EXPECT_GT(stats.host_hit_tokens + stats.disk_hit_tokens, 0u);  // the device does not hold it all
  EXPECT_GT(stats.evicted_device_blocks, 0u);
}

TEST_F(AgentTrace, FindsItAgainAfterARestart) {
  Start(false);
  MakeSessions();
  RunTurns(0, 20);
  Start(true);
  num_tokens_ = num_reusable_ = num_reused_ = 0;
  restarted_ = true;  // tails live as long as the device's memory
  RunTurns(20, 21);
  restarted_ = false;
  EXPECT_GT(cache_->stats().disk_hit_tokens, 100000u);
  EXPECT_GE(share(), 0.98) << num_reused_ << " of " << num_reusable_;
  RunTurns(21, 40);
  EXPECT_GE(share(), 0.98) << num_reused_ << " of " << num_reusable_;
}

}  // namespace
}  // namespace fathom::kv_cache
