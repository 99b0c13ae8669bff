// DataRanks: the schedulers of all data ranks as one. A request is given to a data rank
// (data_rank_choice.h), which keeps it to its end. A step is planned for all of them at once, when
// all can be planned; who has nothing to do takes part with an empty batch, and no step is run for
// nobody. Host code only, deterministic. One thread (the engine's); Validate and max_model_len from
// any.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "request/scheduled_batch.h"
#include "scheduler/scheduler.h"

namespace fathom::engine {

class DataRanks {
 public:
  // Each has a scheduler with these options.
  DataRanks(const scheduler::SchedulerOptions& options, int num_ranks);

  // As Scheduler's, and for a data rank that there is not.
  Status Validate(const request::Request& request) const;
  int64_t max_model_len() const { return schedulers_[0]->max_model_len(); }

  // Queues a valid request. The data rank that runs it.
  size_t Submit(request::Request request);
  bool Cancel(request::RequestId id);
  std::vector<scheduler::SequenceOutput> EndExpired(TimePoint now);

  struct Step {
    std::vector<request::ScheduledBatch> batches;  // of each data rank
    scheduler::StepLoad load;                      // of the one with most to do
    bool empty() const;                            // nothing to run, and no need for a Commit
  };
  bool CanSchedule() const;
  // Batches view and live as Scheduler::Schedule's.
  Step Schedule();
  // Takes the results of the oldest step in flight, by data rank.
  std::vector<scheduler::SequenceOutput> Commit(const Step& step,
                                                const std::vector<request::StepResult>& results,
                                                Duration step_time);

  bool HasWork() const;
  void ClearCache();
  size_t size() const { return schedulers_.size(); }
  const scheduler::Scheduler& scheduler(size_t data_rank) const { return *schedulers_[data_rank]; }
  // Requests and sessions that live; a test looks for leaks.
  size_t num_live() const { return places_.size(); }
  size_t num_live_sessions() const { return sessions_.size(); }

 private:
  // A session that has live requests.
  struct SessionPlace {
    size_t data_rank = 0;  // of its newest request
    int num_live = 0;
  };
  struct Place {
    size_t data_rank = 0;
    std::string session;
  };
  size_t Choose(const request::Request& request) const;
  void Remember(const request::Request& request, size_t data_rank);
  void Forget(request::RequestId id);
  void TakeOutputs(std::vector<scheduler::SequenceOutput> outputs,
                   std::vector<scheduler::SequenceOutput>& all);

  std::vector<std::unique_ptr<scheduler::Scheduler>> schedulers_;
  std::unordered_map<request::RequestId, Place> places_;
  std::unordered_map<std::string, SessionPlace> sessions_;
};

}  // namespace fathom::engine
