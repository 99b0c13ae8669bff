#include "engine/engine_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "engine/data_rank_choice.h"

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

Status CheckPlace(const EngineLoopOptions& options, const request::Request& request) {
  const int num_data_ranks = options.num_data_ranks;
  if (request.data_rank && !(*request.data_rank >= 0 && *request.data_rank < num_data_ranks)) {
    return InvalidArgument(
        fmt::format("X-data-parallel-rank must be 0 to {}, for --data-parallel-size {}: correct "
                    "it, or leave it "
                    "out",
                    num_data_ranks - 1, num_data_ranks));
  }
  if (request.routed_experts_start && !options.reports_experts) {
    return InvalidArgument(
        "routed experts are not told by a server with --pipeline-parallel-size above 1, whose "
        "stages know those of their own layers only: do not ask for them");
  }
  return OkStatus();
}

}  // namespace

EngineLoop::EngineLoop(const EngineLoopOptions& options,
                       const scheduler::SchedulerOptions& scheduler_options,
                       std::unique_ptr<runtime::Executor> executor, MetricsRegistry& metrics,
                       const Clock& clock)
    : options_(options),
      clock_(clock),
      // A live request is submitted once and ended at most once; and one reset.
      commands_(static_cast<size_t>(options.max_live_requests) * 2 + 1),
      executor_(std::move(executor)) {
  for (int rank = 0; rank < options.num_data_ranks; ++rank) {
    MetricLabels labels = {{"model_name", options.model_name}};
    if (options.num_data_ranks > 1) labels.emplace_back("engine", std::to_string(rank));
    ranks_.push_back(std::unique_ptr<DataRank>(
        new DataRank{.scheduler = scheduler::Scheduler(scheduler_options),
                     .metrics = EngineMetrics(metrics, labels, scheduler_options.max_model_len)}));
  }
  thread_ = std::thread([this] { RunThread(); });
}

EngineLoop::~EngineLoop() {
  stopping_ = true;
  commands_.Close();
  thread_.join();
}

Status EngineLoop::Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) {
  RETURN_IF_ERROR(ranks_[0]->scheduler.Validate(request));
  RETURN_IF_ERROR(CheckPlace(options_, request));
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
  CHECK(commands_.TryPush(Submission{std::move(request), std::move(sink)}));
  return OkStatus();
}

void EngineLoop::Finish(RequestId id, FinishReason reason) {
  std::lock_guard lock(mutex_);
  const auto it = live_.find(id);
  if (it == live_.end() || it->second) return;
  it->second = true;
  CHECK(commands_.TryPush(Ending{id, reason}));
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
  CHECK(commands_.TryPush(CacheReset{}));
}

EngineStats EngineLoop::Stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void EngineLoop::RunThread() {
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
  while (!stopping_) {
    TakeCommands();
    EndExpired();
    RETURN_IF_ERROR(RunStep());
  }
  DeliverOutputs();
  return OkStatus();
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
  Commit(step, results, output_time_ - begin);
  in_flight_.pop_front();
  return OkStatus();
}

void EngineLoop::Commit(const StepInFlight& step, const std::vector<request::StepResult>& results,
                        Duration step_time) {
  for (size_t d = 0; d < ranks_.size(); ++d) {
    DataRank& rank = *ranks_[d];
    if (step.batches[d].empty()) {
      rank.scheduler.OnPeersStep(step.load, step_time);
      continue;
    }
    if (!step.batches[d].sequences.empty()) rank.metrics.OnStep(step.batches[d].num_tokens());
    for (auto& output : rank.scheduler.Commit(results[d], step_time, step.load)) {
      outputs_.push_back(std::move(output));
    }
  }
}

bool EngineLoop::HasWork() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& rank) { return rank->scheduler.HasWork(); });
}

bool EngineLoop::CanSchedule() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const auto& rank) { return rank->scheduler.CanSchedule(); });
}

Status EngineLoop::StartSteps() {
  const auto most = static_cast<size_t>(executor_->max_in_flight());
  while (in_flight_.size() < most && CanSchedule()) {
    StepInFlight step = PlanStep();
    if (std::all_of(step.batches.begin(), step.batches.end(),
                    [](const auto& batch) { return batch.empty(); })) {
      break;
    }
    in_flight_.push_back(std::move(step));
    RETURN_IF_ERROR(executor_->Start(in_flight_.back().batches));
    for (const auto& batch : in_flight_.back().batches) MarkScheduled(batch);
  }
  return OkStatus();
}

EngineLoop::StepInFlight EngineLoop::PlanStep() {
  StepInFlight step;
  step.begin = clock_.Now();
  int most_decodes = 0;
  for (const auto& rank : ranks_) {
    if (ranks_.size() > 1) most_decodes = std::max(most_decodes, rank->scheduler.NumDecodes());
  }
  std::vector<int32_t> num_tokens;
  for (const auto& rank : ranks_) {
    step.batches.push_back(rank->scheduler.Schedule(most_decodes));
    if (!step.batches.back().empty()) step.load.TakeMost(rank->scheduler.load());
    num_tokens.push_back(step.batches.back().num_tokens());
  }
  if (ranks_.size() == 1) return step;
  for (auto& batch : step.batches) batch.data_rank_tokens = num_tokens;
  return step;
}

void EngineLoop::TakeCommands() {
  if (!HasWork() && outputs_.empty() && in_flight_.empty()) {
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
    const auto active = active_.find(ending->id);
    // Unknown: it has finished, and its last event is on its way.
    if (active == active_.end() ||
        !ranks_[active->second.data_rank]->scheduler.Cancel(ending->id)) {
      return;
    }
    AddOutput({.request_id = ending->id, .event = LastEvent(ending->reason)});
    return;
  }
  if (std::holds_alternative<CacheReset>(command)) {
    for (const auto& rank : ranks_) rank->scheduler.ClearCache();
    std::lock_guard lock(mutex_);
    cache_reset_ = false;
    return;
  }
  auto& submission = std::get<Submission>(command);
  const size_t data_rank = DataRankFor(submission.request);
  Track(submission, data_rank);
  ranks_[data_rank]->scheduler.Submit(std::move(submission.request));
}

size_t EngineLoop::DataRankFor(const request::Request& request) const {
  if (request.data_rank) return static_cast<size_t>(*request.data_rank);
  if (ranks_.size() == 1) return 0;
  std::vector<DataRankState> states;
  for (const auto& rank : ranks_) {
    const scheduler::Scheduler& s = rank->scheduler;
    states.push_back({.num_waiting = s.num_waiting(),
                      .num_running = s.num_running(),
                      .num_tokens = s.num_tokens(),
                      .num_cached_tokens = s.NumCachedTokens(request)});
  }
  const auto session = sessions_.find(request.session);
  return ChooseDataRank(
      states, session == sessions_.end() ? std::nullopt : std::optional(session->second.data_rank));
}

void EngineLoop::EndExpired() {
  for (const auto& rank : ranks_) {
    for (scheduler::SequenceOutput& output : rank->scheduler.EndExpired(clock_.Now())) {
      AddOutput(std::move(output));
    }
  }
}

// Beside those of the last step.
void EngineLoop::AddOutput(scheduler::SequenceOutput output) {
  if (outputs_.empty()) output_time_ = clock_.Now();
  outputs_.push_back(std::move(output));
}

void EngineLoop::Track(Submission& submission, size_t data_rank) {
  Active& active = active_[submission.request.id];
  active.data_rank = data_rank;
  active.session = submission.request.session;
  if (!active.session.empty()) {
    SessionPlace& place = sessions_[active.session];
    place.data_rank = data_rank;
    ++place.num_live;
  }
  active.sink = std::move(submission.sink);
  active.times.arrival = submission.request.arrival;
  active.num_prompt_tokens = submission.request.prompt_token_ids.size();
}

void EngineLoop::Untrack(RequestId id) {
  const auto active = active_.find(id);
  const auto session = sessions_.find(active->second.session);
  if (session != sessions_.end() && --session->second.num_live == 0) sessions_.erase(session);
  active_.erase(active);
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
  EngineMetrics& metrics = ranks_[active.data_rank]->metrics;
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
  Untrack(id);
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
  for (const auto& rank : ranks_) {
    num_prompt_tokens += rank->metrics.num_prompt_tokens();
    num_generation_tokens += rank->metrics.num_generation_tokens();
  }
  return {num_prompt_tokens, num_generation_tokens};
}

void EngineLoop::PublishState() {
  EngineStats stats;
  for (const auto& rank : ranks_) {
    const scheduler::Scheduler& s = rank->scheduler;
    rank->metrics.SetState(s.num_running(), s.num_waiting(), s.cache().usage(), s.num_preemptions(),
                           s.session_spread_seconds());
    rank->metrics.SetCacheStats(s.cache().stats());
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
  for (const auto& rank : ranks_) {
    rank->metrics.SetState(0, 0, 0, rank->scheduler.num_preemptions(), 0);
  }
  while (std::optional<Command> command = commands_.TryPop()) {
    if (auto* submission = std::get_if<Submission>(&*command)) Track(*submission, 0);
  }
  for (auto& [id, active] : active_) {
    Send(*active.sink, id, LastEvent(reason, error));
    ranks_[active.data_rank]->metrics.OnFinish(active.times, clock_.Now(), reason,
                                               active.num_prompt_tokens, active.num_output_tokens);
  }
  active_.clear();
  std::lock_guard lock(mutex_);
  live_.clear();
  drained_.notify_all();
}

}  // namespace fathom::engine
