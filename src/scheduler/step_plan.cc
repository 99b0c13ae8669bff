// The planning half of the Scheduler: one step from what waits and runs.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "scheduler/scheduler.h"

namespace fathom::scheduler {

using Outcome = kv_cache::Admission::Outcome;

struct Scheduler::Step {
  request::ScheduledBatch batch;
  StepInFlight in_flight;
  int64_t num_tokens_left = 0;
  int64_t num_rows_left = 0;
  int num_peer_decodes = 0;
  bool preempted = false;
  bool prompts_wait = false;  // for the decodes of other data ranks
};

struct Scheduler::Share {
  int64_t num_running = 0;
  int64_t num_blocks = 0;
};

request::ScheduledBatch Scheduler::Schedule(int num_peer_decodes) {
  CHECK(CanSchedule());
  Step step;
  step.num_peer_decodes = num_peer_decodes;
  if (blocked_ != nullptr && !blocked_->displaced_others) {
    const std::vector<Sequence*> victims = VictimsFor(*blocked_);
    for (Sequence* victim : victims) Preempt(*victim);
    blocked_->displaced_others = !victims.empty();
  }
  PlanStep(step);
  while (step.batch.sequences.empty() && !running_.empty() && in_flight_.empty() &&
         !step.prompts_wait) {
    // Prompts that hold each other's window pages: the newest makes room.
    CHECK_GT(running_.size(), 1u);  // alone, a valid request fits
    step.preempted = true;
    Preempt(**running_.rbegin());
    PlanStep(step);
  }
  step.batch.step = ++step_;
  step.batch.transfers = cache_.TakeTransfers(/*idle=*/step.batch.sequences.empty());
  if (step.batch.empty()) return {};
  step.in_flight.step = step_;
  StepLoad& load = step.in_flight.load;
  load.num_prefill_tokens = step.batch.num_tokens() - load.num_decodes;
  in_flight_.push_back(std::move(step.in_flight));
  return std::move(step.batch);
}

void Scheduler::PlanStep(Step& step) {
  step.num_tokens_left = options_.max_num_batched_tokens;
  step.num_rows_left = options_.max_logits_rows;
  blocked_ = nullptr;
  AddDecodes(step);
  AddPrefills(step);
}

void Scheduler::AddDecodes(Step& step) {
  const auto has_room = [this](const Sequence& s) {
    return cache_.NumRunnable(s.kv, s.num_scheduled(), 1) == 1;
  };
  for (auto it = running_.begin(); it != running_.end();) {
    Sequence& sequence = **it;
    // Its step in flight holds a page more than the result will leave it.
    const bool waits_for_room =
        sequence.num_in_flight > 0 && sequence.is_decode() && !has_room(sequence);
    if (waits_for_room || EndsWhenPendingIsKnown(sequence)) {
      ++it;
      continue;
    }
    if (sequence.is_decode() && !has_room(sequence)) {
      CHECK_GT(running_.size(), 1u);  // alone, a valid request fits
      Sequence* victim = MemoryVictim(it);
      if (victim == &sequence) ++it;
      step.preempted = true;
      Preempt(*victim);
      continue;
    }
    if (sequence.is_decode()) Add(step, sequence, 1);
    ++it;
  }
}

// For its length, whatever the token is.
bool Scheduler::EndsWhenPendingIsKnown(const Sequence& s) const {
  return s.num_pending > 0 &&
         (s.num_output_tokens() + s.num_pending >= s.request.sampling.max_tokens ||
          s.num_tokens() + s.num_pending >= max_model_len_);
}

// Sessions with a prompt that waits or runs.
int Scheduler::NumWaitingSessions() const {
  std::vector<const Session*> sessions;
  for (const Sequence* s : waiting_) sessions.push_back(s->session.get());
  for (const Sequence* s : running_) {
    if (s->num_remaining() > 1) sessions.push_back(s->session.get());
  }
  std::sort(sessions.begin(), sessions.end());
  return static_cast<int>(std::unique(sessions.begin(), sessions.end()) - sessions.begin());
}

void Scheduler::AddPrefills(Step& step) {
  step.in_flight.load.num_waiting_sessions = NumWaitingSessions();
  StepLoad load = step.in_flight.load;
  load.num_decodes = std::max(load.num_decodes, step.num_peer_decodes);
  const int64_t num_in_flight = in_flight_.empty() ? 0 : in_flight_.back().load.num_prefill_tokens;
  step.num_tokens_left = pacer_.PrefillTokens(load, step.num_tokens_left, num_in_flight);
  step.prompts_wait = step.num_tokens_left == 0;
  if (step.prompts_wait) return;
  std::vector<Sequence*> line;
  for (Sequence* sequence : running_) {
    if (sequence->num_remaining() > 1) line.push_back(sequence);
  }
  // What a preemption freed is for those that run; else the preempted would come straight back.
  if (!step.preempted) line.insert(line.end(), waiting_.begin(), waiting_.end());
  std::sort(line.begin(), line.end(), [](const Sequence* a, const Sequence* b) {
    // Who displaced others has its room before these are back in line.
    if (a->displaced_others != b->displaced_others) return a->displaced_others;
    return PrefillsBefore()(a, b);
  });
  for (Sequence* sequence : line) {
    if (step.num_tokens_left == 0) return;
    const bool waits = waiting_.count(sequence) > 0;
    // It was preempted, and the token that it goes on from is on its way.
    if (waits && sequence->num_pending > 0) continue;
    if (waits && (blocked_ != nullptr || ChunkSize(step, *sequence) == 0)) continue;
    if (waits) {
      const Outcome outcome = Admit(*sequence);
      if (outcome == Outcome::kNoRoom) blocked_ = sequence;
      if (outcome != Outcome::kAdmitted) continue;
    }
    const int64_t num_tokens = ChunkSize(step, *sequence);
    if (num_tokens > 0) Add(step, *sequence, num_tokens);
  }
}

kv_cache::AdmitRequest Scheduler::MakeAdmitRequest(const Sequence& sequence) const {
  int64_t max_cached_tokens = max_model_len_;
  if (sequence.request.routed_experts_start) max_cached_tokens = sequence.experts_end;
  const bool all = sequence.request.sampling.num_prompt_logprobs.has_value() &&
                   sequence.num_output_tokens() == 0;
  return {.id = sequence.request.id,
          .session = sequence.request.session,
          .salt = sequence.request.cache_salt,
          .token_ids = sequence.token_ids,
          .num_prompt_tokens = sequence.num_prompt_tokens,
          .num_tokens = sequence.num_tokens() + 1,
          .max_cached_tokens = all ? 0 : max_cached_tokens,
          .num_spare_blocks = 0};
}

Outcome Scheduler::Admit(Sequence& sequence) {
  if (num_running() >= options_.max_num_seqs) return Outcome::kNoRoom;
  kv_cache::AdmitRequest request = MakeAdmitRequest(sequence);
  request.num_spare_blocks = NumGrowing();
  const kv_cache::Admission admission = cache_.Admit(request, sequence.kv);
  if (admission.outcome != Outcome::kAdmitted) return admission.outcome;
  sequence.num_computed_tokens = admission.num_cached_tokens;
  if (!std::exchange(sequence.was_admitted, true)) {
    sequence.num_cached_tokens = admission.num_cached_tokens;
  }
  sequence.displaced_others = false;
  waiting_.erase(&sequence);
  running_.insert(&sequence);
  return Outcome::kAdmitted;
}

// Whether it will need another block before it ends; its last token is never run.
bool Scheduler::WillGrow(const Sequence& s) const {
  const int64_t longest =
      std::min<int64_t>(s.num_prompt_tokens + s.request.sampling.max_tokens, max_model_len_);
  const auto num_held = static_cast<int64_t>(s.kv.table.blocks.size());
  return longest - 1 > num_held * kv_cache::kBlockTokens;
}

int64_t Scheduler::NumGrowing() const {
  return std::count_if(running_.begin(), running_.end(),
                       [this](const Sequence* s) { return WillGrow(*s); });
}

// The tokens of a prefill that budget and memory allow now.
int64_t Scheduler::ChunkSize(const Step& step, const Sequence& sequence) const {
  int64_t num_tokens = std::min(sequence.num_remaining(), step.num_tokens_left);
  if (sequence.request.sampling.num_prompt_logprobs) {
    num_tokens = std::min(num_tokens, step.num_rows_left);
  } else if (step.num_rows_left == 0) {
    num_tokens = std::min(num_tokens, sequence.num_remaining() - 1);
  }
  num_tokens = cache_.NumRunnable(sequence.kv, sequence.num_scheduled(), num_tokens);
  return num_tokens <= 0 ? 0 : cache_.ClipChunk(sequence.kv, sequence.num_scheduled(), num_tokens);
}

// A sequence that goes on from its output, by one token.
int Scheduler::NumDecodes() const {
  return static_cast<int>(std::count_if(running_.begin(), running_.end(), [](const Sequence* s) {
    return s->is_decode() && s->num_output_tokens() + s->num_pending > 0;
  }));
}

StepLoad Scheduler::load() const {
  return in_flight_.empty() ? StepLoad() : in_flight_.back().load;
}

void Scheduler::Add(Step& step, Sequence& sequence, int64_t num_tokens) {
  const int64_t begin = sequence.num_scheduled();
  const bool is_decode =
      sequence.is_decode() && sequence.num_output_tokens() + sequence.num_pending > 0;
  const bool sample = num_tokens == sequence.num_remaining();
  cache_.Extend(sequence.kv, begin, num_tokens);
  step.in_flight.load.num_decodes += is_decode ? 1 : 0;
  step.num_tokens_left -= num_tokens;
  step.num_rows_left -=
      sequence.request.sampling.num_prompt_logprobs ? num_tokens : int64_t{sample};
  const std::span<const int32_t> all(sequence.token_ids);
  step.batch.sequences.push_back(
      {.request_id = sequence.request.id,
       .request = &sequence.request,
       .token_ids = sequence.num_pending > 0
                        ? std::span(&request::kPendingToken, 1)
                        : all.subspan(static_cast<size_t>(begin), static_cast<size_t>(num_tokens)),
       .all_token_ids = all,
       .num_computed_tokens = static_cast<int32_t>(begin),
       .sample = sample,
       .block_table = sequence.kv.table});
  step.in_flight.sequences.push_back({.sequence = sequences_.at(sequence.request.id),
                                      .num_tokens = num_tokens,
                                      .num_preemptions = sequence.num_preemptions,
                                      .is_decode = is_decode,
                                      .samples = sample});
  sequence.num_in_flight += num_tokens;
  sequence.num_pending += sample ? 1 : 0;
}

Scheduler::Shares Scheduler::SharesOfRunning() const {
  Shares shares;
  for (const Sequence* s : running_) {
    Share& share = shares[s->session.get()];
    ++share.num_running;
    share.num_blocks += static_cast<int64_t>(s->kv.table.blocks.size());
  }
  return shares;
}

// Whether it is more than an equal split between the live sessions gives. One running sequence
// never is: else a prompt larger than the split would never get done.
bool Scheduler::IsBeyondShare(const Share& share, bool of_slots) const {
  if (share.num_running <= 1) return false;
  const int64_t num_sessions = std::max(1, sessions_.num_live());
  return of_slots ? share.num_running * num_sessions > options_.max_num_seqs
                  : share.num_blocks * num_sessions > cache_.pool().blocks().capacity();
}

// Of those from `first` on, which are not part of the step yet.
Sequence* Scheduler::MemoryVictim(std::set<Sequence*, RunsBefore>::iterator first) const {
  const Shares shares = SharesOfRunning();
  const auto begin = first == running_.begin() ? std::next(first) : first;
  Sequence* newest = *running_.rbegin();
  for (auto it = running_.end(); it != begin;) {
    Sequence* candidate = *--it;
    if (candidate->request.priority != newest->request.priority) break;
    if (IsBeyondShare(shares.at(candidate->session.get()), /*of_slots=*/false)) return candidate;
  }
  return newest;
}

// The running sequences that must leave for the first prompt in line; none, when it would not fit
// then either.
std::vector<Sequence*> Scheduler::VictimsFor(const Sequence& waiting) const {
  const int64_t num_needed = kv_cache::NumBlocksFor(waiting.num_tokens() + 1);
  int64_t slots_short = num_running() + 1 - options_.max_num_seqs;
  int64_t blocks_short = num_needed + NumGrowing() - cache_.pool().blocks().num_available();
  Shares shares = SharesOfRunning();
  Share own = shares[waiting.session.get()];
  ++own.num_running;
  own.num_blocks += num_needed;
  std::vector<Sequence*> victims;
  for (auto it = running_.rbegin(); it != running_.rend(); ++it) {
    Sequence* candidate = *it;
    const bool of_slots = slots_short > 0;
    if (!of_slots && blocks_short <= 0) break;
    if (candidate->request.priority < waiting.request.priority) break;
    Share& share = shares[candidate->session.get()];
    const bool is_lower = candidate->request.priority > waiting.request.priority;
    if (!is_lower && (candidate->session == waiting.session || IsBeyondShare(own, of_slots) ||
                      !IsBeyondShare(share, of_slots))) {
      continue;
    }
    const auto num_blocks = static_cast<int64_t>(candidate->kv.table.blocks.size());
    --share.num_running;
    share.num_blocks -= num_blocks;
    --slots_short;
    blocks_short -= num_blocks + (WillGrow(*candidate) ? 1 : 0);
    victims.push_back(candidate);
  }
  if (slots_short > 0 || blocks_short > 0) victims.clear();
  return victims;
}

void Scheduler::Preempt(Sequence& sequence) {
  cache_.Release(sequence.kv, sequence.token_ids, sequence.num_computed_tokens);
  sequence.num_computed_tokens = 0;
  sequence.num_in_flight = 0;
  ++sequence.num_preemptions;
  running_.erase(&sequence);
  waiting_.insert(&sequence);
  ++num_preemptions_;
}

}  // namespace fathom::scheduler
