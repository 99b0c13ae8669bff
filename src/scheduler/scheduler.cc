#include "scheduler/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "scheduler/stop_rules.h"

namespace fathom::scheduler {

namespace {

// Of a step whose time is not known: virtual time must go on for nobody to starve.
constexpr double kLeastSecondsPerToken = 1e-7;

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options),
      max_model_len_(std::min(options.max_model_len,
                              int64_t{options.cache.pools.num_blocks} * kv_cache::kBlockTokens)),
      cache_(options.cache),
      pacer_(options.decode_floor) {
  CHECK_GE(options.max_num_seqs, 1);
  CHECK_GE(options.max_num_batched_tokens, options.max_num_seqs);
  CHECK_GE(options.max_logits_rows, options.max_num_seqs);
}

Status Scheduler::Validate(const request::Request& request) const {
  const std::vector<int32_t>& prompt = request.prompt_token_ids;
  if (prompt.empty()) return InvalidArgument("the prompt is empty: it needs at least one token");
  for (const int32_t id : prompt) {
    if (id < 0 || id >= options_.vocab_size) {
      return InvalidArgument(fmt::format("token id {} is not in the vocabulary: it must be 0 to {}",
                                         id, options_.vocab_size - 1));
    }
  }
  if (request.sampling.max_tokens < 1) {
    return InvalidArgument(
        fmt::format("max_tokens must be at least 1, got {}", request.sampling.max_tokens));
  }
  const auto num_prompt_tokens = static_cast<int64_t>(prompt.size());
  if (num_prompt_tokens >= max_model_len_) {
    return InvalidArgument(
        fmt::format("the prompt has {} tokens; prompt and output together may have {}: shorten the "
                    "prompt",
                    num_prompt_tokens, max_model_len_));
  }
  if (request.routed_experts_start.value_or(0) > num_prompt_tokens) {
    return InvalidArgument(
        fmt::format("routed_experts_prompt_start is {}: the prompt has {} tokens",
                    *request.routed_experts_start, num_prompt_tokens));
  }
  return OkStatus();
}

void Scheduler::Submit(request::Request request) {
  const request::RequestId id = request.id;
  auto sequence = std::make_shared<Sequence>();
  sequence->request = std::move(request);
  sequence->order = next_order_++;
  sequence->token_ids = sequence->request.prompt_token_ids;
  sequence->num_prompt_tokens = sequence->num_tokens();
  sequence->experts_end = sequence->request.routed_experts_start.value_or(0);
  sequence->session = sessions_.Join(sequence->request.session);
  sequence->finish_tag = sequence->session->virtual_seconds +
                         pacer_.PrefillSeconds(sequence->num_tokens() -
                                               cache_.NumCachedTokens(MakeAdmitRequest(*sequence)));
  if (sequence->request.deadline) deadlines_.emplace(*sequence->request.deadline, id);
  waiting_.insert(sequence.get());
  CHECK(sequences_.emplace(id, std::move(sequence)).second);
}

bool Scheduler::Cancel(request::RequestId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return false;
  Finish(*it->second);
  return true;
}

std::vector<SequenceOutput> Scheduler::EndExpired(TimePoint now) {
  std::vector<SequenceOutput> outputs;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Sequence& sequence = *sequences_.at(deadlines_.begin()->second);
    SequenceOutput output{.request_id = sequence.request.id, .event = {}};
    output.event.finish_reason = request::FinishReason::kError;
    output.event.error = Unavailable(fmt::format(
        "the request's deadline passed when {} of its {} prompt tokens were computed and {} output "
        "tokens generated: try again later or give it more time",
        std::min(sequence.num_computed_tokens, sequence.num_prompt_tokens),
        sequence.num_prompt_tokens, sequence.num_output_tokens()));
    Finish(sequence);
    outputs.push_back(std::move(output));
  }
  return outputs;
}

void Scheduler::Finish(Sequence& sequence) {
  cache_.Release(sequence.kv, sequence.token_ids, sequence.num_computed_tokens);
  sessions_.Leave(*sequence.session);
  if (sequence.request.deadline) {
    deadlines_.erase({*sequence.request.deadline, sequence.request.id});
  }
  if (blocked_ == &sequence) blocked_ = nullptr;
  running_.erase(&sequence);
  waiting_.erase(&sequence);
  sequence.finished = true;
  sequences_.erase(sequence.request.id);
}

int64_t Scheduler::num_tokens() const {
  int64_t num_tokens = 0;
  for (const auto& [id, sequence] : sequences_) num_tokens += sequence->num_tokens();
  return num_tokens;
}

int64_t Scheduler::NumCachedTokens(const request::Request& request) const {
  Sequence sequence;
  sequence.request = request;
  sequence.token_ids = request.prompt_token_ids;
  sequence.num_prompt_tokens = sequence.num_tokens();
  sequence.experts_end = request.routed_experts_start.value_or(0);
  return cache_.NumCachedTokens(MakeAdmitRequest(sequence));
}

double Scheduler::session_spread_seconds() const {
  if (sequences_.empty()) return 0;
  const auto [least, most] =
      std::minmax_element(sequences_.begin(), sequences_.end(), [](const auto& a, const auto& b) {
        return a.second->session->virtual_seconds < b.second->session->virtual_seconds;
      });
  return most->second->session->virtual_seconds - least->second->session->virtual_seconds;
}

// A prompt that is not through, or that reports on its tokens.
bool Scheduler::NeedsItsResult(const Scheduled& scheduled) const {
  const Sequence& s = *scheduled.sequence;
  if (options_.constraints_need_results && s.request.constraint != nullptr) return true;
  return !scheduled.samples || s.request.routed_experts_start.has_value() ||
         (s.request.sampling.num_prompt_logprobs && s.num_output_tokens() == 0);
}

bool Scheduler::CanSchedule() const {
  if (in_flight_.empty()) return true;
  if (in_flight_.size() > 1) return false;
  const std::vector<Scheduled>& sequences = in_flight_.front().sequences;
  return std::none_of(sequences.begin(), sequences.end(), [this](const Scheduled& s) {
    return !s.sequence->finished && NeedsItsResult(s);
  });
}

std::vector<SequenceOutput> Scheduler::Commit(const request::StepResult& result, Duration step_time,
                                              const StepLoad& peers) {
  cache_.OnStoreEvents(result.store_events);
  std::vector<SequenceOutput> outputs;
  if (in_flight_.empty() && result.sequences.empty()) return outputs;  // of an empty step
  const StepInFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  CHECK_EQ(result.step, step.step);
  CHECK_EQ(result.sequences.size(), step.sequences.size());
  ChargeSessions(step, peers, Seconds(step_time));
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    const Scheduled& scheduled = step.sequences[i];
    CHECK_EQ(result.sequences[i].request_id, scheduled.sequence->request.id);
    if (scheduled.sequence->finished) continue;
    SequenceOutput output = CommitSequence(scheduled, result.sequences[i]);
    const request::TokenEvent& event = output.event;
    if (event.finish_reason || event.num_processed_tokens || !event.token_ids.empty()) {
      outputs.push_back(std::move(output));
    }
  }
  return outputs;
}

SequenceOutput Scheduler::CommitSequence(const Scheduled& scheduled,
                                         const request::SequenceResult& result) {
  Sequence& sequence = *scheduled.sequence;
  SequenceOutput output{.request_id = sequence.request.id, .event = {}};
  // A sequence that was preempted meanwhile keeps the token, not the memory.
  const bool holds_memory = scheduled.num_preemptions == sequence.num_preemptions;
  if (holds_memory) {
    CollectPromptLogprobs(sequence, result);
    CollectExperts(sequence, result, scheduled.num_tokens);
    sequence.num_in_flight -= scheduled.num_tokens;
    if (result.status.ok()) sequence.num_computed_tokens += scheduled.num_tokens;
  }
  if (scheduled.samples) --sequence.num_pending;
  CommitTokens(sequence, result, output.event);
  if (holds_memory && result.status.ok()) {
    cache_.OnComputed(sequence.kv, sequence.token_ids, sequence.num_computed_tokens);
  }
  if (output.event.finish_reason) {
    Finish(sequence);
  } else if (sequence.request.report_progress && output.event.token_ids.empty()) {
    output.event.num_processed_tokens = static_cast<int>(sequence.num_computed_tokens);
  }
  return output;
}

// Decodes share what a step of them alone takes; prompts share the rest by their tokens.
void Scheduler::ChargeSessions(const StepInFlight& step, const StepLoad& peers,
                               double step_seconds) {
  const int num_decodes = step.load.num_decodes;
  const int64_t num_prefill_tokens = step.load.num_prefill_tokens;
  const auto num_tokens = static_cast<double>(num_prefill_tokens + num_decodes);
  StepLoad most = step.load;
  most.TakeMost(peers);
  if (most.num_decodes + most.num_prefill_tokens > 0) {
    pacer_.OnStep(most, step_seconds);
  }
  if (num_tokens == 0) return;
  const double seconds = std::max(step_seconds, num_tokens * kLeastSecondsPerToken);
  sessions_.Advance(seconds);
  double decode_seconds = pacer_.DecodeSeconds(num_decodes);
  if (decode_seconds < 0) decode_seconds = seconds * num_decodes / num_tokens;
  if (num_prefill_tokens == 0) decode_seconds = seconds;
  decode_seconds = num_decodes == 0 ? 0 : std::min(decode_seconds, seconds);
  for (const Scheduled& s : step.sequences) {
    s.sequence->session->virtual_seconds +=
        s.is_decode ? decode_seconds / num_decodes
                    : (seconds - decode_seconds) * static_cast<double>(s.num_tokens) /
                          static_cast<double>(num_prefill_tokens);
  }
}

void Scheduler::OnPeersStep(const request::StepResult& result, Duration step_time,
                            const StepLoad& peers) {
  cache_.OnStoreEvents(result.store_events);
  ChargeSessions({}, peers, Seconds(step_time));
}

// The result's rows are of the tokens that follow num_computed_tokens. A prompt that was preempted
// is computed again: what is known already is left as it is.
void Scheduler::CollectPromptLogprobs(Sequence& sequence, const request::SequenceResult& result) {
  if (sequence.num_output_tokens() > 0) return;
  std::vector<request::TokenLogprobs>& known = sequence.prompt_logprobs;
  const auto num_known = static_cast<int64_t>(known.size());
  for (size_t i = 0; i < result.prompt_logprobs.size(); ++i) {
    if (sequence.num_computed_tokens + static_cast<int64_t>(i) < num_known) continue;
    known.push_back(result.prompt_logprobs[i]);
  }
}

// As above: those of a token are taken once.
void Scheduler::CollectExperts(Sequence& sequence, const request::SequenceResult& result,
                               int64_t num_tokens) {
  const int64_t begin = sequence.num_computed_tokens;
  const int64_t known = std::max<int64_t>(sequence.experts_end - begin, 0);
  if (result.routed_experts.empty() || known >= num_tokens) return;
  CHECK_GE(sequence.experts_end, begin);  // MakeAdmitRequest lets none be skipped
  const auto size = static_cast<int64_t>(result.routed_experts.size());
  sequence.routed_experts.insert(sequence.routed_experts.end(),
                                 result.routed_experts.begin() + size / num_tokens * known,
                                 result.routed_experts.end());
  sequence.experts_end = begin + num_tokens;
}

void Scheduler::CommitTokens(Sequence& sequence, const request::SequenceResult& result,
                             request::TokenEvent& event) {
  event.num_cached_tokens = static_cast<int>(sequence.num_cached_tokens);
  if (!result.status.ok()) {
    event.finish_reason = request::FinishReason::kError;
    event.error = result.status;
    return;
  }
  if (!result.sampled_token_ids.empty()) {
    event.prompt_logprobs = std::exchange(sequence.prompt_logprobs, {});
    event.routed_experts = std::exchange(sequence.routed_experts, {});
  }
  for (size_t i = 0; i < result.sampled_token_ids.size(); ++i) {
    sequence.token_ids.push_back(result.sampled_token_ids[i]);
    event.token_ids.push_back(result.sampled_token_ids[i]);
    if (i < result.logprobs.size()) event.logprobs.push_back(result.logprobs[i]);
    if (const auto stop = CheckStop(sequence, options_.eos_token_ids, max_model_len_)) {
      event.finish_reason = stop->reason;
      event.stop_token_id = stop->stop_token_id;
      return;
    }
  }
}

}  // namespace fathom::scheduler
