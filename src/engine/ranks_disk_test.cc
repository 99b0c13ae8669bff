// The KV cache on disk with several ranks, which keep every token in their memory and notice one
// that is wrong.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "engine/testing_disk.h"
#include "engine/testing_ranks.h"

namespace fathom::engine {
namespace {

using config::ParallelConfig;
namespace fs = std::filesystem;

class RanksDiskTest : public testing::Test {
 protected:
  ~RanksDiskTest() override { engine_.reset(); }

  void Start(const ParallelConfig& parallel, bool async = false) {
    engine_.reset();
    metrics_ = std::make_unique<MetricsRegistry>();
    fakes_ = std::make_unique<FakeRanks>(parallel, kVocab, [](int) { return HashOfAll; });
    EngineOptions options = FakeOptions(parallel);
    options.async_scheduling = async;
    options.kv = directory_.Tiers();
    options.kv.disk_bytes = disk_bytes_;
    auto engine = MakeEngine(options, fakes_->ranks, *metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
  }

  CachedAnswer Ask(int32_t token, int data_rank = 0) {
    request::Request request;
    request.prompt_token_ids.assign(700, token);
    request.data_rank = data_rank;
    return Ask20(*engine_, std::move(request));
  }

  int64_t NumDamaged() const {
    return SumOfMetric(*metrics_, "fathom:kv_evictions_total", "reason=\"damaged\"");
  }
  int64_t BytesOnDisk() const { return SumOfMetric(*metrics_, "fathom:kv_disk_bytes"); }
  // Two blocks and a snapshot of each prompt, in each of its parts.
  void WaitUntilWritten(size_t num_files) {
    WaitUntil([&] {
      return directory_.Records().size() == num_files && BytesOnDisk() == directory_.RecordBytes();
    });
  }
  void WaitUntilFound() {
    WaitUntil([&] { return BytesOnDisk() == directory_.RecordBytes(); });
  }

  const SystemClock clock_;
  DiskDirectory directory_;
  int64_t disk_bytes_ = int64_t{1} << 30;
  std::unique_ptr<MetricsRegistry> metrics_;
  std::unique_ptr<FakeRanks> fakes_;
  std::unique_ptr<Engine> engine_;
};

struct Layout {
  ParallelConfig parallel;
  bool async = false;
};

TEST_F(RanksDiskTest, WhatAllRanksWroteIsFoundAfterARestart) {
  const Layout layouts[] = {
      {{.tensor_parallel_size = 2}},
      {{.tensor_parallel_size = 2}, true},
      {{.pipeline_parallel_size = 3}},
      {{.data_parallel_size = 2}, true},
      {{.tensor_parallel_size = 2, .data_parallel_size = 2, .pipeline_parallel_size = 2}}};
  for (const auto& [p, async] : layouts) {
    SCOPED_TRACE(testing::Message()
                 << "tensor " << p.tensor_parallel_size << " data " << p.data_parallel_size
                 << " pipeline " << p.pipeline_parallel_size << " async " << async);
    directory_.Clear();
    Start(p, async);
    std::vector<CachedAnswer> first;
    for (int d = 0; d < p.data_parallel_size; ++d) first.push_back(Ask(20 + d, d));
    const int num_parts = p.data_parallel_size * p.pipeline_parallel_size;
    WaitUntilWritten(size_t{3} * static_cast<size_t>(num_parts));
    Start(p, async);
    WaitUntilFound();
    for (int d = 0; d < p.data_parallel_size; ++d) {
      const CachedAnswer again = Ask(20 + d, d);
      EXPECT_EQ(again.num_cached_tokens, 512);
      EXPECT_EQ(again.token_ids, first[static_cast<size_t>(d)].token_ids);
    }
    EXPECT_EQ(SumOfMetric(*metrics_, "fathom:prefix_cache_hits_by_tier_total", "tier=\"disk\""),
              512 * p.data_parallel_size);
  }
}

TEST_F(RanksDiskTest, TensorRanksFindWhatAnotherNumberOfThemWroteAndStagesDoNot) {
  Start({.tensor_parallel_size = 2});
  const CachedAnswer first = Ask(20);
  WaitUntilWritten(3);
  for (const int num_ranks : {1, 4, 2}) {
    Start({.tensor_parallel_size = num_ranks});
    WaitUntilFound();
    const CachedAnswer again = Ask(20);
    EXPECT_EQ(again.num_cached_tokens, 512);
    EXPECT_EQ(again.token_ids, first.token_ids);
  }
  Start({.pipeline_parallel_size = 2});
  const CachedAnswer in_stages = Ask(20);
  EXPECT_EQ(in_stages.num_cached_tokens, 0);
  EXPECT_EQ(in_stages.token_ids, first.token_ids);
}

void Damage(const fs::path& path, int64_t from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-from_end, std::ios::end);
  const int old = file.get();
  file.seekp(-from_end, std::ios::end);
  file.put(static_cast<char>(~old));
}

TEST_F(RanksDiskTest, APartThatIsMissingOrWrongMakesAMissForAllRanksAndIsWrittenAgain) {
  const ParallelConfig parallel{.pipeline_parallel_size = 2};
  Start(parallel);
  const CachedAnswer first = Ask(20);
  WaitUntilWritten(6);
  // As another server wrote it.
  DiskDirectory other;
  std::swap(directory_, other);
  Start(parallel);
  Ask(20);
  WaitUntilWritten(6);
  engine_.reset();
  std::swap(directory_, other);

  const std::pair<const char*, std::function<void(const fs::path&)>> harms[] = {
      {"missing", [](const fs::path& file) { fs::remove(file); }},
      {"truncated", [](const fs::path& file) { fs::resize_file(file, 50); }},
      {"damaged", [](const fs::path& file) { Damage(file, 1); }},
      {"under another name", [](const fs::path& file) { fs::rename(file, file.string() + "0"); }},
      {"foreign", [&](const fs::path& file) {
         for (const fs::path& foreign : other.Records("stage-1")) {
           if (foreign.extension() != file.extension()) continue;
           fs::copy_file(foreign, file, fs::copy_options::overwrite_existing);
         }
       }}};
  for (const char* stage : {"stage-0", "stage-1"}) {
    for (const auto& [name, harm] : harms) {
      SCOPED_TRACE(testing::Message() << name << ", " << stage);
      Start(parallel);
      WaitUntilFound();
      engine_.reset();
      // The blocks; their snapshot alone is of no use.
      for (const fs::path& file : directory_.Records(stage)) {
        if (file.extension() == ".block") harm(file);
      }
      Start(parallel);
      // Until a block is read it counts as whole.
      const int num_found = std::string_view(name) == "damaged" ? 2 : 0;
      if (num_found > 0) WaitUntilFound();
      const CachedAnswer again = Ask(20);
      EXPECT_EQ(again.num_cached_tokens, 0);
      EXPECT_EQ(again.token_ids, first.token_ids);
      WaitUntil([&] { return NumDamaged() >= num_found; });
      WaitUntilWritten(6);
      EXPECT_EQ(NumDamaged(), num_found);
      Start(parallel);
      WaitUntilFound();
      EXPECT_EQ(Ask(20).num_cached_tokens, 512);
    }
  }
}

TEST_F(RanksDiskTest, ADiskThatFailsForOneRankIsOffForAllAndServingGoesOn) {
  const ParallelConfig parallel{.data_parallel_size = 2, .pipeline_parallel_size = 2};
  Start(parallel);
  const CachedAnswer first = Ask(20, 1);
  WaitUntilWritten(6);
  // Files in the place of the folders that records go to.
  for (const fs::path& file : directory_.Records("stage-1-of-2-data-1")) {
    fs::remove_all(file.parent_path());
  }
  for (int i = 0; i < 256; ++i) {
    std::ofstream(directory_.Folder("stage-1-of-2-data-1") / fmt::format("{:02x}", i)) << "x";
  }
  EXPECT_EQ(SumOfMetric(*metrics_, "fathom:kv_disk_on"), 2);
  Ask(21, 1);
  WaitUntil([&] { return SumOfMetric(*metrics_, "fathom:kv_disk_on") == 0; });
  EXPECT_EQ(BytesOnDisk(), 0);
  EXPECT_EQ(Ask(20, 1).token_ids, first.token_ids);
  Ask(22, 0);
  Start(parallel);
  EXPECT_EQ(Ask(20, 1).token_ids, first.token_ids);
  WaitUntilWritten(6);
}

TEST_F(RanksDiskTest, TheSizeIsOfAllRanksTogether) {
  const ParallelConfig parallel{.data_parallel_size = 2, .pipeline_parallel_size = 2};
  Start(parallel);
  Ask(20, 0);
  WaitUntilWritten(6);
  disk_bytes_ = 5 * directory_.RecordBytes();
  Start(parallel);
  for (int32_t token = 30; token < 40; ++token) Ask(token, token % 2);
  WaitUntil([&] {
    return SumOfMetric(*metrics_, "fathom:kv_evictions_total", "reason=\"disk_full\"") > 10 &&
           BytesOnDisk() == directory_.RecordBytes();
  });
  EXPECT_LE(BytesOnDisk(), disk_bytes_);
  EXPECT_GE(BytesOnDisk(), disk_bytes_ / 4);
}

}  // namespace
}  // namespace fathom::engine
