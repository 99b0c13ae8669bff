#include "engine/engine_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace fathom::engine {

using request::FinishReason;
using request::RequestId;
using request::TokenEvent;

namespace {

TokenEvent LastEvent(FinishReason reason, const Status& error = OkStatus()) {
  TokenEvent event;
  event.finish_reason = reason;
  event.error = error;
  return event;
}

}  // namespace

EngineLoop::EngineLoop(const EngineLoopOptions& options,
                       const scheduler::SchedulerOptions& scheduler_options,
                       std::unique_ptr<runtime::Executor> executor, MetricsRegistry& metrics,
                       const Clock& clock)
    : options_(options),
      clock_(clock),
      // A live request is submitted once and ended at most once; those that a step has just ended
      // may still be ended by their readers; and one reset, and one failure.
      commands_(static_cast<size_t>(options.max_live_requests) * 3 + 2),
      ranks_(scheduler_options, options.num_data_ranks),
      executor_(std::move(executor)) {
  for (int rank = 0; rank < options.num_data_ranks; ++rank) {
    MetricLabels labels = {{"model_name", options.model_name}};
    if (options.num_data_ranks > 1) labels.emplace_back("engine", std::to_string(rank));
    metrics_.emplace_back(metrics, labels, scheduler_options.max_model_len);
  }
  executor_->Watch([this](const Status& status) { (void)commands_.TryPush(Failure{status}); });
  thread_ = std::thread([this] { RunThread(); });
}

EngineLoop::~EngineLoop() {
  {
    std::lock_guard lock(mutex_);
    draining_ = true;
  }
  stopping_ = true;
  commands_.Close();
  thread_.join();
}

Status EngineLoop::Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) {
  RETURN_IF_ERROR(ranks_.Validate(request));
  if (request.routed_experts_start && !options_.reports_experts) {
    return InvalidArgument(
        "routed experts are not told by a server with --pipeline-parallel-size above 1, whose "
        "stages know those of their own layers only: do not ask for them");
  }
  const RequestId id = request.id;
  std::lock_guard lock(mutex_);
  if (!stats_.healthy) return Unavailable("the engine has failed: see the log, restart the server");
  if (draining_) return Unavailable("the server is shutting down and takes no new requests");
  if (live_.size() >= static_cast<size_t>(options_.max_live_requests)) {
    return Unavailable(
        fmt::format("{} requests are running or waiting already: try again later", live_.size()));
  }
  if (!live_.emplace(id, false).second) {
    return InternalError(fmt::format("request id {} is in use", id));
  }
  // Under the mutex: a loop that dies finds every request that was let in.
  Push(Submission{std::move(request), std::move(sink)});
  return OkStatus();
}

void EngineLoop::Finish(RequestId id, FinishReason reason) {
  std::lock_guard lock(mutex_);
  const auto it = live_.find(id);
  if (it == live_.end() || it->second) return;
  it->second = true;
  Push(Ending{id, reason});
}

// There is room for every command, until the loop stops and needs none.
void EngineLoop::Push(Command command) {
  CHECK(commands_.TryPush(std::move(command)) || stopping_);
}

void EngineLoop::Drain(Duration timeout) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  const auto is_drained = [this] { return live_.empty(); };
  if (drained_.wait_for(lock, timeout, is_drained)) return;
  std::vector<RequestId> ids;
  for (const auto& [id, cancelled] : live_) ids.push_back(id);
  lock.unlock();
  LogWarning("{} requests are not done in time: they are cancelled", ids.size());
  for (const RequestId id : ids) Cancel(id);
  lock.lock();
  drained_.wait(lock, is_drained);
}

void EngineLoop::ResetPrefixCache() {
  std::lock_guard lock(mutex_);
  if (std::exchange(cache_reset_, true)) return;
  Push(CacheReset{});
}

EngineStats EngineLoop::Stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void EngineLoop::RunThread() {
  throughput_log_.Restart(clock_.Now(), 0, 0);
  Status status;
  try {
    status = RunSteps();
  } catch (const std::exception& e) {
    status = InternalError(fmt::format("the engine's loop failed: {}", e.what()));
  }
  if (status.ok()) {
    EndAll(FinishReason::kCancelled, OkStatus());
    return;
  }
  LogError("the engine stops: {}", status.message());
  EndAll(FinishReason::kError, status);
}

Status EngineLoop::RunSteps() {
  Status status;
  while (status.ok() && !stopping_) {
    TakeCommands();
    EndExpired();
    status = failure_.ok() ? RunStep() : failure_;
  }
  DeliverOutputs();  // what was sampled before the end counts
  return status;
}

Status EngineLoop::RunStep() {
  RETURN_IF_ERROR(StartSteps());
  // A reader of a last event finds its request gone from the state.
  PublishState();
  DeliverOutputs();
  if (in_flight_.empty()) return OkStatus();
  ASSIGN_OR_RETURN(const auto results, executor_->Wait());
  const StepInFlight& step = in_flight_.front();
  // The devices began with it when it was started, or when they were done with the step before.
  const TimePoint begin = std::max(step.begin, step_end_);
  step_end_ = output_time_ = clock_.Now();
  CountStep(step.plan);
  outputs_ = ranks_.Commit(step.plan, results, output_time_ - begin);
  in_flight_.pop_front();
  return OkStatus();
}

void EngineLoop::CountStep(const DataRanks::Step& step) {
  for (size_t d = 0; d < ranks_.size(); ++d) {
    const request::ScheduledBatch& batch = step.batches[d];
    if (!batch.sequences.empty()) metrics_[d].OnStep(batch.num_tokens());
  }
}

Status EngineLoop::StartSteps() {
  const auto most = static_cast<size_t>(executor_->max_in_flight());
  while (in_flight_.size() < most && ranks_.CanSchedule()) {
    const TimePoint begin = clock_.Now();
    DataRanks::Step plan = ranks_.Schedule();
    if (plan.empty()) break;
    in_flight_.push_back({std::move(plan), begin});
    const auto& batches = in_flight_.back().plan.batches;
    RETURN_IF_ERROR(executor_->Start(batches));
    for (const request::ScheduledBatch& batch : batches) MarkScheduled(batch);
  }
  return OkStatus();
}

void EngineLoop::TakeCommands() {
  if (!ranks_.HasWork() && outputs_.empty() && in_flight_.empty()) {
    PublishState();  // what the last step's result changed
    std::optional<Command> command = commands_.Pop();
    const auto [num_prompt_tokens, num_generation_tokens] = NumTokens();
    throughput_log_.Restart(clock_.Now(), num_prompt_tokens, num_generation_tokens);
    if (!command) return;
    Handle(std::move(*command));
  }
  while (std::optional<Command> command = commands_.TryPop()) Handle(std::move(*command));
}

void EngineLoop::Handle(Command command) {
  if (const auto* ending = std::get_if<Ending>(&command)) {
    // Unknown: it has finished, and its last event is on its way.
    if (!ranks_.Cancel(ending->id)) return;
    AddOutput({.request_id = ending->id, .event = LastEvent(ending->reason)});
    return;
  }
  if (std::holds_alternative<CacheReset>(command)) {
    ranks_.ClearCache();
    std::lock_guard lock(mutex_);
    cache_reset_ = false;
    return;
  }
  if (auto* failure = std::get_if<Failure>(&command)) {
    failure_ = std::move(failure->status);
    return;
  }
  auto& submission = std::get<Submission>(command);
  Active& active = Track(submission);
  active.data_rank = ranks_.Submit(std::move(submission.request));
}

void EngineLoop::EndExpired() {
  for (scheduler::SequenceOutput& output : ranks_.EndExpired(clock_.Now())) {
    AddOutput(std::move(output));
  }
}

// Beside those of the last step.
void EngineLoop::AddOutput(scheduler::SequenceOutput output) {
  if (outputs_.empty()) output_time_ = clock_.Now();
  outputs_.push_back(std::move(output));
}

EngineLoop::Active& EngineLoop::Track(Submission& submission) {
  Active& active = active_[submission.request.id];
  active.sink = std::move(submission.sink);
  active.times.arrival = submission.request.arrival;
  active.num_prompt_tokens = submission.request.prompt_token_ids.size();
  return active;
}

void EngineLoop::MarkScheduled(const request::ScheduledBatch& batch) {
  const TimePoint now = clock_.Now();
  for (const request::ScheduledSequence& s : batch.sequences) {
    RequestTimes& times = active_.at(s.request_id).times;
    if (!times.scheduled) times.scheduled = now;
  }
}

void EngineLoop::DeliverOutputs() {
  for (scheduler::SequenceOutput& output : outputs_) Deliver(std::move(output));
  outputs_.clear();
}

void EngineLoop::Deliver(scheduler::SequenceOutput output) {
  const RequestId id = output.request_id;
  Active& active = active_.at(id);
  EngineMetrics& metrics = metrics_[active.data_rank];
  const size_t num_new_tokens = output.event.token_ids.size();
  if (num_new_tokens > 0) {
    metrics.OnTokens(active.times, output_time_, active.num_prompt_tokens, num_new_tokens);
    if (!active.times.first_token) active.times.first_token = output_time_;
    active.times.last_token = output_time_;
    active.num_output_tokens += num_new_tokens;
  }
  const auto finish_reason = output.event.finish_reason;
  Send(*active.sink, id, std::move(output.event));
  if (!finish_reason) return;
  metrics.OnFinish(active.times, output_time_, *finish_reason, active.num_prompt_tokens,
                   active.num_output_tokens);
  active_.erase(id);
  Forget(id);
}

void EngineLoop::Send(request::TokenSink& sink, RequestId id, TokenEvent event) {
  try {
    sink.OnEvent(std::move(event));
  } catch (const std::exception& e) {
    LogError("request {} is cancelled: its reader failed: {}", id, e.what());
    Cancel(id);
  }
}

void EngineLoop::Forget(RequestId id) {
  std::lock_guard lock(mutex_);
  live_.erase(id);
  if (live_.empty()) drained_.notify_all();
}

std::pair<uint64_t, uint64_t> EngineLoop::NumTokens() const {
  uint64_t num_prompt_tokens = 0, num_generation_tokens = 0;
  for (const EngineMetrics& metrics : metrics_) {
    num_prompt_tokens += metrics.num_prompt_tokens();
    num_generation_tokens += metrics.num_generation_tokens();
  }
  return {num_prompt_tokens, num_generation_tokens};
}

void EngineLoop::PublishState() {
  EngineStats stats;
  for (size_t d = 0; d < ranks_.size(); ++d) {
    const scheduler::Scheduler& s = ranks_.scheduler(d);
    metrics_[d].SetState(s.num_running(), s.num_waiting(), s.cache().usage(), s.num_preemptions(),
                         s.session_spread_seconds());
    metrics_[d].SetCacheStats(s.cache().stats());
    stats.num_running += s.num_running();
    stats.num_waiting += s.num_waiting();
    stats.kv_cache_usage += s.cache().usage() / static_cast<double>(ranks_.size());
  }
  const auto [num_prompt_tokens, num_generation_tokens] = NumTokens();
  throughput_log_.Update(clock_.Now(), num_prompt_tokens, num_generation_tokens, stats);
  std::lock_guard lock(mutex_);
  stats_ = stats;
}

void EngineLoop::EndAll(FinishReason reason, const Status& error) {
  {
    std::lock_guard lock(mutex_);
    draining_ = true;
    stats_ = {.healthy = reason != FinishReason::kError, .error = error};
  }
  for (size_t d = 0; d < ranks_.size(); ++d) {
    metrics_[d].SetState(0, 0, 0, ranks_.scheduler(d).num_preemptions(), 0);
  }
  while (std::optional<Command> command = commands_.TryPop()) {
    if (auto* submission = std::get_if<Submission>(&*command)) Track(*submission);
  }
  for (auto& [id, active] : active_) {
    Send(*active.sink, id, LastEvent(reason, error));
    metrics_[active.data_rank].OnFinish(active.times, clock_.Now(), reason,
                                        active.num_prompt_tokens, active.num_output_tokens);
  }
  active_.clear();
  std::lock_guard lock(mutex_);
  live_.clear();
  drained_.notify_all();
}

}  // namespace fathom::engine
