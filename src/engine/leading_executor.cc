#include "engine/leading_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "engine/rank_runtime.h"
#include "runtime/local_executor.h"

namespace fathom::engine {
namespace {

constexpr int kNumMaskThreads = 4;

// The next message of each node that `expects`, in the order in which they come.
template <typename Next, typename Take>
Status ReceiveFrom(std::vector<bool> expects, const Next& next, const Take& take) {
  while (std::find(expects.begin(), expects.end(), true) != expects.end()) {
    ASSIGN_OR_RETURN(const comm::ControlMessage message, next());
    const auto node = static_cast<size_t>(message.node_rank);
    if (!expects[node]) return PeerError(fmt::format("node {} sends what nobody asked for", node));
    expects[node] = false;
    RETURN_IF_ERROR(take(node, message.bytes));
  }
  return OkStatus();
}

Result<comm::ControlMessage> ReceiveOne(comm::ControlLink& control) {
  ASSIGN_OR_RETURN(auto message, control.Receive());
  if (!message) return PeerError("the nodes have ended: nothing can be run any more");
  return *std::move(message);
}

std::vector<bool> AllButFirst(size_t count) {
  std::vector<bool> nodes(count, true);
  nodes[0] = false;
  return nodes;
}

}  // namespace

NodeReports ReportsOf(const config::ParallelConfig& parallel, const comm::NodeInfo& node,
                      bool has_disk) {
  NodeReports reports;
  if (has_disk) reports.num_disk_ranks.resize(static_cast<size_t>(parallel.data_parallel_size));
  for (int rank = node.first_rank; rank < node.first_rank + node.num_ranks; ++rank) {
    const int d = config::PlaceOf(parallel, rank).data;
    if (has_disk) ++reports.num_disk_ranks[static_cast<size_t>(d)];
    if (rank == config::RankOf(parallel, runtime::ResultPlace(parallel, d))) {
      reports.result_ranks.push_back(static_cast<size_t>(d));
    }
  }
  return reports;
}

Status ReceiveMemory(comm::NodeGroup& nodes, std::vector<RankMemory>& memory) {
  const size_t num_nodes = nodes.nodes().size();
  std::vector<std::vector<RankMemory>> of_node(num_nodes);
  RETURN_IF_ERROR(ReceiveFrom(
      AllButFirst(num_nodes), [&] { return ReceiveOne(nodes.control()); },
      [&](size_t node, std::string_view bytes) -> Status {
        ASSIGN_OR_RETURN(of_node[node], DecodeMemory(bytes, nodes.nodes()[node].num_ranks));
        return OkStatus();
      }));
  for (const auto& ranks : of_node) memory.insert(memory.end(), ranks.begin(), ranks.end());
  return OkStatus();
}

Status AwaitFollowers(comm::NodeGroup& nodes) {
  return ReceiveFrom(
      AllButFirst(nodes.nodes().size()), [&] { return ReceiveOne(nodes.control()); },
      [](size_t, std::string_view) { return OkStatus(); });
}

LeadingExecutor::LeadingExecutor(const StepLimits& limits, const config::ParallelConfig& parallel,
                                 std::unique_ptr<runtime::Executor> local, comm::NodeGroup& nodes)
    : limits_(limits),
      local_(std::move(local)),
      control_(nodes.control()),
      is_remote_(static_cast<size_t>(parallel.data_parallel_size), false),
      masks_(limits.vocab_size, kNumMaskThreads),
      nothing_allowed_((static_cast<size_t>(limits.vocab_size) + 31) / 32, 0),
      messages_(nodes.nodes().size()) {
  CHECK_EQ(local_->max_in_flight(), 1);
  for (size_t node = 1; node < nodes.nodes().size(); ++node) {
    NodeReports reports = ReportsOf(parallel, nodes.nodes()[node], limits.has_disk);
    for (const size_t d : reports.result_ranks) is_remote_[d] = true;
    followers_.push_back({.reports = reports, .open = OpenStoreRequests(reports)});
  }
}

LeadingExecutor::~LeadingExecutor() {
  control_.Close();
  if (receiver_.joinable()) receiver_.join();
}

void LeadingExecutor::Watch(const std::function<void(const Status&)>& tell) {
  receiver_ = std::thread([this, tell] { RunReceiver(tell); });
}

void LeadingExecutor::RunReceiver(const std::function<void(const Status&)>& tell) {
  while (true) {
    auto message = ReceiveOne(control_);
    const Status received = message.status();
    if (received.ok() && messages_.TryPush(*std::move(message))) continue;
    end_ = received.ok() ? PeerError("a node sends more than was asked for") : received;
    messages_.Close();
    return tell(end_);
  }
}

Status LeadingExecutor::Start(std::span<const request::ScheduledBatch> batches) {
  batches_ = batches;
  RETURN_IF_ERROR(control_.Broadcast(encoder_.Encode(batches, FindMasks(batches))));
  for (Follower& follower : followers_) follower.open.Add(batches);
  return local_->Start(batches);
}

// A grammar that fails allows nothing, and its request fails.
std::vector<std::vector<TokenMask>> LeadingExecutor::FindMasks(
    std::span<const request::ScheduledBatch> batches) {
  std::vector<runtime::GrammarMasks::Sequence> sequences;
  for (size_t d = 0; d < batches.size(); ++d) {
    if (!is_remote_[d]) continue;
    for (const request::ScheduledSequence& s : batches[d].sequences) {
      sequences.push_back({.constraint = s.sample ? s.request->constraint.get() : nullptr,
                           .output = s.all_token_ids.subspan(s.request->prompt_token_ids.size())});
    }
  }
  masks_.Start(sequences);
  auto mask = masks_.Wait().begin();
  std::vector<std::vector<TokenMask>> found(batches.size());
  for (size_t d = 0; d < batches.size(); ++d) {
    if (!is_remote_[d]) continue;
    for (size_t i = 0; i < batches[d].sequences.size(); ++i, ++mask) {
      found[d].push_back(mask->status.ok() ? mask->words : TokenMask(nothing_allowed_));
    }
  }
  return found;
}

Result<std::vector<request::StepResult>> LeadingExecutor::Wait() {
  auto results = local_->Wait();
  const Status status =
      results.ok() ? ReceiveResults(std::span(results.value())) : results.status();
  if (status.ok()) return results;
  control_.Abort(status);
  return status;
}

Status LeadingExecutor::ReceiveResults(std::span<request::StepResult> results) {
  std::vector<bool> expects = {false};
  for (const Follower& follower : followers_) expects.push_back(!follower.reports.empty());
  const auto next = [this]() -> Result<comm::ControlMessage> {
    auto message = messages_.Pop();
    if (!message) return end_;
    return *std::move(message);
  };
  return ReceiveFrom(std::move(expects), next, [&](size_t node, std::string_view bytes) {
    Follower& follower = followers_[node - 1];
    return DecodeResults(bytes, limits_, follower.reports, batches_, follower.open, results);
  });
}

}  // namespace fathom::engine
