// EngineLoop: the Engine, and its thread. Other threads reach the loop through a queue of commands
// only; what they ask for meanwhile (who lives, is it healthy) is under one mutex. While the
// workers run a step, the loop delivers the events of the step before; where devices run by
// themselves, it has planned and started the next step by then.
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
#include "engine/data_ranks.h"
#include "engine/engine.h"
#include "engine/engine_metrics.h"
#include "engine/throughput_log.h"
#include "runtime/executor.h"

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
  int64_t max_model_len() const override { return ranks_.max_model_len(); }

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
  struct Failure {  // of a rank, when no step runs
    Status status;
  };
  using Command = std::variant<Submission, Ending, CacheReset, Failure>;
  struct StepInFlight {
    DataRanks::Step plan;
    TimePoint begin;
  };
  // A request on the loop's thread.
  struct Active {
    size_t data_rank = 0;
    std::shared_ptr<request::TokenSink> sink;
    RequestTimes times;
    size_t num_prompt_tokens = 0;
    size_t num_output_tokens = 0;
  };

  void Push(Command command);
  void RunThread();
  Status RunSteps();
  Status RunStep();
  void TakeCommands();
  void Handle(Command command);
  void EndExpired();
  void AddOutput(scheduler::SequenceOutput output);
  Active& Track(Submission& submission);
  Status StartSteps();
  void CountStep(const DataRanks::Step& step);
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
  DataRanks ranks_;                     // Validate and max_model_len: any thread
  std::vector<EngineMetrics> metrics_;  // by data rank
  ThroughputLog throughput_log_;
  std::unordered_map<request::RequestId, Active> active_;
  Status failure_;                                  // that ends the loop
  std::deque<StepInFlight> in_flight_;              // that the executor has, oldest first
  std::vector<scheduler::SequenceOutput> outputs_;  // not delivered yet
  TimePoint output_time_;                           // of outputs_
  TimePoint step_end_;                              // of the last step that ended
  std::unique_ptr<runtime::Executor> executor_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fathom::engine
