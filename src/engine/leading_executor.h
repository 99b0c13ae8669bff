// LeadingExecutor: node 0's, over several nodes. Each step's plan goes to all of them; its own
// ranks run it, the others' follow (follower.h), and what these sampled comes back, with the news
// of their disks. What a grammar allows a sequence of another node is found here, where the grammar
// is, and goes with the plan. A thread of its own receives, so that a node that goes is noticed
// between steps, too. Its end is the orderly end of the other nodes.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"
#include "comm/node_group.h"
#include "config/parallel_config.h"
#include "engine/kv_plan.h"
#include "engine/step_codec.h"
#include "runtime/executor.h"
#include "runtime/grammar_masks.h"

namespace fathom::engine {

// What a node other than 0 tells after each step.
NodeReports ReportsOf(const config::ParallelConfig& parallel, const comm::NodeInfo& node,
                      bool has_disk);

// Before the first step: adds what the other nodes' ranks have, node by node; and waits until all
// are ready to follow. kPeer.
Status ReceiveMemory(comm::NodeGroup& nodes, std::vector<RankMemory>& memory);
Status AwaitFollowers(comm::NodeGroup& nodes);

class LeadingExecutor final : public runtime::Executor {
 public:
  // `local` runs one step at a time; `nodes` outlives the executor.
  LeadingExecutor(const StepLimits& limits, const config::ParallelConfig& parallel,
                  std::unique_ptr<runtime::Executor> local, comm::NodeGroup& nodes);
  ~LeadingExecutor() override;

  Status Start(std::span<const request::ScheduledBatch> batches) override;
  Result<std::vector<request::StepResult>> Wait() override;
  int max_in_flight() const override { return 1; }
  void Watch(const std::function<void(const Status&)>& tell) override;

 private:
  struct Follower {
    NodeReports reports;
    OpenStoreRequests open;
  };
  std::vector<std::vector<TokenMask>> FindMasks(std::span<const request::ScheduledBatch> batches);
  void RunReceiver(const std::function<void(const Status&)>& tell);
  Status ReceiveResults(std::span<request::StepResult> results);

  const StepLimits limits_;
  const std::unique_ptr<runtime::Executor> local_;
  comm::ControlLink& control_;
  std::vector<Follower> followers_;  // of node 1, 2, ...
  std::vector<bool> is_remote_;      // by data rank
  runtime::GrammarMasks masks_;
  const std::vector<uint32_t> nothing_allowed_;
  PlanEncoder encoder_;
  std::span<const request::ScheduledBatch> batches_;  // of the step that runs
  BoundedQueue<comm::ControlMessage> messages_;       // closed when no more will come
  Status end_;                                        // why; set before it is closed
  std::thread receiver_;
};

}  // namespace fathom::engine
