// EngineLoop: the Engine, and its thread. Other threads reach the loop through a queue of commands
// only; what they ask for meanwhile (who lives, is it healthy) is under one mutex. While the
// workers run a step, the loop delivers the events of the step before; where devices run by
// themselves, it has planned and started the next step by then.
//
// Each data rank has a scheduler, and keeps the requests that it was given (data_rank_choice.h). A
// step is planned for all of them at once, when all can be planned; who has nothing to do takes
// part with an empty batch, and no step is run for nobody.
//
// Whatever goes wrong in a step ends the loop: the engine is unhealthy from then on, every request
// gets kError, and nothing waits forever. A sink that throws loses its request only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/bounded_queue.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "engine/engine_metrics.h"
#include "engine/throughput_log.h"
#include "runtime/executor.h"
#include "scheduler/scheduler.h"

namespace fathom::engine {

struct EngineLoopOptions {
  std::string model_name;
  int max_live_requests = 0;  // running and waiting; more are refused
  int num_data_ranks = 1;
  bool reports_experts = true;  // false: one that asks for the experts of its tokens is refused
};

class EngineLoop final : public Engine {
 public:
  // `scheduler_options` are each data rank's.
  EngineLoop(const EngineLoopOptions& options, const scheduler::SchedulerOptions& scheduler_options,
             std::unique_ptr<runtime::Executor> executor, MetricsRegistry& metrics,
             const Clock& clock);
  ~EngineLoop() override;  // cancels what is left

  Status Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) override;
  void Finish(request::RequestId id, request::FinishReason reason) override;
  void Drain(Duration timeout) override;
  void ResetPrefixCache() override;
  EngineStats Stats() const override;
  request::RequestId NextRequestId() override { return next_request_id_.fetch_add(1); }
  int64_t max_model_len() const override { return ranks_[0]->scheduler.max_model_len(); }

 private:
  struct Submission {
    request::Request request;
    std::shared_ptr<request::TokenSink> sink;
  };
  struct Ending {
    request::RequestId id;
    request::FinishReason reason;
  };
  struct CacheReset {};
  using Command = std::variant<Submission, Ending, CacheReset>;
  struct DataRank {
    scheduler::Scheduler scheduler;  // Validate and max_model_len: any thread
    EngineMetrics metrics;
  };
  struct StepInFlight {
    std::vector<request::ScheduledBatch> batches;  // of each data rank
    scheduler::StepLoad load;                      // of the one with most to do
    TimePoint begin;
  };
  // A session that has live requests.
  struct SessionPlace {
    size_t data_rank = 0;  // of its newest request
    int num_live = 0;
  };
  // A request on the loop's thread.
  struct Active {
    size_t data_rank = 0;
    std::string session;
    std::shared_ptr<request::TokenSink> sink;
    RequestTimes times;
    size_t num_prompt_tokens = 0;
    size_t num_output_tokens = 0;
  };

  void RunThread();
  Status RunSteps();
  Status RunStep();
  void TakeCommands();
  void Handle(Command command);
  void EndExpired();
  void AddOutput(scheduler::SequenceOutput output);
  void Track(Submission& submission, size_t data_rank);
  void Untrack(request::RequestId id);
  size_t DataRankFor(const request::Request& request) const;
  bool HasWork() const;
  bool CanSchedule() const;
  Status StartSteps();
  StepInFlight PlanStep();
  void Commit(const StepInFlight& step, const std::vector<request::StepResult>& results,
              Duration step_time);
  void MarkScheduled(const request::ScheduledBatch& batch);
  void DeliverOutputs();
  void Deliver(scheduler::SequenceOutput output);
  void Send(request::TokenSink& sink, request::RequestId id, request::TokenEvent event);
  void Forget(request::RequestId id);
  // Of all prompts and all output since the start.
  std::pair<uint64_t, uint64_t> NumTokens() const;
  void PublishState();
  // Ends every request, those still in the queue too.
  void EndAll(request::FinishReason reason, const Status& error);

  const EngineLoopOptions options_;
  const Clock& clock_;
  std::atomic<request::RequestId> next_request_id_{1};
  std::atomic<bool> stopping_{false};
  BoundedQueue<Command> commands_;

  mutable std::mutex mutex_;
  std::condition_variable drained_;
  std::unordered_map<request::RequestId, bool> live_;  // guarded; whether an ending is on its way
  bool draining_ = false;                              // guarded
  bool cache_reset_ = false;                           // guarded; one is on its way
  EngineStats stats_;                                  // guarded

  // The loop's thread alone.
  std::vector<std::unique_ptr<DataRank>> ranks_;
  ThroughputLog throughput_log_;
  std::unordered_map<request::RequestId, Active> active_;
  std::unordered_map<std::string, SessionPlace> sessions_;
  std::deque<StepInFlight> in_flight_;              // that the executor has, oldest first
  std::vector<scheduler::SequenceOutput> outputs_;  // not delivered yet
  TimePoint output_time_;                           // of outputs_
  TimePoint step_end_;                              // of the last step that ended
  std::unique_ptr<runtime::Executor> executor_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fathom::engine
