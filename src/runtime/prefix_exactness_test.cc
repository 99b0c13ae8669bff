// A prefix from the cache gives the bits that computing it gives: the real model and the real
// copies, for every prompt length, from every tier, after preemptions and rollbacks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "checkpoint/checkpoint.h"
#include "kv_cache/prefix_cache.h"
#include "kv_store/disk_store.h"
#include "model/testing.h"
#include "runtime/device_batch.h"
#include "runtime/kv_cache.h"

namespace fathom::runtime {
namespace {

using config::Numerics;
using kv_cache::Admission;
using kv_cache::IndexKeyDType;
using kv_cache::PrefixCacheOptions;

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

struct Sequence {
  std::vector<int32_t> token_ids;
  int64_t num_computed = 0;
  int64_t num_cached = 0;
  kv_cache::SequenceKv kv = {};
};

class PrefixExactnessTest : public testing::TestWithParam<Numerics> {
 protected:
  void SetUp() override {
    const IndexKeyDType index_dtype =
        GetParam() == Numerics::kFp32 ? IndexKeyDType::kFp32 : IndexKeyDType::kFp4;
    layout_ = kv_cache::MakeKvLayout(config_, GetParam(), index_dtype);
    const auto source = checkpoint::MakeSyntheticSource(config_, 3);
    auto weights = model::LoadWeights(config_, *source, *device_);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    const model::ModelLimits limits{
        .max_batched_tokens = kMaxChunk, .max_num_seqs = 1, .max_model_len = 2048};
    auto model =
        model::MakeDeepSeekV4(config_, GetParam(), index_dtype, *weights, limits, *device_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *std::move(model);
    stream_ = *device_->MakeStream();
    logits_.resize(size_t{kMaxChunk} * static_cast<size_t>(config_.vocab_size));
    Restart({});
    tokens_ = model::RandomTokens(config_, kMaxLength, 5);
    PrefixCacheOptions plain = Options();
    plain.enabled = false;
    Restart(plain);
    Sequence whole{.token_ids = tokens_};
    Admit(whole);
    while (whole.num_computed < kMaxLength) RunChunk(whole, kMaxChunk, &expected_);
    cache_->Release(whole.kv, whole.token_ids, whole.num_computed);
    Restart(Options());
  }
  void TearDown() override {
    disk_.reset();
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  PrefixCacheOptions Options() const {
    return {.pools = {.num_blocks = 24,
                      .num_window_pages = 48,
                      .num_state_slots = 4,
                      .num_snapshots = 24},
            .retention_interval = 256,
            .block_bytes = layout_.block_bytes,
            .snapshot_bytes = SnapshotBytes()};
  }
  int64_t SnapshotBytes() const {
    return kv_cache::SnapshotBytesWithPages(layout_, config_.sliding_window);
  }

  // Empty caches whose memory is full of an earlier sequence's; the disk stays.
  void Restart(PrefixCacheOptions options) {
    if (options.pools.num_blocks == 0) options = Options();
    disk_.reset();
    if (options.disk_bytes > 0) {
      if (directory_.empty()) {
        std::string name = std::filesystem::temp_directory_path() / "fathom-exact-XXXXXX";
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        directory_ = name;
      }
      auto disk =
          kv_store::DiskStore::Open({.directory = directory_,
                                     .content_name = "tiny",
                                     .payload_bytes = {layout_.block_bytes, SnapshotBytes()}});
      ASSERT_TRUE(disk.ok()) << disk.status().message();
      disk_ = *std::move(disk);
      options.hash_key = disk_->key();
    }
    auto memory = KvCache::Make(layout_, options.pools, *device_,
                                {.num_blocks = options.num_host_blocks,
                                 .num_snapshots = options.num_host_snapshots,
                                 .snapshot_bytes = SnapshotBytes()});
    ASSERT_TRUE(memory.ok()) << memory.status().message();
    memory_ = *std::move(memory);
    const model::KvCacheView view = memory_.view();
    std::fill_n(view.blocks, options.pools.num_blocks * layout_.block_bytes, std::byte{0x5a});
    std::fill_n(view.window_pages, options.pools.num_window_pages * layout_.window_page_bytes,
                std::byte{0x5a});
    std::fill_n(view.state_slots, options.pools.num_state_slots * layout_.state.slot_bytes,
                std::byte{0x5a});
    cache_ = std::make_unique<kv_cache::PrefixCache>(options);
  }

  void RunTransfers() {
    const request::KvTransfers transfers = cache_->TakeTransfers(true);
    ASSERT_TRUE(memory_.Run(transfers.copies, *stream_).ok());
    if (disk_ == nullptr) return;
    for (const request::KvStoreRequest& r : transfers.store) {
      disk_->Submit(r, r.host_slot < 0 ? std::span<std::byte>()
                                       : memory_.host_slot(r.record.kind, r.host_slot));
    }
    if (transfers.wait_for_store) disk_->WaitForEvent(std::chrono::milliseconds(20));
    cache_->OnStoreEvents(disk_->TakeEvents());
  }

  void Admit(Sequence& s) {
    for (int i = 0; i < 1000; ++i) {
      const auto length = static_cast<int64_t>(s.token_ids.size());
      const Admission admission = cache_->Admit(
          {.token_ids = s.token_ids, .num_prompt_tokens = length, .num_tokens = length + 1}, s.kv);
      s.num_computed = s.num_cached = admission.num_cached_tokens;
      if (admission.outcome == Admission::Outcome::kAdmitted) return;
      ASSERT_EQ(admission.outcome, Admission::Outcome::kWait);
      RunTransfers();
    }
    FAIL() << "waits forever";
  }

  // Runs tokens, which need not be the sequence's own (drafts), and appends their logits.
  void Forward(Sequence& s, std::span<const int32_t> token_ids,
               std::vector<std::vector<float>>* rows) {
    const auto count = static_cast<int64_t>(token_ids.size());
    cache_->Extend(s.kv, s.num_computed, count);
    RunTransfers();
    batch_.Clear();
    batch_.AddSequence(token_ids, static_cast<int32_t>(s.num_computed), s.kv.table);
    for (size_t i = 0; i < token_ids.size(); ++i) batch_.AddLogitsRow(i);
    model_->Forward(batch_.View(), memory_.view(), logits_.data(), *stream_, nullptr);
    const auto vocab = static_cast<size_t>(config_.vocab_size);
    for (size_t i = 0; rows != nullptr && i < token_ids.size(); ++i) {
      const auto begin = logits_.begin() + static_cast<std::ptrdiff_t>(i * vocab);
      rows->emplace_back(begin, begin + static_cast<std::ptrdiff_t>(vocab));
    }
  }
  void RunChunk(Sequence& s, int64_t most, std::vector<std::vector<float>>* rows) {
    const auto left = static_cast<int64_t>(s.token_ids.size()) - s.num_computed;
    const int64_t n = cache_->ClipChunk(s.kv, s.num_computed, std::min(most, left));
    Forward(
        s,
        std::span(s.token_ids).subspan(static_cast<size_t>(s.num_computed), static_cast<size_t>(n)),
        rows);
    s.num_computed += n;
    cache_->OnComputed(s.kv, s.token_ids, s.num_computed);
  }
  // Runs what is left and compares every row with the run that had no cache.
  void RunAndCompare(Sequence& s, int64_t chunk = kMaxChunk) {
    const int64_t first = s.num_computed;
    std::vector<std::vector<float>> rows;
    while (s.num_computed < static_cast<int64_t>(s.token_ids.size())) RunChunk(s, chunk, &rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(rows[i], expected_[static_cast<size_t>(first) + i])
          << "token " << first + static_cast<int64_t>(i) << " of " << s.token_ids.size()
          << ", cached " << s.num_cached;
    }
  }
  void Release(Sequence& s) { cache_->Release(s.kv, s.token_ids, s.num_computed); }

  // Runs a prompt from end to end; returns what it found.
  int64_t Ask(std::vector<int32_t> prompt, bool compare, int64_t chunk = kMaxChunk) {
    Sequence s{.token_ids = std::move(prompt)};
    Admit(s);
    if (compare) {
      RunAndCompare(s, chunk);
    } else {
      while (s.num_computed < static_cast<int64_t>(s.token_ids.size())) RunChunk(s, chunk, nullptr);
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
  void Settle() {
    while (cache_->HasWork()) RunTransfers();
  }
  // Pushes everything else out of device memory.
  void FillDevice(const PrefixCacheOptions& options) {
    std::vector<int32_t> other(static_cast<size_t>(options.pools.num_blocks) * 256 - 1);
    for (int32_t& t : other) t = Other();
    Sequence s{.token_ids = std::move(other)};
    Admit(s);
    Release(s);
  }

  const config::ModelConfig config_ = TinyConfig();
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(1);
  std::unique_ptr<device::Stream> stream_;
  kv_cache::KvLayout layout_;
  std::unique_ptr<model::DeepSeekV4> model_;
  KvCache memory_;
  std::filesystem::path directory_;
  std::unique_ptr<kv_store::DiskStore> disk_;
  std::unique_ptr<kv_cache::PrefixCache> cache_;
  DeviceBatch batch_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_;
  std::vector<std::vector<float>> expected_;  // [kMaxLength], without a cache
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
      std::vector<std::vector<float>> rows;
      Forward(s, run, &rows);
      ASSERT_EQ(rows[0], expected_[at]) << at;
      cache_->OnComputed(s.kv, s.token_ids, ++s.num_computed);
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
        RunChunk(s, std::min<int64_t>(kMaxChunk, at - s.num_computed), nullptr);
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
    while (first.num_computed < length) RunChunk(first, kMaxChunk, nullptr);
    Admit(second);
    EXPECT_EQ(second.num_cached, length - 1);
    // They go different ways, turn by turn, and back on the known one's rows.
    for (int64_t end = length + 1; end <= length + 100; ++end) {
      first.token_ids.push_back(Other());
      RunChunk(first, 1, nullptr);
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
    FillDevice(options);
    EXPECT_EQ(Ask(Prompt(boundary + 70), true), boundary);
    FillDevice(options);
    EXPECT_EQ(Ask(Prompt(boundary + 1), true), boundary);
  }
  EXPECT_GT(cache_->stats().host_hit_tokens, 4u * 256);
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
  Settle();
  for (int64_t boundary = 256; boundary <= 1024; boundary += 256) {
    Restart(options);
    Settle();  // it knows what is there
    EXPECT_EQ(Ask(Prompt(boundary + 75), true), boundary);
    EXPECT_EQ(cache_->stats().disk_hit_tokens, static_cast<uint64_t>(boundary));
  }
}

INSTANTIATE_TEST_SUITE_P(Numerics, PrefixExactnessTest,
                         testing::Values(Numerics::kOfficial, Numerics::kFp32),
                         [](const auto& param_info) {
                           return param_info.param == Numerics::kFp32 ? "Fp32" : "Official";
                         });

}  // namespace
}  // namespace fathom::runtime
