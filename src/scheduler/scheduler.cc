#include "scheduler/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "scheduler/stop_rules.h"

namespace fathom::scheduler {

struct Scheduler::Step {
  request::ScheduledBatch batch;
  int64_t num_tokens_left = 0;
  int64_t num_rows_left = 0;
  bool preempted = false;
};

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options),
      max_model_len_(std::min(options.max_model_len,
                              int64_t{options.pools.num_blocks} * kv_cache::kBlockTokens)),
      pool_(options.pools, options.sliding_window) {
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
  return OkStatus();
}

void Scheduler::Submit(request::Request request) {
  const request::RequestId id = request.id;
  auto sequence = std::make_unique<Sequence>();
  sequence->request = std::move(request);
  sequence->order = next_order_++;
  sequence->token_ids = sequence->request.prompt_token_ids;
  sequence->num_prompt_tokens = sequence->num_tokens();
  waiting_.insert(sequence.get());
  CHECK(sequences_.emplace(id, std::move(sequence)).second);
}

bool Scheduler::Cancel(request::RequestId id) {
  CHECK(in_flight_.empty());
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return false;
  Finish(*it->second);
  return true;
}

void Scheduler::Finish(Sequence& sequence) {
  pool_.Release(sequence.block_table);
  running_.erase(&sequence);
  waiting_.erase(&sequence);
  sequences_.erase(sequence.request.id);
}

double Scheduler::kv_cache_usage() const {
  return static_cast<double>(pool_.blocks().num_used()) / pool_.blocks().capacity();
}

request::ScheduledBatch Scheduler::Schedule() {
  CHECK(in_flight_.empty());
  Step step;
  PlanStep(step);
  while (step.batch.sequences.empty() && !running_.empty()) {
    // Prompts that hold each other's window pages: the newest makes room.
    CHECK_GT(running_.size(), 1u);  // alone, a valid request fits
    step.preempted = true;
    Preempt(**running_.rbegin());
    PlanStep(step);
  }
  step.batch.step = ++step_;
  return std::move(step.batch);
}

void Scheduler::PlanStep(Step& step) {
  step.num_tokens_left = options_.max_num_batched_tokens;
  step.num_rows_left = options_.max_logits_rows;
  AddDecodes(step);
  AddPrefills(step);
  // What a preemption freed is for those that run; else the preempted would come straight back.
  if (!step.preempted) AdmitWaiting(step);
}

void Scheduler::AddDecodes(Step& step) {
  const auto has_room = [this](const Sequence& s) {
    return pool_.NumRunnable(s.block_table, s.num_computed_tokens, 1) == 1;
  };
  for (auto it = running_.begin(); it != running_.end(); ++it) {
    Sequence& sequence = **it;
    if (!sequence.is_decode()) continue;
    while (!has_room(sequence)) {
      CHECK_GT(running_.size(), 1u);  // alone, a valid request fits
      Sequence& newest = **running_.rbegin();
      step.preempted = true;
      Preempt(newest);
      if (&newest == &sequence) return;
    }
    Add(step, sequence, 1);
  }
}

void Scheduler::AddPrefills(Step& step) {
  for (Sequence* sequence : running_) {
    if (sequence->is_decode()) continue;
    const int64_t num_tokens = ChunkSize(step, *sequence);
    if (num_tokens > 0) Add(step, *sequence, num_tokens);
  }
}

void Scheduler::AdmitWaiting(Step& step) {
  while (!waiting_.empty() && num_running() < options_.max_num_seqs) {
    Sequence& sequence = **waiting_.begin();
    if (ChunkSize(step, sequence) == 0) return;
    if (!pool_.Admit(sequence.num_tokens() + 1, sequence.block_table)) return;
    waiting_.erase(waiting_.begin());
    running_.insert(&sequence);
    Add(step, sequence, ChunkSize(step, sequence));
  }
}

// The tokens of a prefill that budget and memory allow now.
int64_t Scheduler::ChunkSize(const Step& step, const Sequence& sequence) const {
  int64_t num_tokens = std::min(sequence.num_remaining(), step.num_tokens_left);
  if (sequence.request.sampling.num_prompt_logprobs) {
    num_tokens = std::min(num_tokens, step.num_rows_left);
  } else if (step.num_rows_left == 0) {
    num_tokens = std::min(num_tokens, sequence.num_remaining() - 1);
  }
  return pool_.NumRunnable(sequence.block_table, sequence.num_computed_tokens, num_tokens);
}

void Scheduler::Add(Step& step, Sequence& sequence, int64_t num_tokens) {
  pool_.Extend(sequence.block_table, sequence.num_computed_tokens, num_tokens);
  const int64_t end = sequence.num_computed_tokens + num_tokens;
  const bool sample = end == sequence.num_tokens();
  step.num_tokens_left -= num_tokens;
  step.num_rows_left -=
      sequence.request.sampling.num_prompt_logprobs ? num_tokens : int64_t{sample};
  const std::span<const int32_t> all(sequence.token_ids);
  step.batch.sequences.push_back(
      {.request_id = sequence.request.id,
       .request = &sequence.request,
       .token_ids = all.subspan(static_cast<size_t>(sequence.num_computed_tokens),
                                static_cast<size_t>(num_tokens)),
       .all_token_ids = all,
       .num_computed_tokens = static_cast<int32_t>(sequence.num_computed_tokens),
       .sample = sample,
       .block_table = sequence.block_table});
  in_flight_.push_back({&sequence, num_tokens});
}

void Scheduler::Preempt(Sequence& sequence) {
  pool_.Release(sequence.block_table);
  sequence.num_computed_tokens = 0;
  running_.erase(&sequence);
  waiting_.insert(&sequence);
  ++num_preemptions_;
}

std::vector<SequenceOutput> Scheduler::Commit(const request::StepResult& result) {
  CHECK_EQ(result.step, step_);
  CHECK_EQ(result.sequences.size(), in_flight_.size());
  std::vector<SequenceOutput> outputs;
  for (size_t i = 0; i < in_flight_.size(); ++i) {
    Sequence& sequence = *in_flight_[i].sequence;
    const request::SequenceResult& sequence_result = result.sequences[i];
    CHECK_EQ(sequence_result.request_id, sequence.request.id);
    CollectPromptLogprobs(sequence, sequence_result);
    sequence.num_computed_tokens += in_flight_[i].num_tokens;
    pool_.ReleaseUnreachable(sequence.block_table, sequence.num_computed_tokens);
    SequenceOutput output{.request_id = sequence.request.id, .event = {}};
    CommitTokens(sequence, sequence_result, output.event);
    const bool finished = output.event.finish_reason.has_value();
    if (finished) Finish(sequence);
    if (finished || !output.event.token_ids.empty()) outputs.push_back(std::move(output));
  }
  in_flight_.clear();
  return outputs;
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

void Scheduler::CommitTokens(Sequence& sequence, const request::SequenceResult& result,
                             request::TokenEvent& event) {
  if (!result.status.ok()) {
    event.finish_reason = request::FinishReason::kError;
    event.error = result.status;
    return;
  }
  if (!result.sampled_token_ids.empty()) {
    event.prompt_logprobs = std::exchange(sequence.prompt_logprobs, {});
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
