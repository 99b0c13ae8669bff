// The engine on node 0 and followers on others: nodes are threads here, which meet over TCP on the
// loopback interface; ranks are scripted models in lock-step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "comm/free_port.h"
#include "comm/node_group.h"
#include "engine/follower.h"
#include "engine/testing.h"
#include "engine/testing_disk.h"
#include "engine/testing_ranks.h"
#include "runtime/local_executor.h"

namespace fathom::engine {
namespace {

using config::ParallelConfig;
using request::FinishReason;
using testing::HasSubstr;

struct Answer {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs, prompt_logprobs;
  std::vector<uint16_t> routed_experts;
  bool operator==(const Answer&) const = default;
};

// What all nodes are started with.
EngineOptions NodeOptions(const ParallelConfig& parallel) {
  EngineOptions options = FakeOptions(parallel);
  options.kv.host_bytes = int64_t{1} << 20;
  return options;
}

// Calls body(i) for each i below `count`, on threads of their own.
void OnThreads(size_t count, const std::function<void(size_t)>& body) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::unique_ptr<comm::NodeGroup>> JoinAll(const std::vector<int>& ranks_per_node) {
  comm::JoinOptions options;
  options.num_nodes = static_cast<int>(ranks_per_node.size());
  options.world_size = std::accumulate(ranks_per_node.begin(), ranks_per_node.end(), 0);
  options.master_addr = "127.0.0.1";
  options.master_port = comm::FreePort();
  options.secret = "only for tests";
  std::vector<std::unique_ptr<comm::NodeGroup>> nodes(ranks_per_node.size());
  OnThreads(nodes.size(), [&](size_t i) {
    comm::JoinOptions own = options;
    own.node_rank = static_cast<int>(i);
    own.num_local_ranks = ranks_per_node[i];
    auto joined = comm::NodeGroup::Join(own);
    ASSERT_TRUE(joined.ok()) << joined.status().message();
    nodes[i] = std::move(*joined);
  });
  return nodes;
}

// Nodes with these numbers of ranks; node 0 serves, the others follow.
class Nodes {
 public:
  Nodes(const EngineOptions& options, const std::vector<int>& ranks_per_node,
        const FakeRanks::ScriptOf& script)
      : nodes_(JoinAll(ranks_per_node)), statuses_(ranks_per_node.size()) {
    for (size_t node = 0; node < ranks_per_node.size(); ++node) {
      fakes_.push_back(
          std::make_unique<FakeRanks>(options.parallel, kVocab, script, *nodes_[node]));
    }
    for (size_t node = 1; node < ranks_per_node.size(); ++node) {
      followers_.emplace_back([this, options, node] {
        statuses_[node] = RunFollower(options, fakes_[node]->ranks, *nodes_[node]);
      });
    }
    auto engine = MakeEngine(options, fakes_[0]->ranks, metrics_, clock_, nodes_[0].get());
    statuses_[0] = engine.status();
    if (engine.ok()) engine_ = std::move(*engine);
  }
  ~Nodes() {
    End();
    // At the same time, as processes do.
    OnThreads(nodes_.size(), [this](size_t i) { nodes_[i] = nullptr; });
  }

  // In order: what each node ended with.
  const std::vector<Status>& End() {
    engine_ = nullptr;
    nodes_[0]->control().Close();
    for (std::thread& follower : followers_) follower.join();
    followers_.clear();
    return statuses_;
  }

  void Leave(size_t node) { nodes_[node]->control().Close(); }
  Engine& engine() { return *engine_; }
  const MetricsRegistry& metrics() const { return metrics_; }
  const Status& status() const { return statuses_[0]; }
  const std::vector<std::unique_ptr<FakeRanks>>& fakes() const { return fakes_; }

  request::Request MakeRequest(std::vector<int32_t> prompt, int max_tokens) {
    request::Request request;
    request.id = engine_->NextRequestId();
    request.prompt_token_ids = std::move(prompt);
    request.sampling.temperature = 0.7;
    request.sampling.seed = request.prompt_token_ids.size();
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = true;
    request.arrival = clock_.Now();
    return request;
  }

 private:
  const SystemClock clock_;
  MetricsRegistry metrics_;
  std::vector<std::unique_ptr<comm::NodeGroup>> nodes_;
  std::vector<Status> statuses_;
  std::vector<std::unique_ptr<FakeRanks>> fakes_;
  std::vector<std::thread> followers_;
  std::unique_ptr<Engine> engine_;
};

// Everything that a result can hold, of prompts of many lengths, twice: the second time from the
// prefix cache.
std::vector<Answer> Ask(Nodes& nodes, bool with_experts) {
  std::vector<Answer> answers;
  for (int round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (size_t i = 0; i < 12; ++i) {
      request::Request request =
          nodes.MakeRequest(std::vector<int32_t>(1 + i * 57, 17), i % 4 == 2 ? 1 : 25);
      if (i % 3 == 0) request.constraint = std::make_shared<CountsModuloThree>();
      if (i % 4 == 1) request.sampling.frequency_penalty = 1.5;
      if (i % 4 == 2) request.sampling.num_prompt_logprobs = 1;
      if (i % 5 == 2) request.sampling.num_logprobs = 2;
      if (i % 6 == 5) request.sampling.bad_words = {{17, 5}, {3}};
      if (with_experts && i % 4 == 3) request.routed_experts_start = 0;
      sinks.push_back(std::make_shared<CollectingSink>());
      const Status status = nodes.engine().Submit(std::move(request), sinks.back());
      EXPECT_TRUE(status.ok()) << status.message();
    }
    for (const auto& sink : sinks) {
      const request::TokenEvent last = sink->Wait();
      EXPECT_EQ(last.finish_reason, FinishReason::kLength) << last.error.message();
      Answer& answer = answers.emplace_back();
      answer.token_ids = sink->token_ids();
      for (const auto& token : sink->logprobs()) answer.logprobs.push_back(token.chosen.logprob);
      for (const auto& token : last.prompt_logprobs) {
        answer.prompt_logprobs.push_back(token.chosen.logprob);
      }
      answer.routed_experts = sink->routed_experts();
    }
  }
  return answers;
}

struct Layout {
  ParallelConfig parallel;
  std::vector<int> ranks_per_node;
};

TEST(Nodes, EveryLayoutGivesTheAnswersOfOneNode) {
  for (const bool with_experts : {true, false}) {
    Nodes alone(NodeOptions({}), {1}, [](int) { return HashOfAll; });
    const auto expected = Ask(alone, with_experts);
    std::vector<Layout> layouts = {
        {{.tensor_parallel_size = 2}, {1, 1}},
        {{.data_parallel_size = 2}, {1, 1}},
        {{.data_parallel_size = 3}, {1, 2}},
        {{.tensor_parallel_size = 2, .data_parallel_size = 2}, {1, 2, 1}}};
    if (!with_experts) {
      layouts = {{{.pipeline_parallel_size = 2}, {1, 1}},
                 {{.tensor_parallel_size = 2, .data_parallel_size = 2, .pipeline_parallel_size = 2},
                  {4, 4}}};
    }
    for (const Layout& layout : layouts) {
      const ParallelConfig& p = layout.parallel;
      SCOPED_TRACE(testing::Message()
                   << "tensor " << p.tensor_parallel_size << " data " << p.data_parallel_size
                   << " pipeline " << p.pipeline_parallel_size);
      Nodes nodes(NodeOptions(p), layout.ranks_per_node,
                  [&](int rank) -> runtime::FakeModel::Script {
                    const auto place = config::PlaceOf(p, rank);
                    const auto tells = runtime::ResultPlace(p, place.data);
                    if (config::RankOf(p, tells) == rank) return HashOfAll;
                    return [](auto, auto, std::span<float> logits) {
                      std::fill(logits.begin(), logits.end(), NAN);
                    };
                  });
      ASSERT_TRUE(nodes.status().ok()) << nodes.status().message();
      EXPECT_EQ(Ask(nodes, with_experts), expected);
      for (const Status& status : nodes.End()) EXPECT_TRUE(status.ok()) << status.message();
      for (const auto& fakes : nodes.fakes()) {
        EXPECT_EQ(fakes->models[0]->num_steps(), nodes.fakes()[0]->models[0]->num_steps());
      }
    }
  }
}

TEST(Nodes, WhatTheDisksOfAllNodesHaveIsFoundAfterARestart) {
  const Layout layouts[] = {
      {{.tensor_parallel_size = 2}, {1, 1}},
      {{.pipeline_parallel_size = 2}, {1, 1}},
      {{.data_parallel_size = 2}, {1, 1}},
      {{.tensor_parallel_size = 2, .data_parallel_size = 2, .pipeline_parallel_size = 2}, {4, 4}}};
  for (const Layout& layout : layouts) {
    const ParallelConfig& p = layout.parallel;
    SCOPED_TRACE(testing::Message()
                 << "tensor " << p.tensor_parallel_size << " data " << p.data_parallel_size
                 << " pipeline " << p.pipeline_parallel_size);
    DiskDirectory directory;
    EngineOptions options = NodeOptions(p);
    options.kv = directory.Tiers();
    std::vector<int32_t> expected;
    // The second time it is found; the third time a node has lost its part; then it is back.
    for (const int num_cached : {0, 512, 0, 512}) {
      Nodes nodes(options, layout.ranks_per_node, [](int) { return HashOfAll; });
      ASSERT_TRUE(nodes.status().ok()) << nodes.status().message();
      const auto is_known = [&](int64_t bytes) {
        return SumOfMetric(nodes.metrics(), "fathom:kv_disk_bytes") == bytes;
      };
      if (num_cached > 0) WaitUntil([&] { return is_known(directory.RecordBytes()); });
      request::Request request = nodes.MakeRequest(std::vector<int32_t>(700, 20), 10);
      request.data_rank = p.data_parallel_size - 1;
      const auto sink = std::make_shared<CollectingSink>();
      ASSERT_TRUE(nodes.engine().Submit(std::move(request), sink).ok());
      EXPECT_EQ(sink->Wait().num_cached_tokens, num_cached);
      if (expected.empty()) expected = sink->token_ids();
      EXPECT_EQ(sink->token_ids(), expected);
      const size_t num_files = p.data_parallel_size == 2 && p.pipeline_parallel_size == 1 ? 3 : 6;
      WaitUntil([&] {
        return directory.Records().size() == num_files && is_known(directory.RecordBytes());
      });
      for (const Status& status : nodes.End()) EXPECT_TRUE(status.ok()) << status.message();
      if (num_cached == 0) continue;
      const char* folder = p.pipeline_parallel_size > 1 ? "stage-1" : "-1/";
      for (const auto& file : directory.Records(folder)) std::filesystem::remove(file);
    }
  }
}

TEST(Nodes, AFailureOnANodeEndsAllAndEveryRequestIsTold) {
  for (const int failing_rank : {0, 1}) {
    SCOPED_TRACE(failing_rank);
    std::atomic<int> num_calls = 0;
    Nodes nodes(NodeOptions({.data_parallel_size = 2}), {1, 1},
                [&](int rank) -> runtime::FakeModel::Script {
                  if (rank != failing_rank) return HashOfAll;
                  return [&](auto tokens, auto num_prompt, auto logits) {
                    if (++num_calls == 20) throw std::runtime_error("layer 3 fell over");
                    HashOfAll(tokens, num_prompt, logits);
                  };
                });
    ASSERT_TRUE(nodes.status().ok()) << nodes.status().message();
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (int i = 0; i < 6; ++i) {
      sinks.push_back(std::make_shared<CollectingSink>());
      ASSERT_TRUE(nodes.engine().Submit(nodes.MakeRequest({20 + i}, 1000), sinks.back()).ok());
    }
    for (const auto& sink : sinks) {
      const request::TokenEvent last = sink->Wait();
      EXPECT_EQ(last.finish_reason, FinishReason::kError);
      EXPECT_THAT(last.error.message(), HasSubstr("layer 3 fell over"));
    }
    EXPECT_FALSE(nodes.engine().Stats().healthy);
    const auto statuses = nodes.End();
    EXPECT_THAT(statuses[1].message(), HasSubstr("layer 3 fell over"));
    EXPECT_EQ(statuses[1].code(), failing_rank == 1 ? StatusCode::kInternal : StatusCode::kPeer);
  }
}

TEST(Nodes, ANodeThatGoesIsNoticedWhenNothingRuns) {
  Nodes nodes(NodeOptions({.data_parallel_size = 2}), {1, 1}, [](int) { return HashOfAll; });
  ASSERT_TRUE(nodes.status().ok()) << nodes.status().message();
  EXPECT_TRUE(nodes.engine().Stats().healthy);
  nodes.Leave(1);
  const TimePoint deadline = SystemClock().Now() + std::chrono::minutes(1);
  while (nodes.engine().Stats().healthy && SystemClock().Now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(nodes.engine().Stats().healthy);
  EXPECT_EQ(nodes.engine().Stats().error.code(), StatusCode::kPeer);
  EXPECT_THAT(nodes.engine().Stats().error.message(), HasSubstr("node 1"));
}

TEST(Nodes, TheKvCacheIsWhatEveryNodeHoldsAndTooLittleAnywhereIsRefusedEverywhere) {
  EngineOptions options = NodeOptions({.data_parallel_size = 2});
  options.kv.prefix_caching = false;
  const kv_cache::KvLayout layout = runtime::FakeLayout();
  options.kv_cache_bytes = 4 * layout.block_bytes;
  Nodes nodes(options, {1, 1}, [](int) { return HashOfAll; });
  EXPECT_EQ(nodes.status().code(), StatusCode::kOutOfMemory);
  EXPECT_THAT(nodes.status().message(), HasSubstr("--max-model-len"));
  const auto statuses = nodes.End();
  EXPECT_EQ(statuses[1].code(), StatusCode::kPeer);
  EXPECT_THAT(statuses[1].message(), HasSubstr("--max-model-len"));
}

}  // namespace
}  // namespace fathom::engine
