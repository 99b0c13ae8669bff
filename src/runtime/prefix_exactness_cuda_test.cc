// On a GPU: a prefix from the cache gives the bits of a run without a cache in the same steps, from
// every tier, after preemptions and rollbacks; and those of the whole prompt in one step, whatever
// the prompt's steps are. The built-in model on text of its own, and four layers of Flash's widths.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "checkpoint/synthetic_checkpoint.h"
#include "model/cuda_testing.h"
#include "runtime/testing/prefix_harness.h"

namespace fathom::runtime {
namespace {

using kv_cache::PrefixCacheOptions;
using Call = PrefixHarness::Call;
using Sequence = PrefixHarness::Sequence;

constexpr int kMaxLength = 1100;

double LogProbability(std::span<const float> logits, size_t token) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(double{x} - max);
  return logits[token] - max - std::log(sum);
}
size_t Best(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The loaded model and a text, once for all tests.
struct Shared {
  std::unique_ptr<HarnessModel> model;
  std::vector<int32_t> tokens;
};

// Text of the model's own: drawn from its distribution, token by token.
std::vector<int32_t> DrawText(HarnessModel& model) {
  PrefixHarness harness(model);
  harness.Restart(harness.Options());
  Sequence s{.token_ids = std::vector<int32_t>(kMaxLength, model.config.bos_token_id)};
  harness.Admit(s);
  std::mt19937 random(1);
  for (size_t i = 0; i + 1 < s.token_ids.size(); ++i) {
    LogitsRows rows;
    harness.RunChunk(s, 1, &rows);
    const double best = rows[0][Best(rows[0])];
    std::vector<double> weights;
    for (const float logit : rows[0]) weights.push_back(std::exp(logit - best));
    s.token_ids[i + 1] =
        std::discrete_distribution<int32_t>(weights.begin(), weights.end())(random);
  }
  std::vector<int32_t> text = s.token_ids;
  harness.Release(s);
  return text;
}

// A prompt's logits without a cache, in steps of `chunk`.
LogitsRows RunInSteps(HarnessModel& model, const std::vector<int32_t>& tokens, int64_t chunk) {
  PrefixHarness cold(model);
  PrefixCacheOptions plain = cold.Options();
  plain.enabled = false;
  plain.pools.num_snapshots = 0;
  cold.Restart(plain);
  cold.set_prompt_steps();
  Sequence s{.token_ids = tokens};
  cold.Admit(s);
  LogitsRows rows;
  const auto end = static_cast<int64_t>(tokens.size());
  while (s.num_computed < end && !testing::Test::HasFatalFailure()) {
    const int64_t n = std::min(chunk, end - s.num_computed);
    const auto all = std::span(tokens);
    cold.Forward(s, all.subspan(static_cast<size_t>(s.num_computed), static_cast<size_t>(n)),
                 &rows);
    s.num_computed += n;
    cold.cache().OnComputed(s.kv, s.token_ids, s.num_computed);
  }
  cold.Release(s);
  return rows;
}

void ExpectSameInSteps(HarnessModel& model, const std::vector<int32_t>& tokens,
                       std::span<const int64_t> chunks) {
  const LogitsRows whole = RunInSteps(model, tokens, static_cast<int64_t>(tokens.size()));
  for (const int64_t chunk : chunks) {
    const LogitsRows rows = RunInSteps(model, tokens, chunk);
    size_t equal = 0, first = rows.size();
    for (size_t i = 0; i < rows.size(); ++i) {
      const bool same = rows[i] == whole[i];
      equal += same ? 1 : 0;
      if (!same) first = std::min(first, i);
    }
    EXPECT_EQ(equal, whole.size()) << "steps of " << chunk << ", first other row " << first;
  }
}

class PrefixExactnessCudaTest : public testing::Test {
 protected:
  static void TearDownTestSuite() { shared_ = {}; }

  void SetUp() override {
    if (shared_.model == nullptr) {
      auto gpu = device::MakeCudaDevice(0);
      if (!gpu.ok()) GTEST_SKIP() << gpu.status().message();
      const model::TestSource tiny = model::OpenTinyModel();
      auto model = LoadHarnessModel(tiny.config, config::Numerics::kOfficial, tiny.weights.get(),
                                    *std::move(gpu), kMaxLength, /*max_model_len=*/8192);
      ASSERT_TRUE(model.ok()) << model.status().message();
      shared_.model = *std::move(model);
      shared_.tokens = DrawText(*shared_.model);
    }
    harness_ = std::make_unique<PrefixHarness>(*shared_.model);
    cold_ = std::make_unique<PrefixHarness>(*shared_.model);
    PrefixCacheOptions plain = cold_->Options();
    plain.enabled = false;
    plain.pools.num_snapshots = 0;
    cold_->Restart(plain);
    harness_->Restart(harness_->Options());
  }

  // One state slot: the tail of a sequence lives until the next one begins.
  PrefixCacheOptions OneSlot() const {
    PrefixCacheOptions options = harness_->Options();
    options.pools.num_state_slots = 1;
    return options;
  }

  // The rows of the last `num_calls` calls, made one after the other without a cache. What a call
  // ran beyond the next one's position is taken back.
  LogitsRows Replay(const std::vector<Call>& calls, size_t num_calls,
                    model::ChoiceRecorder* recorder = nullptr) {
    Sequence s{.token_ids = std::vector<int32_t>(kMaxLength, 0)};
    cold_->Admit(s);
    LogitsRows rows;
    for (size_t i = 0; i < calls.size(); ++i) {
      const Call& call = calls[i];
      s.num_computed = call.position;
      std::copy(call.token_ids.begin(), call.token_ids.end(), s.token_ids.begin() + call.position);
      const bool wanted = i + num_calls >= calls.size();
      cold_->Forward(s, call.token_ids, wanted ? &rows : nullptr, recorder);
      const int64_t end = call.position + static_cast<int64_t>(call.token_ids.size());
      s.num_computed = i + 1 < calls.size() ? calls[i + 1].position : end;
      cold_->cache().OnComputed(s.kv, s.token_ids, s.num_computed);
    }
    cold_->Release(s);
    return rows;
  }

  // The same bits as a cold run whose first calls are `before`.
  void ExpectAsCold(std::vector<Call> before, const Sequence& s, const LogitsRows& rows) {
    before.insert(before.end(), s.calls.begin(), s.calls.end());
    const LogitsRows expected = Replay(before, s.calls.size());
    ASSERT_EQ(rows.size(), expected.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(0, std::memcmp(rows[i].data(), expected[i].data(), rows[i].size() * 4))
          << "row " << i << " after " << s.num_cached << " cached of " << s.token_ids.size();
    }
    num_rows_ += rows.size();
  }

  // Runs a prompt to its end. With `before`, the calls that left the prefix it finds, its rows are
  // compared with a cold run's.
  Sequence Ask(std::vector<int32_t> prompt, const std::vector<Call>* before = nullptr,
               int64_t chunk = kMaxLength) {
    Sequence s{.token_ids = std::move(prompt)};
    harness_->Admit(s);
    LogitsRows rows;
    harness_->RunToEnd(s, chunk, &rows);
    if (before != nullptr) ExpectAsCold(*before, s, rows);
    harness_->Release(s);
    return s;
  }
  void AskOther() { Ask({(shared_.tokens[1] + 1) % shared_.model->config.vocab_size}); }

  std::vector<int32_t> Prompt(int64_t length) const {
    return {shared_.tokens.begin(), shared_.tokens.begin() + length};
  }
  std::vector<int32_t> PromptThenOther(int64_t length) {
    std::vector<int32_t> prompt = Prompt(length);
    for (int i = 0; i < 20; ++i) prompt.push_back(Other());
    return prompt;
  }
  int32_t Other() {
    return static_cast<int32_t>(random_() %
                                static_cast<uint32_t>(shared_.model->config.vocab_size));
  }

  // A prefill ends its steps at every boundary, where the harness has it take snapshots.
  std::vector<Call> Blocks(int64_t end) const {
    std::vector<Call> calls;
    for (int64_t at = 0; at < end; at += 256) {
      const auto first = shared_.tokens.begin() + at;
      calls.push_back({at, {first, first + std::min<int64_t>(256, end - at)}});
    }
    return calls;
  }
  static std::vector<Call> Joined(std::vector<Call> first, const std::vector<Call>& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }

  static inline Shared shared_;
  std::unique_ptr<PrefixHarness> harness_;
  std::unique_ptr<PrefixHarness> cold_;  // keeps nothing
  std::mt19937 random_{9};
  size_t num_rows_ = 0;  // that were compared
};

TEST_F(PrefixExactnessCudaTest, EveryPromptLengthAfterTheLongestPrefixOfBlocks) {
  harness_->Restart(OneSlot());
  Ask(PromptThenOther(1024));
  for (int length = 1; length <= kMaxLength && !HasFatalFailure(); ++length) {
    const int64_t boundary = (length - 1) / 256 * 256;
    const std::vector<Call> before = Blocks(boundary);
    ASSERT_EQ(Ask(Prompt(length), &before).num_cached, boundary);
    AskOther();  // takes the state slot, and so the tail
  }
  std::printf("%zu rows of 1,100 prompts have the bits of a cold run\n", num_rows_);
}

TEST_F(PrefixExactnessCudaTest, StepsOfAnySizeGiveTheBitsOfOneStep) {
  constexpr int64_t kChunks[] = {700, 513, 512, 300, 256, 100, 64, 33, 31, 9, 2, 1};
  ExpectSameInSteps(*shared_.model, shared_.tokens, kChunks);
}

TEST_F(PrefixExactnessCudaTest, EveryPromptLengthAfterAHitAsInOneStep) {
  const LogitsRows whole = RunInSteps(*shared_.model, shared_.tokens, kMaxLength);
  harness_->Restart(OneSlot());
  harness_->set_prompt_steps();
  Ask(PromptThenOther(1024));
  for (int length = 1; length <= kMaxLength && !HasFatalFailure(); ++length) {
    Sequence s{.token_ids = Prompt(length)};
    harness_->Admit(s);
    const auto boundary = static_cast<size_t>(s.num_computed);
    LogitsRows rows;
    harness_->RunToEnd(s, kMaxLength, &rows);
    harness_->Release(s);
    AskOther();  // takes the state slot, and so the tail
    ASSERT_EQ(boundary, static_cast<size_t>(length - 1) / 256 * 256);
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(rows[i], whole[boundary + i])
          << "row " << i << " after " << boundary << " of " << length;
    }
  }
}

TEST_F(PrefixExactnessCudaTest, StepsOfOtherSizesAfterEveryBoundary) {
  for (int64_t boundary = 256; boundary <= 1024; boundary += 256) {
    for (const int64_t chunk : {1, 7, 37, 130}) {
      harness_->Restart(harness_->Options());
      Ask(PromptThenOther(boundary));
      const std::vector<Call> before = Blocks(boundary);
      const int64_t end = std::min<int64_t>(kMaxLength, boundary + 40 * chunk);
      EXPECT_EQ(Ask(Prompt(end), &before, chunk).num_cached, boundary);
    }
  }
}

TEST_F(PrefixExactnessCudaTest, EveryThirdLengthAfterARandomPointOfALiveSession) {
  harness_->Restart(OneSlot());
  Ask(PromptThenOther(1024));
  for (int length = 2; length <= kMaxLength && !HasFatalFailure(); length += 3) {
    const int64_t end = std::max<int64_t>(1, length - 1 - static_cast<int64_t>(random_() % 24));
    const Sequence first = Ask(Prompt(end));
    // The session's end, or a boundary beyond it that the long prompt left.
    const int64_t boundary = (length - 1) / 256 * 256;
    const std::vector<Call> before =
        boundary > end ? Blocks(boundary) : Joined(Blocks(first.num_cached), first.calls);
    ASSERT_EQ(Ask(Prompt(length), &before).num_cached, std::max(boundary, end));
    AskOther();
  }
}

TEST_F(PrefixExactnessCudaTest, ATailTakenBackByUpToEightTokens) {
  for (const int end : {20, 265, 519, 777, 1030}) {
    for (int back = 0; back <= 8 && !HasFatalFailure(); ++back) {
      harness_->Restart(harness_->Options());
      std::vector<int32_t> prompt = Prompt(end - back);
      for (int i = 0; i < back; ++i) {
        prompt.push_back((shared_.tokens[static_cast<size_t>(end - back + i)] + 1) %
                         shared_.model->config.vocab_size);
      }
      const Sequence first = Ask(prompt);
      Sequence second{.token_ids = Prompt(end + 50)};
      harness_->Admit(second);
      // A tail is not taken back over the end of its last block.
      const int64_t cached = end % 256 < back ? (end - back) / 256 * 256 : end - back;
      ASSERT_EQ(second.num_cached, cached);
      LogitsRows rows;
      harness_->RunToEnd(second, kMaxLength, &rows);
      ExpectAsCold(cached < end - back ? Blocks(cached) : first.calls, second, rows);
      harness_->Release(second);
    }
  }
}

TEST_F(PrefixExactnessCudaTest, RejectedDrafts) {
  for (int num_drafts = 1; num_drafts <= 8 && !HasFatalFailure(); ++num_drafts) {
    harness_->Restart(harness_->Options());
    Ask(PromptThenOther(256));
    Sequence s{.token_ids = Prompt(400)};
    harness_->Admit(s);
    ASSERT_EQ(s.num_computed, 256);
    LogitsRows rows;
    while (s.num_computed < 400) {
      // One right token, then wrong ones that are taken back.
      std::vector<int32_t> run = {shared_.tokens[static_cast<size_t>(s.num_computed)]};
      for (int i = 0; i < num_drafts; ++i) run.push_back(Other());
      harness_->Forward(s, run, &rows);
      harness_->cache().OnComputed(s.kv, s.token_ids, ++s.num_computed);
    }
    ExpectAsCold(Blocks(256), s, rows);
    harness_->Release(s);
  }
}

TEST_F(PrefixExactnessCudaTest, AfterPreemptionWithAndWithoutItsTail) {
  for (const bool tail : {true, false}) {
    for (const int64_t at : {5, 255, 256, 300, 511, 900}) {
      harness_->Restart(OneSlot());
      Sequence s{.token_ids = Prompt(kMaxLength)};
      harness_->Admit(s);
      while (s.num_computed < at) {
        harness_->RunChunk(s, std::min<int64_t>(kMaxLength, at - s.num_computed), nullptr);
      }
      harness_->Release(s);
      std::vector<Call> before = std::exchange(s.calls, {});
      if (!tail) AskOther();
      harness_->Admit(s);
      ASSERT_EQ(s.num_cached, tail ? at : at / 256 * 256);
      if (!tail) before = Blocks(s.num_cached);
      LogitsRows rows;
      harness_->RunToEnd(s, kMaxLength, &rows);
      ExpectAsCold(before, s, rows);
      harness_->Release(s);
    }
  }
}

TEST_F(PrefixExactnessCudaTest, FromPinnedHostMemory) {
  PrefixCacheOptions options = harness_->Options();
  options.pools.num_blocks = 6;
  options.num_host_blocks = 60;
  options.num_host_snapshots = 20;
  harness_->Restart(options);
  for (int64_t boundary = 256; boundary <= 1024 && !HasFatalFailure(); boundary += 256) {
    harness_->FillDevice();  // no tail of before: blocks are computed in whole
    Ask(PromptThenOther(boundary));
    const std::vector<Call> before = Blocks(boundary);
    for (const int64_t more : {70, 1, 255}) {
      if (boundary + more > kMaxLength) continue;
      harness_->FillDevice();
      EXPECT_EQ(Ask(Prompt(boundary + more), &before).num_cached, boundary);
    }
  }
  EXPECT_GT(harness_->cache().stats().host_hit_tokens, 4u * 256);
}

TEST_F(PrefixExactnessCudaTest, FromDiskAfterARestart) {
  PrefixCacheOptions options = harness_->Options();
  options.num_host_blocks = 30;
  options.num_host_snapshots = 10;
  options.disk_bytes = 1 << 30;
  harness_->Restart(options);
  for (int64_t boundary = 256; boundary <= 1024; boundary += 256) Ask(PromptThenOther(boundary));
  harness_->Settle();
  for (int64_t boundary = 256; boundary <= 1024 && !HasFatalFailure(); boundary += 256) {
    harness_->Restart(options);
    harness_->Settle();  // it knows what is there
    const std::vector<Call> before = Blocks(boundary);
    EXPECT_EQ(Ask(Prompt(boundary + 75), &before).num_cached, boundary);
    EXPECT_EQ(harness_->cache().stats().disk_hit_tokens, static_cast<uint64_t>(boundary));
  }
}

// The choices of a run, by position: written down, compared with, or taken again.
class Choices final : public model::ChoiceRecorder {
 public:
  enum class Mode { kWrite, kCompare, kForce };
  explicit Choices(const config::ModelConfig& config)
      : k_(static_cast<size_t>(config.num_experts_per_token)),
        topk_(static_cast<size_t>(config.index_topk)) {}

  void set_mode(Mode mode) {
    mode_ = mode;
    num_rows_ = num_others_ = 0;
  }
  // The step that comes.
  void Begin(int64_t position, int64_t num_tokens) {
    position_ = static_cast<size_t>(position);
    num_tokens_ = static_cast<size_t>(num_tokens);
  }
  double share_of_others() const {
    return static_cast<double>(num_others_) / static_cast<double>(num_rows_);
  }

  void OnRouting(int layer, int row, std::span<const int32_t> ids) override {
    Note(routing_[layer], row, ids, k_);
  }
  void OnIndex(int layer, int row, std::span<const int32_t> entries) override {
    Note(index_[layer], row, entries, topk_);
  }
  std::span<const int32_t> ForcedRouting(int layer) override { return Forced(routing_[layer], k_); }
  std::span<const int32_t> ForcedIndex(int layer) override { return Forced(index_[layer], topk_); }

 private:
  void Note(std::vector<int32_t>& all, int row, std::span<const int32_t> values, size_t width) {
    all.resize(kMaxLength * width, -1);
    int32_t* const out = all.data() + (position_ + static_cast<size_t>(row)) * width;
    if (mode_ == Mode::kWrite) std::copy(values.begin(), values.end(), out);
    ++num_rows_;
    num_others_ += std::equal(values.begin(), values.end(), out) ? 0 : 1;
  }
  std::span<const int32_t> Forced(const std::vector<int32_t>& all, size_t width) const {
    if (mode_ != Mode::kForce) return {};
    return std::span(all).subspan(position_ * width, num_tokens_ * width);
  }

  const size_t k_, topk_;
  Mode mode_ = Mode::kWrite;
  size_t position_ = 0, num_tokens_ = 0;
  size_t num_rows_ = 0, num_others_ = 0;  // of choices; that differ from what was written
  std::map<int, std::vector<int32_t>> routing_, index_;
};

// A row of the run in one step, and the log-probability of the token that it likes best.
struct WholeRow {
  std::vector<float> logits;
  size_t best = 0;
  double log_probability = 0;
};

struct Distances {
  std::vector<double> values;
  size_t num_equal_rows = 0;
  double share_of_other_choices = 0;

  void Add(const WholeRow& whole, const std::vector<float>& row) {
    values.push_back(std::fabs(whole.log_probability - LogProbability(row, whole.best)));
    num_equal_rows += std::memcmp(whole.logits.data(), row.data(), row.size() * 4) == 0 ? 1 : 0;
  }
  double Quantile(double q) {
    std::sort(values.begin(), values.end());
    const auto n = static_cast<double>(values.size());
    return values[std::min(values.size() - 1, static_cast<size_t>(q * n))];
  }
  void Print(const std::string& what) {
    const auto near =
        std::count_if(values.begin(), values.end(), [](double v) { return v <= 0.03; });
    std::printf(
        "%s: %zu tokens, %zu of equal bits, %zu within 0.03; median %.5f, p99 %.5f, largest %.5f; "
        "other choices %.3f%%\n",
        what.c_str(), values.size(), num_equal_rows, static_cast<size_t>(near), Quantile(0.5),
        Quantile(0.99), Quantile(1), 100 * share_of_other_choices);
  }
};

// Every token that a hit leaves to compute, in steps of `chunk`, against the prompt in one step.
class HitsAgainstTheWholePrompt {
 public:
  HitsAgainstTheWholePrompt(HarnessModel& model, std::vector<int32_t> tokens)
      : model_(model), tokens_(std::move(tokens)), choices_(model.config) {
    RunWhole(Choices::Mode::kWrite, free_);
    RunWhole(Choices::Mode::kForce, forced_);
  }

  Distances Compare(bool forced, int64_t chunk) {
    choices_.set_mode(forced ? Choices::Mode::kForce : Choices::Mode::kCompare);
    PrefixHarness harness(model_);
    PrefixCacheOptions options = harness.Options();
    options.pools.num_state_slots = 1;
    harness.Restart(options);
    Run(harness, kMaxLength, kMaxLength, nullptr);
    Distances distances;
    for (int64_t boundary = 256; boundary < kMaxLength; boundary += 256) {
      TakeStateSlot(harness);  // and so the tail
      LogitsRows rows;
      const int64_t end = std::min<int64_t>(boundary + 256, kMaxLength);
      EXPECT_EQ(Run(harness, end, chunk, &rows), boundary);
      const std::vector<WholeRow>& whole = forced ? forced_ : free_;
      for (size_t i = 0; i < rows.size(); ++i) {
        distances.Add(whole[static_cast<size_t>(boundary) + i], rows[i]);
      }
    }
    distances.share_of_other_choices = choices_.share_of_others();
    return distances;
  }

 private:
  void RunWhole(Choices::Mode mode, std::vector<WholeRow>& whole) {
    choices_.set_mode(mode);
    PrefixHarness cold(model_);
    PrefixCacheOptions plain = cold.Options();
    plain.enabled = false;
    cold.Restart(plain);
    Sequence s{.token_ids = tokens_};
    cold.Admit(s);
    choices_.Begin(0, kMaxLength);
    LogitsRows rows;
    cold.Forward(s, tokens_, &rows, &choices_);
    cold.Release(s);
    for (std::vector<float>& row : rows) {
      const size_t best = Best(row);
      const double log_probability = LogProbability(row, best);
      whole.push_back({std::move(row), best, log_probability});
    }
  }

  int64_t Run(PrefixHarness& harness, int64_t length, int64_t chunk, LogitsRows* rows) {
    Sequence s{.token_ids = {tokens_.begin(), tokens_.begin() + length}};
    harness.Admit(s);
    while (s.num_computed < length && !testing::Test::HasFatalFailure()) {
      const int64_t wanted = std::min(chunk, length - s.num_computed);
      const int64_t n = harness.cache().ClipChunk(s.kv, s.num_computed, wanted);
      choices_.Begin(s.num_computed, n);
      harness.RunChunk(s, n, rows, &choices_);
    }
    harness.Release(s);
    return s.num_cached;
  }
  void TakeStateSlot(PrefixHarness& harness) {
    Sequence s{.token_ids = {(tokens_[0] + 1) % model_.config.vocab_size}};
    harness.Admit(s);
    harness.RunChunk(s, 1, nullptr);
    harness.Release(s);
  }

  HarnessModel& model_;
  const std::vector<int32_t> tokens_;
  Choices choices_;
  std::vector<WholeRow> free_, forced_;
};

// All rows are those of one step, choices forced or not; prints how far they are.
void ExpectEqual(HitsAgainstTheWholePrompt hits, const std::string& model) {
  for (const int64_t chunk : {256, 37}) {
    for (const bool forced : {false, true}) {
      Distances d = hits.Compare(forced, chunk);
      d.Print(model + ", steps of " + std::to_string(chunk) + (forced ? ", forced" : ", free"));
      EXPECT_EQ(d.num_equal_rows, d.values.size());
      EXPECT_LE(d.Quantile(1), 0.03);
      EXPECT_EQ(d.share_of_other_choices, 0);
    }
  }
}

TEST_F(PrefixExactnessCudaTest, AHitAsTheWholePrompt) {
  ExpectEqual({*shared_.model, shared_.tokens}, "fathom-tiny");
}

// Four layers, all kinds, dummy weights, which multiply what a sum in another order would move.
TEST_F(PrefixExactnessCudaTest, AHitAsTheWholePromptAtRealWidths) {
  config::ModelConfig config =
      checkpoint::ParseModelConfig(checkpoint::PresetConfigText("flash").value(), "flash").value();
  config.num_layers = 4;
  config.compress_ratios.resize(4);
  config.draft = config::DraftKind::kNone;
  config.num_draft_blocks = 0;
  auto model = LoadHarnessModel(config, config::Numerics::kOfficial, nullptr,
                                std::move(device::MakeCudaDevice(0).value()), kMaxLength, 8192);
  ASSERT_TRUE(model.ok()) << model.status().message();
  const std::vector<int32_t> tokens = model::RandomTokens(config, kMaxLength, 5);
  constexpr int64_t kChunks[] = {700, 256, 100, 33};
  ExpectSameInSteps(**model, tokens, kChunks);
  ExpectEqual({**model, tokens}, "4 layers of Flash's widths");
}

}  // namespace
}  // namespace fathom::runtime
