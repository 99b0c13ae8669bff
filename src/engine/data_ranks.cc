#include "engine/data_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/data_rank_choice.h"

namespace fathom::engine {

using scheduler::SequenceOutput;

DataRanks::DataRanks(const scheduler::SchedulerOptions& options, int num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedulers_.push_back(std::make_unique<scheduler::Scheduler>(options));
  }
}

Status DataRanks::Validate(const request::Request& request) const {
  const int num_ranks = static_cast<int>(size());
  if (request.data_rank && !(*request.data_rank >= 0 && *request.data_rank < num_ranks)) {
    return InvalidArgument(fmt::format(
        "X-data-parallel-rank must be 0 to {}, with --data-parallel-size {}: correct it, or leave "
        "it out",
        num_ranks - 1, num_ranks));
  }
  return schedulers_[0]->Validate(request);
}

size_t DataRanks::Submit(request::Request request) {
  const size_t data_rank = Choose(request);
  Remember(request, data_rank);
  schedulers_[data_rank]->Submit(std::move(request));
  return data_rank;
}

size_t DataRanks::Choose(const request::Request& request) const {
  if (request.data_rank) return static_cast<size_t>(*request.data_rank);
  if (size() == 1) return 0;
  std::vector<DataRankState> states;
  for (const auto& s : schedulers_) {
    states.push_back({.num_waiting = s->num_waiting(),
                      .num_running = s->num_running(),
                      .num_tokens = s->num_tokens(),
                      .num_cached_tokens = s->NumCachedTokens(request)});
  }
  const auto session = sessions_.find(request.session);
  return ChooseDataRank(
      states, session == sessions_.end() ? std::nullopt : std::optional(session->second.data_rank));
}

void DataRanks::Remember(const request::Request& request, size_t data_rank) {
  places_[request.id] = {.data_rank = data_rank, .session = request.session};
  if (request.session.empty()) return;
  SessionPlace& session = sessions_[request.session];
  session.data_rank = data_rank;
  ++session.num_live;
}

void DataRanks::Forget(request::RequestId id) {
  const auto place = places_.find(id);
  const auto session = sessions_.find(place->second.session);
  if (session != sessions_.end() && --session->second.num_live == 0) sessions_.erase(session);
  places_.erase(place);
}

bool DataRanks::Cancel(request::RequestId id) {
  const auto place = places_.find(id);
  if (place == places_.end()) return false;
  const bool cancelled = schedulers_[place->second.data_rank]->Cancel(id);
  Forget(id);
  return cancelled;
}

void DataRanks::TakeOutputs(std::vector<SequenceOutput> outputs, std::vector<SequenceOutput>& all) {
  for (SequenceOutput& output : outputs) {
    if (output.event.finish_reason) Forget(output.request_id);
    all.push_back(std::move(output));
  }
}

std::vector<SequenceOutput> DataRanks::EndExpired(TimePoint now) {
  std::vector<SequenceOutput> outputs;
  for (const auto& scheduler : schedulers_) TakeOutputs(scheduler->EndExpired(now), outputs);
  return outputs;
}

bool DataRanks::Step::empty() const {
  return std::all_of(batches.begin(), batches.end(),
                     [](const request::ScheduledBatch& batch) { return batch.empty(); });
}

bool DataRanks::CanSchedule() const {
  return std::all_of(schedulers_.begin(), schedulers_.end(),
                     [](const auto& scheduler) { return scheduler->CanSchedule(); });
}

DataRanks::Step DataRanks::Schedule() {
  Step step;
  int most_decodes = 0;
  for (const auto& scheduler : schedulers_) {
    if (size() > 1) most_decodes = std::max(most_decodes, scheduler->NumDecodes());
  }
  for (const auto& scheduler : schedulers_) {
    step.batches.push_back(scheduler->Schedule(most_decodes));
    if (!step.batches.back().empty()) step.load.TakeMost(scheduler->load());
  }
  if (size() > 1) request::TellDataRanks(step.batches);
  return step;
}

std::vector<SequenceOutput> DataRanks::Commit(const Step& step,
                                              const std::vector<request::StepResult>& results,
                                              Duration step_time) {
  std::vector<SequenceOutput> outputs;
  for (size_t d = 0; d < size(); ++d) {
    if (step.batches[d].empty()) {
      schedulers_[d]->OnPeersStep(results[d], step_time, step.load);
    } else {
      TakeOutputs(schedulers_[d]->Commit(results[d], step_time, step.load), outputs);
    }
  }
  return outputs;
}

bool DataRanks::HasWork() const {
  return std::any_of(schedulers_.begin(), schedulers_.end(),
                     [](const auto& scheduler) { return scheduler->HasWork(); });
}

void DataRanks::ClearCache() {
  for (const auto& scheduler : schedulers_) scheduler->ClearCache();
}

}  // namespace fathom::engine
