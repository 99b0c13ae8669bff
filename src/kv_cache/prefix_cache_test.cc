#include "kv_cache/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "kv_cache/testing/simulated_memory.h"

namespace fathom::kv_cache {
namespace {

using Outcome = Admission::Outcome;

PrefixCacheOptions SmallOptions() {
  return {.pools = {.num_blocks = 64,
                    .num_window_pages = 64,
                    .num_state_slots = 6,
                    .num_snapshots = 12},
          .retention_interval = 1024,
          .block_bytes = 100,
          .snapshot_bytes = 100};
}

PrefixCacheOptions TieredOptions() {
  PrefixCacheOptions options = SmallOptions();
  options.num_host_blocks = 48;
  options.num_host_snapshots = 12;
  options.disk_bytes = 1 << 20;
  return options;
}

std::vector<int32_t> Tokens(int count, int seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& t : tokens) t = static_cast<int32_t>(random() % 1000);
  return tokens;
}

std::vector<int32_t> Concat(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct TestSequence {
  request::RequestId id = 0;
  std::string session, salt;
  std::vector<int32_t> tokens;
  int64_t num_prompt_tokens = 0;
  int64_t num_computed = 0;
  int64_t max_cached_tokens = std::numeric_limits<int64_t>::max();
  SequenceKv kv;
};

// A cache, its memory, and steps of one sequence at a time.
class Server {
 public:
  explicit Server(const PrefixCacheOptions& options) : memory(options), cache(options) {}

  AdmitRequest MakeRequest(const TestSequence& run) const {
    return {.id = run.id,
            .session = run.session,
            .salt = run.salt,
            .token_ids = run.tokens,
            .num_prompt_tokens = run.num_prompt_tokens,
            .num_tokens = static_cast<int64_t>(run.tokens.size()) + 1,
            .max_cached_tokens = run.max_cached_tokens};
  }

  // With the disk of one that ended.
  void RestartAfter(const Server& ended) {
    memory = ended.memory;
    memory.Restart();
  }
  void RunTransfers() {
    memory.Run(cache.TakeTransfers(true));
    cache.OnStoreEvents(memory.TakeEvents());
  }
  void Settle() {
    while (cache.HasWork()) RunTransfers();
  }

  Outcome Admit(TestSequence& run) {
    const Admission admission = cache.Admit(MakeRequest(run), run.kv);
    run.num_computed = admission.num_cached_tokens;
    return admission.outcome;
  }
  // Waits as long as it has to.
  Outcome AdmitInTime(TestSequence& run) {
    for (int i = 0; i < 1000; ++i) {
      const Outcome outcome = Admit(run);
      if (outcome != Outcome::kWait) return outcome;
      RunTransfers();
    }
    ADD_FAILURE() << "waits forever";
    return Outcome::kWait;
  }

  void Step(TestSequence& run, int64_t most, int64_t num_rejected = 0) {
    const auto left = static_cast<int64_t>(run.tokens.size()) - run.num_computed;
    int64_t n = cache.NumRunnable(run.kv, run.num_computed, std::min(most, left));
    n = cache.ClipChunk(run.kv, run.num_computed, n);
    ASSERT_GT(n, 0);
    cache.Extend(run.kv, run.num_computed, n);
    RunTransfers();
    ASSERT_EQ(memory.Step(run.kv.table, run.tokens, run.num_computed, n), "");
    run.num_computed += std::max<int64_t>(1, n - num_rejected);
    cache.OnComputed(run.kv, run.tokens, run.num_computed);
  }
  void Prefill(TestSequence& run, int64_t chunk = 300) {
    while (run.num_computed < static_cast<int64_t>(run.tokens.size())) Step(run, chunk);
  }
  // Samples `answer`, token by token; the last one is not computed.
  void Decode(TestSequence& run, const std::vector<int32_t>& answer) {
    for (size_t i = 0; i < answer.size(); ++i) {
      run.tokens.push_back(answer[i]);
      if (i + 1 < answer.size()) Step(run, 1);
    }
  }
  void Release(TestSequence& run) { cache.Release(run.kv, run.tokens, run.num_computed); }

  TestSequence Make(std::vector<int32_t> tokens, std::string session = "", std::string salt = "") {
    TestSequence run;
    run.id = ++next_id;
    run.session = std::move(session);
    run.salt = std::move(salt);
    run.num_prompt_tokens = static_cast<int64_t>(tokens.size());
    run.tokens = std::move(tokens);
    return run;
  }
  // Runs a request from end to end and returns the tokens it did not compute.
  int64_t Ask(std::vector<int32_t> prompt, const std::vector<int32_t>& answer,
              std::string session = "", std::string salt = "") {
    TestSequence run = Make(std::move(prompt), std::move(session), std::move(salt));
    EXPECT_EQ(AdmitInTime(run), Outcome::kAdmitted);
    const int64_t num_cached = run.num_computed;
    Prefill(run);
    Decode(run, answer);
    Release(run);
    return num_cached;
  }
  void ExpectEmptyAfterClear() {
    cache.Clear();
    Settle();
    EXPECT_TRUE(cache.pool().IsEmpty());
    EXPECT_TRUE(cache.pool().IsIntact());
  }

  SimulatedMemory memory;
  PrefixCache cache;
  request::RequestId next_id = 0;
};

TEST(PrefixCache, FindsThePromptAgainInWholeBlocks) {
  Server server(SmallOptions());
  const auto prompt = Tokens(1000, 1);
  EXPECT_EQ(server.Ask(prompt, {1, 2, 3}), 0);
  EXPECT_EQ(server.Ask(Concat(prompt, {7, 7}), {1}), 1000);  // its tail
  EXPECT_EQ(server.Ask(Concat(prompt, {9}), {1}), 1000);     // and again, three tokens back
  EXPECT_EQ(server.Ask(Concat(prompt, {7, 7, 7}), {1}), 1000);
  server.ExpectEmptyAfterClear();
}

TEST(PrefixCache, ALiveSessionGoesOnAtItsLastToken) {
  Server server(SmallOptions());
  auto conversation = Tokens(700, 2);
  server.Ask(conversation, Tokens(50, 3), "a");
  conversation = Concat(conversation, Tokens(50, 3));
  // The last token of the answer was sampled and not computed.
  EXPECT_EQ(server.Ask(Concat(conversation, Tokens(30, 4)), {5}, "a"), 749);
  server.ExpectEmptyAfterClear();
}

TEST(PrefixCache, ATailIsUsedFromUpToEightTokensBefore) {
  for (int back = 0; back <= 12; ++back) {
    Server server(SmallOptions());
    const auto prompt = Tokens(400, 5);
    server.Ask(prompt, {1});
    auto other = prompt;
    other.resize(static_cast<size_t>(400 - back));
    EXPECT_EQ(server.Ask(Concat(other, {5000, 5001}), {1}), back <= 8 ? 400 - back : 256);
    server.ExpectEmptyAfterClear();
  }
}

TEST(PrefixCache, WherePromptsPartASnapshotIsTaken) {
  Server server(SmallOptions());
  const auto shared = Tokens(600, 6);
  EXPECT_EQ(server.Ask(Concat(shared, Tokens(500, 7)), {1}), 0);
  EXPECT_EQ(server.Ask(Concat(shared, Tokens(500, 8)), {1}), 0);
  EXPECT_EQ(server.Ask(Concat(shared, Tokens(500, 9)), {1}), 512);
  EXPECT_EQ(server.Ask(Concat(shared, Tokens(500, 10)), {1}), 512);
  server.ExpectEmptyAfterClear();
}

TEST(PrefixCache, SaltsShareNothing) {
  Server server(SmallOptions());
  const auto prompt = Tokens(800, 11);
  server.Ask(prompt, {1}, "", "alice");
  EXPECT_EQ(server.Ask(prompt, {1}, "", "bob"), 0);
  EXPECT_EQ(server.Ask(prompt, {1}, "", "alice"), 799);
}

TEST(PrefixCache, WhatMustBeRunIsNotTakenFromIt) {
  Server server(SmallOptions());
  const auto prompt = Tokens(800, 12);
  server.Ask(prompt, {1});
  for (const auto& [most, expected] : {std::pair(0, 0), {255, 0}, {798, 798}, {1000, 799}}) {
    TestSequence run = server.Make(prompt);
    run.max_cached_tokens = most;
    EXPECT_EQ(server.AdmitInTime(run), Outcome::kAdmitted);
    EXPECT_EQ(run.num_computed, expected) << most;
    server.Prefill(run);
    server.Release(run);
  }
}

TEST(PrefixCache, DisabledItKeepsNothing) {
  PrefixCacheOptions options = SmallOptions();
  options.enabled = false;
  Server server(options);
  const auto prompt = Tokens(800, 13);
  server.Ask(prompt, {1, 2});
  EXPECT_TRUE(server.cache.pool().IsEmpty());
  EXPECT_EQ(server.Ask(prompt, {1}), 0);
}

TEST(PrefixCache, ChoicesOfOnePromptShareItsBlocksAndCopyItsEnd) {
  Server server(SmallOptions());
  const auto prompt = Tokens(600, 14);
  std::vector<TestSequence> runs;
  for (int i = 0; i < 4; ++i) runs.push_back(server.Make(prompt));
  ASSERT_EQ(server.Admit(runs[0]), Outcome::kAdmitted);
  for (int i = 1; i < 4; ++i) EXPECT_EQ(server.Admit(runs[size_t(i)]), Outcome::kWait);
  server.Step(runs[0], 550);
  EXPECT_EQ(server.Admit(runs[1]), Outcome::kWait);
  server.Prefill(runs[0]);
  for (int i = 1; i < 4; ++i) {
    TestSequence& run = runs[size_t(i)];
    ASSERT_EQ(server.Admit(run), Outcome::kAdmitted);
    EXPECT_EQ(run.num_computed, 599);
    EXPECT_EQ(run.kv.table.blocks[0], runs[0].kv.table.blocks[0]);
    EXPECT_EQ(run.kv.table.blocks[1], runs[0].kv.table.blocks[1]);
    EXPECT_NE(run.kv.table.blocks[2], runs[0].kv.table.blocks[2]);
    server.Prefill(run);
  }
  for (int step = 0; step < 300; ++step) {
    for (size_t i = 0; i < 4; ++i) {
      runs[i].tokens.push_back(static_cast<int32_t>(1000 * i) + step);
      server.Step(runs[i], 1);
    }
  }
  for (TestSequence& run : runs) server.Release(run);
  server.ExpectEmptyAfterClear();
}

TEST(PrefixCache, APreemptedSequenceComesBackWhereItWas) {
  Server server(SmallOptions());
  TestSequence run = server.Make(Tokens(500, 15));
  ASSERT_EQ(server.Admit(run), Outcome::kAdmitted);
  server.Prefill(run);
  server.Decode(run, Tokens(100, 16));
  server.Release(run);
  ASSERT_EQ(server.AdmitInTime(run), Outcome::kAdmitted);
  EXPECT_EQ(run.num_computed, 599);
  server.Prefill(run);
  server.Release(run);
  EXPECT_EQ(server.cache.stats().query_tokens, 500u);
}

TEST(PrefixCache, ACancelledPrefillKeepsWhatItComputed) {
  Server server(SmallOptions());
  TestSequence run = server.Make(Tokens(2000, 17));
  ASSERT_EQ(server.Admit(run), Outcome::kAdmitted);
  server.Step(run, 900);
  server.Step(run, 50);
  server.Release(run);
  EXPECT_EQ(server.Ask(run.tokens, {1}), 950);
}

TEST(PrefixCache, KeptMemoryMakesRoom) {
  Server server(SmallOptions());  // 64 blocks
  for (int i = 0; i < 20; ++i) server.Ask(Tokens(2500, 100 + i), {1, 2});
  EXPECT_GT(server.cache.stats().evicted_device_blocks, 0u);
  // The whole pool for one.
  EXPECT_EQ(server.Ask(Tokens(64 * 256 - 10, 200), {1}), 0);
  server.ExpectEmptyAfterClear();
}

TEST(PrefixCache, OldMemoryGoesFirstAndTheEndOfAPrefixBeforeItsBeginning) {
  Server server(SmallOptions());
  for (int i = 0; i < 5; ++i) server.Ask(Tokens(2570, 300 + i), {1});  // 11 blocks each
  server.Ask(Tokens(2560 + 10, 310), {1});                             // two too many
  const auto cached = [&](int i) {
    const TestSequence run = server.Make(Tokens(2570, 300 + i));
    return server.cache.NumCachedTokens(server.MakeRequest(run));
  };
  EXPECT_LT(cached(0), 2560);
  for (int i = 1; i < 5; ++i) EXPECT_GE(cached(i), 2560) << i;
}

TEST(PrefixCache, WhatManySessionsShareOutlivesTheirOwn) {
  Server server(SmallOptions());
  const auto system = Tokens(1024, 20);
  for (int i = 0; i < 5; ++i) {
    server.Ask(Concat(system, Tokens(300, 400 + i)), {1}, "session " + std::to_string(i));
  }
  // Others' requests, once around the pool.
  for (int i = 0; i < 30; ++i) server.Ask(Tokens(700, 500 + i), {1}, "other");
  EXPECT_EQ(server.Ask(Concat(system, Tokens(300, 400)), {1}), 1024);
}

TEST(PrefixCache, ASideRequestDoesNotEvictItsOwnSession) {
  PrefixCacheOptions options = SmallOptions();
  options.pools.num_blocks = 38;
  Server server(options);
  auto conversation = Tokens(3000, 30);
  server.Ask(conversation, Tokens(20, 31), "me");
  conversation = Concat(conversation, Tokens(20, 31));
  for (int i = 0; i < 4; ++i) server.Ask(Tokens(1500, 600 + i), {1}, "you " + std::to_string(i));
  // Older than all others by now, and side requests need room.
  for (int i = 0; i < 4; ++i) server.Ask(Tokens(300, 700 + i), {1}, "me");
  EXPECT_GT(server.cache.stats().evicted_device_blocks, 0u);
  EXPECT_EQ(server.Ask(Concat(conversation, Tokens(9, 32)), {1}, "me"), 3019);
}

TEST(PrefixCache, ComesBackFromHostMemory) {
  PrefixCacheOptions options = SmallOptions();
  options.num_host_blocks = 200;
  options.num_host_snapshots = 40;
  Server server(options);
  const auto prompt = Tokens(3000, 40);
  server.Ask(prompt, {1});
  for (int i = 0; i < 8; ++i) server.Ask(Tokens(4000, 800 + i), {1});
  EXPECT_EQ(server.Ask(prompt, {1}), 2816);
  EXPECT_EQ(server.cache.stats().host_hit_tokens, 2816u);
  EXPECT_EQ(server.Ask(Concat(prompt, {5}), {1}), 3000);
  server.ExpectEmptyAfterClear();
}

TEST(PrefixCache, ComesBackFromDiskAfterARestart) {
  Server server(TieredOptions());
  const auto prompt = Tokens(3000, 50);
  server.Ask(prompt, Tokens(300, 51));
  server.Settle();
  EXPECT_GT(server.memory.num_disk_records(), 12u);
  Server next(TieredOptions());
  next.RestartAfter(server);
  next.RunTransfers();
  EXPECT_EQ(next.Ask(Concat(prompt, Tokens(200, 52)), {1}), 2816);
  EXPECT_EQ(next.cache.stats().disk_hit_tokens, 2816u);
  // The end of the answer was written, too.
  Server third(TieredOptions());
  third.RestartAfter(server);
  third.RunTransfers();
  EXPECT_EQ(third.Ask(Concat(Concat(prompt, Tokens(300, 51)), {3}), {1}), 3072);
  third.ExpectEmptyAfterClear();
}

TEST(PrefixCache, WhatWasComputedWhileTheDiskFailedToReadItIsWrittenAgain) {
  Server server(TieredOptions());
  const auto prompt = Tokens(1000, 55);
  server.Ask(prompt, {1});
  server.Settle();
  const size_t num_records = server.memory.num_disk_records();
  Server next(TieredOptions());
  next.RestartAfter(server);
  next.RunTransfers();
  TestSequence run = next.Make(prompt);
  ASSERT_EQ(next.Admit(run), Outcome::kWait);
  // The first block fails at once, the others when they have been computed.
  std::vector<request::KvStoreEvent> failures;
  for (const request::KvStoreRequest& read : next.cache.TakeTransfers(true).store) {
    failures.push_back({.record = read.record, .host_slot = read.host_slot});
  }
  ASSERT_EQ(failures.size(), 4u) << "three blocks and a snapshot";
  next.cache.OnStoreEvents({failures.data(), 1});
  ASSERT_EQ(next.Admit(run), Outcome::kAdmitted);
  EXPECT_EQ(run.num_computed, 0);
  next.Prefill(run);
  next.cache.OnStoreEvents({failures.data() + 1, 3});
  next.Settle();
  EXPECT_EQ(next.memory.num_disk_records(), num_records);
  next.Release(run);
  next.ExpectEmptyAfterClear();
}

TEST(PrefixCache, AnotherKeyFindsNothingOnDisk) {
  Server server(TieredOptions());
  const auto prompt = Tokens(1000, 60);
  server.Ask(prompt, {1});
  server.Settle();
  PrefixCacheOptions options = TieredOptions();
  options.hash_key[3] = 9;
  Server next(options);
  next.RestartAfter(server);
  next.RunTransfers();
  EXPECT_EQ(next.Ask(prompt, {1}), 0);
}

TEST(PrefixCache, TheDiskKeepsToItsBudget) {
  PrefixCacheOptions options = TieredOptions();
  options.disk_bytes = 2000;  // twenty records
  Server server(options);
  for (int i = 0; i < 10; ++i) server.Ask(Tokens(1500, 900 + i), {1});
  server.Settle();
  EXPECT_LE(server.memory.num_disk_records(), 20u);
  EXPECT_GT(server.cache.stats().evicted_disk_records, 0u);
  EXPECT_LE(server.cache.stats().disk_bytes_used, 2000);
}

TEST(PrefixCache, ABrokenDiskIsOffAndServingGoesOn) {
  Server server(TieredOptions());
  const auto prompt = Tokens(2000, 70);
  server.Ask(prompt, {1});
  server.memory.BreakDisk();
  server.RunTransfers();
  EXPECT_FALSE(server.cache.stats().disk_on);
  EXPECT_EQ(server.Ask(prompt, {1}), 1999);
  for (int i = 0; i < 6; ++i) server.Ask(Tokens(4000, 1000 + i), {1});
  server.Ask(prompt, {1});
  server.ExpectEmptyAfterClear();
}

TEST(PrefixCache, ADiskThatBreaksTakesWhatOnlyItHadAlong) {
  Server server(TieredOptions());
  const auto prompt = Tokens(2000, 71);
  server.Ask(prompt, {1});
  server.Settle();
  Server next(TieredOptions());
  next.RestartAfter(server);
  next.RunTransfers();
  EXPECT_GT(next.cache.stats().disk_bytes_used, 0);
  next.memory.BreakDisk();
  next.RunTransfers();
  EXPECT_EQ(next.cache.stats().disk_bytes_used, 0);
  EXPECT_EQ(next.Ask(prompt, {1}), 0);
  next.ExpectEmptyAfterClear();
}

TEST(PrefixCache, AResetForgetsWhatTheDiskIsBusyWith) {
  Server server(TieredOptions());
  const auto prompt = Tokens(300, 72);
  TestSequence run = server.Make(prompt);
  ASSERT_EQ(server.Admit(run), Outcome::kAdmitted);
  server.Step(run, 256);
  server.Release(run);
  const request::KvTransfers writes = server.cache.TakeTransfers(true);
  EXPECT_EQ(writes.store.size(), 2u) << "a block and its snapshot";
  server.cache.Clear();
  EXPECT_EQ(server.cache.NumCachedTokens(server.MakeRequest(run)), 0);
  server.memory.Run(writes);
  server.Settle();
  EXPECT_EQ(server.cache.NumCachedTokens(server.MakeRequest(run)), 0);
  EXPECT_EQ(server.memory.num_disk_records(), 0u);
}

TEST(PrefixCache, AResetForgetsWhatTheDiskHasNotToldYet) {
  Server server(TieredOptions());
  const auto prompt = Tokens(1000, 73);
  server.Ask(prompt, {1});
  server.Settle();
  Server next(TieredOptions());
  next.RestartAfter(server);
  next.cache.Clear();
  next.Settle();
  EXPECT_EQ(next.Ask(prompt, {1}), 0);
}

TEST(PrefixCache, RejectedDraftsAreTakenBackAnywhereInABlock) {
  Server server(SmallOptions());
  TestSequence run = server.Make(Concat(Tokens(300, 80), Tokens(800, 81)));
  ASSERT_EQ(server.Admit(run), Outcome::kAdmitted);
  server.Step(run, 300);
  std::mt19937 random(1);
  while (run.num_computed + 9 < 1100) {
    server.Step(run, 9, static_cast<int64_t>(random() % 9));
  }
  server.Release(run);
  server.ExpectEmptyAfterClear();
}

// Random requests that share prefixes, in random order, with preemptions, cancellations, drafts,
// resets and shortage in every tier. SimulatedMemory sees any byte that is not where a model would
// read it.
class RandomTraffic {
 public:
  RandomTraffic(const PrefixCacheOptions& options, uint32_t seed)
      : server_(options), random_(seed) {
    for (int i = 0; i < 6; ++i) stems_.push_back(Tokens(200 + i * 333, 2000 + i));
  }

  void Run(int num_events) {
    for (int i = 0; i < num_events && !testing::Test::HasFatalFailure(); ++i) Event();
    for (auto& run : runs_) server_.Release(*run);
    server_.ExpectEmptyAfterClear();
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }

  void Event() {
    if (Below(100) == 0) server_.cache.Clear();
    switch (Below(12)) {
      case 0:
      case 1:
        Submit();
        break;
      case 2:
        if (!runs_.empty()) End(size_t(Below(static_cast<int>(runs_.size()))));
        break;
      case 3:
        if (!runs_.empty()) Preempt(*runs_[size_t(Below(static_cast<int>(runs_.size())))]);
        break;
      default:
        for (auto& run : runs_) Advance(*run);
        server_.RunTransfers();
    }
  }

  void Submit() {
    if (runs_.size() >= 8) return;
    std::vector<int32_t> prompt = stems_[size_t(Below(static_cast<int>(stems_.size())))];
    if (Below(3) == 0) prompt.resize(prompt.size() - size_t(Below(150)));
    if (Below(4) != 0) prompt = Concat(prompt, Tokens(1 + Below(600), Below(40)));
    auto run = std::make_unique<TestSequence>(server_.Make(
        std::move(prompt), "session " + std::to_string(Below(4)), Below(10) == 0 ? "salt" : ""));
    if (Below(20) == 0) run->max_cached_tokens = Below(3) * Below(1000);
    runs_.push_back(std::move(run));
  }

  void Advance(TestSequence& run) {
    if (!run.kv.admitted && server_.Admit(run) != Outcome::kAdmitted) return;
    const auto left = static_cast<int64_t>(run.tokens.size()) - run.num_computed;
    if (left == 0) {
      run.tokens = Concat(run.tokens, Tokens(1 + Below(9), Below(1000)));
      return;
    }
    const int64_t most = Below(2) == 0 ? 9 : 400;
    if (server_.cache.NumRunnable(run.kv, run.num_computed, 1) == 0) return Preempt(run);
    server_.Step(run, most, most == 9 && left > 9 ? Below(9) : 0);
  }

  void Preempt(TestSequence& run) { server_.Release(run); }

  void End(size_t i) {
    server_.Release(*runs_[i]);
    if (Below(2) == 0) stems_[size_t(Below(static_cast<int>(stems_.size())))] = Head(*runs_[i]);
    runs_.erase(runs_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  static std::vector<int32_t> Head(const TestSequence& run) {
    return {run.tokens.begin(), run.tokens.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(
                                                         run.tokens.size(), 3000))};
  }

  Server server_;
  std::mt19937 random_;
  std::vector<std::vector<int32_t>> stems_;
  std::vector<std::unique_ptr<TestSequence>> runs_;
};

TEST(PrefixCache, RandomTrafficReadsOnlyWhatItWrote) {
  for (uint32_t seed = 0; seed < 20 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    PrefixCacheOptions options = seed % 2 == 0 ? SmallOptions() : TieredOptions();
    options.pools.num_blocks = 24 + static_cast<int32_t>(seed) * 3;
    options.pools.num_window_pages = 20 + static_cast<int32_t>(seed) * 4;
    options.num_host_blocks /= 1 + static_cast<int32_t>(seed) % 4;
    options.pools.num_snapshots = static_cast<int32_t>(seed) % 7;
    RandomTraffic(options, seed).Run(600);
  }
}

}  // namespace
}  // namespace fathom::kv_cache
