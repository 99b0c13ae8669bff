// A prefix from the cache gives the bits that computing it gives: the real model and the real
// copies, for every prompt length, from every tier, after preemptions and rollbacks.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "model/testing.h"
#include "runtime/testing/prefix_harness.h"

namespace fathom::runtime {
namespace {

using config::Numerics;
using kv_cache::PrefixCacheOptions;
using Sequence = PrefixHarness::Sequence;

constexpr int kMaxLength = 1100;
constexpr int kMaxChunk = 400;

// As small as a config with all layer kinds gets.
config::ModelConfig TinyConfig() {
  config::ModelConfig c = model::SmallConfig();
  c.vocab_size = 128;
  c.hidden_size = 128;
  c.num_layers = 3;
  c.compress_ratios = {0, 4, 128};
  c.num_heads = 2;
  c.head_dim = 128;
  c.index_num_heads = 2;
  c.index_head_dim = 64;
  c.num_experts = 4;
  c.num_experts_per_token = 2;
  c.num_hash_layers = 1;
  return c;
}

class PrefixExactnessTest : public testing::TestWithParam<Numerics> {
 protected:
  void SetUp() override {
    const config::ModelConfig config = TinyConfig();
    const auto source = checkpoint::MakeSyntheticSource(config, 3);
    auto model =
        LoadHarnessModel(config, GetParam(), source.get(), device::MakeCpuDevice(1), kMaxChunk,
                         /*max_model_len=*/2048);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *std::move(model);
    harness_ = std::make_unique<PrefixHarness>(*model_);
    tokens_ = model::RandomTokens(config, kMaxLength, 5);
    PrefixCacheOptions plain = Options();
    plain.enabled = false;
    Restart(plain);
    Sequence whole{.token_ids = tokens_};
    Admit(whole);
    harness_->RunToEnd(whole, kMaxChunk, &expected_);
    Release(whole);
    Restart(Options());
  }

  PrefixCacheOptions Options() const { return harness_->Options(); }
  void Restart(const PrefixCacheOptions& options) { harness_->Restart(options); }
  void Admit(Sequence& s) { harness_->Admit(s); }
  void RunChunk(Sequence& s, int64_t most) { harness_->RunChunk(s, most, nullptr); }
  void Release(Sequence& s) { harness_->Release(s); }

  // Runs what is left and compares every row with the run that had no cache.
  void RunAndCompare(Sequence& s, int64_t chunk = kMaxChunk) {
    const int64_t first = s.num_computed;
    LogitsRows rows;
    harness_->RunToEnd(s, chunk, &rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(rows[i], expected_[static_cast<size_t>(first) + i])
          << "token " << first + static_cast<int64_t>(i) << " of " << s.token_ids.size()
          << ", cached " << s.num_cached;
    }
  }

  // Runs a prompt from end to end; returns what it found.
  int64_t Ask(std::vector<int32_t> prompt, bool compare, int64_t chunk = kMaxChunk) {
    Sequence s{.token_ids = std::move(prompt)};
    Admit(s);
    if (compare) {
      RunAndCompare(s, chunk);
    } else {
      harness_->RunToEnd(s, chunk, nullptr);
    }
    Release(s);
    return s.num_cached;
  }
  std::vector<int32_t> Prompt(int64_t length) const {
    return {tokens_.begin(), tokens_.begin() + length};
  }
  // Something else, so that there is no tail that `tokens_` could go on from.
  std::vector<int32_t> PromptThenOther(int64_t length) {
    std::vector<int32_t> prompt = Prompt(length);
    for (int i = 0; i < 20; ++i) prompt.push_back(Other());
    return prompt;
  }
  std::vector<int32_t> OtherPrompt() const { return {(tokens_[0] + 1) % 128}; }
  // Every length with official numerics; fewer with the other, where the cache is no different.
  int Stride() const { return GetParam() == Numerics::kFp32 ? 13 : 1; }
  int32_t Other() { return static_cast<int32_t>(random_() % 128); }

  std::unique_ptr<HarnessModel> model_;
  std::unique_ptr<PrefixHarness> harness_;
  std::vector<int32_t> tokens_;
  LogitsRows expected_;  // [kMaxLength], without a cache
  std::mt19937 random_{9};
};

TEST_P(PrefixExactnessTest, EveryPromptLengthAfterTheLongestPrefixOfBlocks) {
  PrefixCacheOptions options = Options();
  options.pools.num_state_slots = 1;
  Restart(options);
  Ask(PromptThenOther(1024), false);
  for (int length = 1; length <= kMaxLength && !HasFatalFailure(); length += Stride()) {
    ASSERT_EQ(Ask(Prompt(length), true), (length - 1) / 256 * 256);
    Ask(OtherPrompt(), false);  // takes the state slot, and so the tail
  }
}

TEST_P(PrefixExactnessTest, EveryBlockBoundaryAndEveryLengthAfterIt) {
  for (int64_t boundary = 256; boundary <= 1024; boundary += 256) {
    for (const int64_t chunk : {1, 37, 400}) {
      Restart(Options());
      Ask(PromptThenOther(boundary), false);
      EXPECT_EQ(Ask(Prompt(kMaxLength), true, chunk), boundary);
    }
  }
}

TEST_P(PrefixExactnessTest, EveryPromptLengthAfterARandomPointOfALiveSession) {
  Ask(PromptThenOther(1024), false);
  for (int length = 2; length <= kMaxLength && !HasFatalFailure(); length += Stride()) {
    const int64_t end = std::max<int64_t>(1, length - 1 - static_cast<int64_t>(random_() % 24));
    Ask(Prompt(end), false);
    const int64_t cached = Ask(Prompt(length), true);
    // At its end; or at a tail of before that goes as far.
    ASSERT_GE(cached, end);
    Ask(OtherPrompt(), false);
  }
}

TEST_P(PrefixExactnessTest, ATailTakenBackByUpToEightTokens) {
  for (const int end : {20, 258, 519, 777, 1030}) {
    for (int back = 0; back <= 8; back += Stride() == 1 ? 1 : 4) {
      Restart(Options());
      std::vector<int32_t> prompt = Prompt(end - back);
      for (int i = 0; i < back; ++i) prompt.push_back((tokens_[size_t(end - back + i)] + 1) % 128);
      Ask(prompt, false);
      const int64_t cached = Ask(Prompt(end + 50), true);
      EXPECT_GE(cached, end % 256 < back ? (end - back) / 256 * 256 : end - back);
    }
  }
}

TEST_P(PrefixExactnessTest, RejectedDraftsAtEveryPointOfABlock) {
  for (int num_drafts = 1; num_drafts <= 8 && !HasFatalFailure();
       num_drafts += Stride() == 1 ? 1 : 7) {
    Restart(Options());
    Ask(PromptThenOther(256), false);
    Sequence s{.token_ids = Prompt(520)};
    Admit(s);
    ASSERT_EQ(s.num_computed, 256);
    while (s.num_computed < 520) {
      // One right token, then wrong ones that are taken back.
      const auto at = static_cast<size_t>(s.num_computed);
      std::vector<int32_t> run = {tokens_[at]};
      for (int i = 0; i < num_drafts; ++i) run.push_back(Other());
      LogitsRows rows;
      harness_->Forward(s, run, &rows);
      ASSERT_EQ(rows[0], expected_[at]) << at;
      harness_->cache().OnComputed(s.kv, s.token_ids, ++s.num_computed);
    }
    Release(s);
    // What it left is as good.
    EXPECT_EQ(Ask(Prompt(600), true), 520);
  }
}

TEST_P(PrefixExactnessTest, AfterPreemptionWithAndWithoutItsTail) {
  for (const bool tail : {true, false}) {
    for (const int64_t at : {5, 255, 256, 300, 511, 900}) {
      PrefixCacheOptions options = Options();
      options.pools.num_state_slots = 1;
      Restart(options);
      Sequence s{.token_ids = Prompt(kMaxLength)};
      Admit(s);
      while (s.num_computed < at) {
        RunChunk(s, std::min<int64_t>(kMaxChunk, at - s.num_computed));
      }
      Release(s);
      if (!tail) Ask(OtherPrompt(), false);
      Admit(s);
      EXPECT_EQ(s.num_cached, tail ? at : at / 256 * 256);
      RunAndCompare(s);
      Release(s);
    }
  }
}

TEST_P(PrefixExactnessTest, ChoicesThatShareAPrompt) {
  for (const int64_t length : {7, 250, 511, 700, 999}) {
    Restart(Options());
    Sequence first{.token_ids = Prompt(length)}, second{.token_ids = Prompt(length)};
    Admit(first);
    while (first.num_computed < length) RunChunk(first, kMaxChunk);
    Admit(second);
    EXPECT_EQ(second.num_cached, length - 1);
    // They go different ways, turn by turn, and back on the known one's rows.
    for (int64_t end = length + 1; end <= length + 100; ++end) {
      first.token_ids.push_back(Other());
      RunChunk(first, 1);
      second.token_ids.push_back(tokens_[static_cast<size_t>(end - 1)]);
      RunAndCompare(second);
    }
    Release(first);
    Release(second);
  }
}

TEST_P(PrefixExactnessTest, FromHostMemory) {
  PrefixCacheOptions options = Options();
  options.pools.num_blocks = 6;
  options.num_host_blocks = 60;
  options.num_host_snapshots = 20;
  Restart(options);
  for (int64_t boundary = 256; boundary <= 1024; boundary += 256) {
    Ask(PromptThenOther(boundary), false);
    harness_->FillDevice();
    EXPECT_EQ(Ask(Prompt(boundary + 70), true), boundary);
    harness_->FillDevice();
    EXPECT_EQ(Ask(Prompt(boundary + 1), true), boundary);
  }
  EXPECT_GT(harness_->cache().stats().host_hit_tokens, 4u * 256);
}

TEST_P(PrefixExactnessTest, FromDiskAfterARestart) {
  PrefixCacheOptions options = Options();
  options.num_host_blocks = 30;
  options.num_host_snapshots = 10;
  options.disk_bytes = 1 << 30;
  Restart(options);
  for (int64_t boundary = 256; boundary <= 1024; boundary += 256) {
    Ask(PromptThenOther(boundary), false);
  }
  harness_->Settle();
  for (int64_t boundary = 256; boundary <= 1024; boundary += 256) {
    Restart(options);
    harness_->Settle();  // it knows what is there
    EXPECT_EQ(Ask(Prompt(boundary + 75), true), boundary);
    EXPECT_EQ(harness_->cache().stats().disk_hit_tokens, static_cast<uint64_t>(boundary));
  }
}

INSTANTIATE_TEST_SUITE_P(Numerics, PrefixExactnessTest,
                         testing::Values(Numerics::kOfficial, Numerics::kFp32),
                         [](const auto& param_info) {
                           return param_info.param == Numerics::kFp32 ? "Fp32" : "Official";
                         });

}  // namespace
}  // namespace fathom::runtime
