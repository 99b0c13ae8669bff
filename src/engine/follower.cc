#include "engine/follower.h"

#include <string>
#include <utility>

#include "engine/leading_executor.h"
#include "engine/rank_runtime.h"

namespace fathom::engine {
namespace {

Status FollowSteps(const StepLimits& limits, const NodeReports& reports,
                   runtime::LocalExecutor& executor, comm::ControlLink& control) {
  PlanDecoder decoder(limits);
  while (true) {
    ASSIGN_OR_RETURN(const auto message, control.Receive());
    if (!message) return OkStatus();
    ASSIGN_OR_RETURN(const auto batches, decoder.Decode(message->bytes));
    RETURN_IF_ERROR(executor.Start(batches));
    ASSIGN_OR_RETURN(const auto results, executor.Wait());
    if (reports.empty()) continue;
    RETURN_IF_ERROR(control.Send(EncodeResults(reports, results)));
  }
}

Status Follow(const EngineOptions& options, const std::vector<EngineRank>& ranks,
              comm::NodeGroup& nodes) {
  RETURN_IF_ERROR(CheckOptions(options));
  comm::ControlLink& control = nodes.control();
  const std::vector<RankMemory> memory = MemoryOf(options, ranks);
  RETURN_IF_ERROR(control.Send(EncodeMemory(memory)));
  ASSIGN_OR_RETURN(const auto message, control.Receive());
  if (!message) return OkStatus();
  ASSIGN_OR_RETURN(const KvPlan plan, DecodeKvPlan(message->bytes, options, memory));
  const auto num_nodes = static_cast<int>(nodes.nodes().size());
  ASSIGN_OR_RETURN(auto disk, OpenDisk(options, plan, ranks, num_nodes));
  ASSIGN_OR_RETURN(const auto executor,
                   MakeLocalExecutor(options, plan, ranks, /*max_in_flight=*/1, std::move(disk)));
  RETURN_IF_ERROR(control.Send("ready"));
  const comm::NodeInfo& self = nodes.nodes()[static_cast<size_t>(nodes.node_rank())];
  return FollowSteps(StepLimitsOf(options, plan),
                     ReportsOf(options.parallel, self, plan.disk_key.has_value()), *executor,
                     control);
}

}  // namespace

Status RunFollower(const EngineOptions& options, const std::vector<EngineRank>& ranks,
                   comm::NodeGroup& nodes) {
  const Status status = Follow(options, ranks, nodes);
  if (!status.ok()) nodes.control().Abort(status);
  return status;
}

}  // namespace fathom::engine
