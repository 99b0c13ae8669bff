// EngineLoop: the Engine, and its thread. Other threads reach the loop through a queue of commands
// only; what they ask for meanwhile (who lives, is it healthy) is under one mutex. While the worker
// runs a step, the loop delivers the events of the step before; where the device runs by itself, it
// has planned and started the next step by then.
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
#include <variant>
#include <vector>

#include "base/bounded_queue.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "engine/engine_metrics.h"
#include "engine/throughput_log.h"
#include "runtime/worker.h"
#include "scheduler/scheduler.h"

namespace fathom::engine {

struct EngineLoopOptions {
  std::string model_name;
  int max_live_requests = 0;    // running and waiting; more are refused
  int max_steps_in_flight = 1;  // 2: a step is planned while the one before runs
};

class EngineLoop final : public Engine {
 public:
  EngineLoop(const EngineLoopOptions& options, const scheduler::SchedulerOptions& scheduler_options,
             std::unique_ptr<runtime::ModelRunner> runner, MetricsRegistry& metrics,
             const Clock& clock);
  ~EngineLoop() override;  // cancels what is left

  Status Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) override;
  void Finish(request::RequestId id, request::FinishReason reason) override;
  void Drain(Duration timeout) override;
  void ResetPrefixCache() override;
  EngineStats Stats() const override;
  request::RequestId NextRequestId() override { return next_request_id_.fetch_add(1); }
  int64_t max_model_len() const override { return scheduler_.max_model_len(); }

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
  // A request on the loop's thread.
  struct Active {
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
  void Track(Submission& submission);
  void StartSteps();
  void MarkScheduled(const request::ScheduledBatch& batch);
  void DeliverOutputs();
  void Deliver(scheduler::SequenceOutput output);
  void Send(request::TokenSink& sink, request::RequestId id, request::TokenEvent event);
  void Forget(request::RequestId id);
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
  EngineMetrics metrics_;
  ThroughputLog throughput_log_;
  scheduler::Scheduler scheduler_;  // Validate and max_model_len: any thread
  std::unordered_map<request::RequestId, Active> active_;
  struct StepInFlight {
    request::ScheduledBatch batch;
    TimePoint begin;
  };
  std::deque<StepInFlight> in_flight_;              // that the worker has, oldest first
  std::vector<scheduler::SequenceOutput> outputs_;  // not delivered yet
  TimePoint output_time_;                           // of outputs_
  TimePoint step_end_;                              // of the last step that ended
  runtime::Worker worker_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fathom::engine
