#include "runtime/local_executor.h"

#include <chrono>
#include <optional>
#include <utility>

#include "base/check.h"

namespace fathom::runtime {
namespace {

// When one rank has failed, how long each of the others may take to end its step, too.
constexpr auto kPatience = std::chrono::seconds(2);

bool TellsResults(const config::ParallelConfig& parallel, const config::RankPlace& place) {
  return place.tensor == 0 && place.pipeline == parallel.pipeline_parallel_size - 1;
}

// The cause, where the others only say that a peer is gone.
void KeepCause(const Status& status, Status& cause) {
  const bool is_cause = cause.ok() || (cause.code() == StatusCode::kPeer && !status.ok() &&
                                       status.code() != StatusCode::kPeer);
  if (is_cause) cause = status;
}

}  // namespace

Sampling SamplingOf(const config::ParallelConfig& parallel, const config::RankPlace& place,
                    int max_in_flight) {
  if (TellsResults(parallel, place)) return Sampling::kResults;
  return max_in_flight > 1 ? Sampling::kTokens : Sampling::kNone;
}

LocalExecutor::LocalExecutor(const config::ParallelConfig& parallel, std::vector<Rank> ranks,
                             int max_in_flight, std::unique_ptr<RankDisk> disk)
    : num_data_ranks_(static_cast<size_t>(parallel.data_parallel_size)),
      max_in_flight_(max_in_flight),
      told_(ranks.size()),
      disk_(std::move(disk)) {
  CHECK(max_in_flight <= ModelRunner::kMaxInFlight &&
        (max_in_flight == 1 || parallel.pipeline_parallel_size == 1));
  for (Rank& rank : ranks) {
    const auto tell = [this, device = devices_.size()](Result<request::StepResult> result) {
      CHECK(told_.TryPush({device, std::move(result)}));
    };
    devices_.push_back(
        {.data_rank = static_cast<size_t>(rank.place.data),
         .tells_results = TellsResults(parallel, rank.place),
         .worker = std::make_unique<Worker>(std::move(rank.runner), rank.transport, tell)});
  }
}

Status LocalExecutor::Start(std::span<const request::ScheduledBatch> batches) {
  CHECK_EQ(batches.size(), num_data_ranks_);
  for (Device& device : devices_) device.worker->Start(batches[device.data_rank]);
  in_flight_.push_back(batches);
  return OkStatus();
}

Result<std::vector<request::StepResult>> LocalExecutor::Wait() {
  for (Device& device : devices_) device.worker->Collect();
  std::vector<request::StepResult> results(num_data_ranks_);
  Status cause;
  for (size_t i = 0; i < devices_.size(); ++i) {
    std::optional<Told> told = cause.ok() ? told_.Pop() : told_.PopFor(kPatience);
    if (!told) break;
    const Device& device = devices_[told->device];
    if (!told->result.ok()) {
      KeepCause(told->result.status(), cause);
    } else if (device.tells_results) {
      results[device.data_rank] = *std::move(told->result);
    }
  }
  if (!cause.ok()) return cause;
  if (disk_ != nullptr) {
    disk_->Submit(in_flight_.front());
    disk_->TakeEvents(results);
  }
  in_flight_.pop_front();
  return results;
}

}  // namespace fathom::runtime
