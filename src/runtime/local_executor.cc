#include "runtime/local_executor.h"

#include <utility>

#include "base/check.h"

namespace fathom::runtime {
namespace {

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
      disk_(std::move(disk)) {
  CHECK(max_in_flight <= ModelRunner::kMaxInFlight &&
        (max_in_flight == 1 || parallel.pipeline_parallel_size == 1));
  for (Rank& rank : ranks) {
    devices_.push_back(
        {.data_rank = static_cast<size_t>(rank.place.data),
         .tells_results = TellsResults(parallel, rank.place),
         .worker = std::make_unique<Worker>(std::move(rank.runner), rank.transport)});
  }
}

Status LocalExecutor::Start(std::span<const request::ScheduledBatch> batches) {
  CHECK_EQ(batches.size(), num_data_ranks_);
  for (Device& device : devices_) device.worker->Start(batches[device.data_rank]);
  in_flight_.push_back(batches);
  return OkStatus();
}

Result<std::vector<request::StepResult>> LocalExecutor::Wait() {
  std::vector<request::StepResult> results(num_data_ranks_);
  Status cause;
  for (Device& device : devices_) {
    Result<request::StepResult> result = device.worker->Wait();
    if (!result.ok()) {
      KeepCause(result.status(), cause);
    } else if (device.tells_results) {
      results[device.data_rank] = *std::move(result);
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
