// Scheduler: which tokens of which sequences run in the next step, and where their KV goes. It
// alone admits, preempts and ends sequences. Host code only, deterministic: the same calls give the
// same batches; time is what the caller says it is. One thread (the engine's); Validate from any.
//
// A step runs every decode, and prompts: as many tokens as the budget allows, when and as far as
// that leaves decodes the floor of their solo speed (step_pacer.h). Prompts run in order of
// priority, then by fair queueing between sessions (session_clocks.h).
//
// A prompt is admitted when the history blocks of all of it and of its next token are free, and a
// block for each running sequence that will need one more: it then needs only window pages until it
// decodes. The first in order that does not fit holds up those behind it, so memory comes together
// for it; one whose prefix is on its way (from disk, or computed by another) holds up nobody. What
// the prefix cache has of a prompt is not run, and does not count for its place in line.
//
// Preemption frees a sequence's memory; it is computed anew later, from its prompt and its output
// so far, as far as the prefix cache does not have them. Two cases:
//  - A decode finds no block. The victim is of the lowest priority, then of a session beyond its
//    equal share, then the newest. The first in order of priority and arrival is never one and fits
//    alone, so every step makes progress.
//  - The first prompt in line finds no room, while a lower priority runs, or a session that holds
//    more than its equal share where the waiting one would stay within its own. What was admitted
//    that way cannot be displaced in turn, and a session's last running sequence never is.
//
// Data ranks have a scheduler each and run their steps together: a step lasts as long as that of
// the rank with most to do, so its decodes keep their floor beside the prompts of all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "kv_cache/prefix_cache.h"
#include "request/scheduled_batch.h"
#include "scheduler/sequence.h"
#include "scheduler/session_clocks.h"
#include "scheduler/step_pacer.h"

namespace fathom::scheduler {

struct SchedulerOptions {
  int max_num_seqs = 0;            // running at once
  int max_num_batched_tokens = 0;  // in one step; at least max_num_seqs
  // In one step; at least max_num_seqs. A token whose prompt log-probabilities were asked for takes
  // a row, too.
  int max_logits_rows = 0;
  int64_t max_model_len = 0;
  int vocab_size = 0;
  std::vector<int32_t> eos_token_ids;
  kv_cache::PrefixCacheOptions cache;
  // The share of their solo speed that decodes keep while prompts run, below 1; 0: prompts first.
  double decode_floor = 0.7;
  // A sequence with a constraint is not planned ahead of its result.
  bool constraints_need_results = false;
};

// What a step brought for one request.
struct SequenceOutput {
  request::RequestId request_id = 0;
  request::TokenEvent event;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);

  // kInvalidArgument when the request could never run: says what was found and the limit.
  Status Validate(const request::Request& request) const;

  // Queues a valid request, whose id is not in use.
  void Submit(request::Request request);

  // Ends a request and frees its memory; false when the id is unknown. What a step in flight brings
  // for it is dropped.
  bool Cancel(request::RequestId id);

  // Ends the requests whose deadline is over, with kError.
  std::vector<SequenceOutput> EndExpired(TimePoint now);

  // Whether the next step can be planned: none is in flight, or one whose result the plan does not
  // need, because every sequence in it samples a token. Then this token is pending in the next
  // step. What a sequence ran beyond its end is dropped.
  bool CanSchedule() const;

  // The next step; empty when there is nothing to do. Its views live until the next Commit, its
  // requests until its own. A step without sequences may move memory; an empty one needs no Commit.
  // `num_peer_decodes`: of another data rank in the same step, the most.
  request::ScheduledBatch Schedule(int num_peer_decodes = 0);
  // How many sequences decode in the next step, if memory allows.
  int NumDecodes() const;
  // Of the step that was planned last.
  StepLoad load() const;

  // Takes the tokens of the oldest step in flight, and how long it took. Returns the events of the
  // requests that have something to tell. `peers`: what other data ranks did in the step.
  std::vector<SequenceOutput> Commit(const request::StepResult& result, Duration step_time,
                                     const StepLoad& peers = {});
  // In the place of a Commit, for a step in which this data rank had nothing to do.
  void OnPeersStep(const request::StepResult& result, Duration step_time, const StepLoad& peers);

  int num_running() const { return static_cast<int>(running_.size()); }
  int num_waiting() const { return static_cast<int>(waiting_.size()); }
  // Of all requests that wait or run.
  int64_t num_tokens() const;
  // Tokens of a valid request's prompt that the prefix cache has.
  int64_t NumCachedTokens(const request::Request& request) const;
  uint64_t num_preemptions() const { return num_preemptions_; }
  // Whether Schedule could give something to do.
  bool HasWork() const { return !sequences_.empty() || cache_.HasWork(); }
  // Device time by which the live session that had most is ahead of the one that had least.
  double session_spread_seconds() const;
  // Prompt plus output that one sequence may have: the model's limit, or less where the pool is
  // smaller.
  int64_t max_model_len() const { return max_model_len_; }
  const kv_cache::PrefixCache& cache() const { return cache_; }
  // Forgets what no running sequence uses.
  void ClearCache() { cache_.Clear(); }

 private:
  struct Scheduled {
    std::shared_ptr<Sequence> sequence;
    int64_t num_tokens;
    int64_t num_preemptions;  // of the sequence, then
    bool is_decode;
    bool samples;
  };
  struct StepInFlight {
    uint64_t step = 0;
    std::vector<Scheduled> sequences;
    StepLoad load;
  };

  // step_plan.cc
  struct Step;   // what is left of a step's budget
  struct Share;  // what a session's running sequences hold
  using Shares = std::unordered_map<const Session*, Share>;
  void PlanStep(Step& step);
  void AddDecodes(Step& step);
  void AddPrefills(Step& step);
  kv_cache::AdmitRequest MakeAdmitRequest(const Sequence& sequence) const;
  kv_cache::Admission::Outcome Admit(Sequence& sequence);
  bool WillGrow(const Sequence& sequence) const;
  int64_t NumGrowing() const;
  int64_t ChunkSize(const Step& step, const Sequence& sequence) const;
  int NumWaitingSessions() const;
  void Add(Step& step, Sequence& sequence, int64_t num_tokens);
  Shares SharesOfRunning() const;
  bool IsBeyondShare(const Share& share, bool of_slots) const;
  Sequence* MemoryVictim(std::set<Sequence*, RunsBefore>::iterator first) const;
  std::vector<Sequence*> VictimsFor(const Sequence& waiting) const;
  void Preempt(Sequence& sequence);

  bool NeedsItsResult(const Scheduled& scheduled) const;
  bool EndsWhenPendingIsKnown(const Sequence& sequence) const;
  void ChargeSessions(const StepInFlight& step, const StepLoad& peers, double step_seconds);
  SequenceOutput CommitSequence(const Scheduled& scheduled, const request::SequenceResult& result);
  void CollectPromptLogprobs(Sequence& sequence, const request::SequenceResult& result);
  void CollectExperts(Sequence& sequence, const request::SequenceResult& result,
                      int64_t num_tokens);
  void CommitTokens(Sequence& sequence, const request::SequenceResult& result,
                    request::TokenEvent& event);
  void Finish(Sequence& sequence);

  const SchedulerOptions options_;
  const int64_t max_model_len_;
  kv_cache::PrefixCache cache_;
  StepPacer pacer_;
  SessionClocks sessions_;
  std::unordered_map<request::RequestId, std::shared_ptr<Sequence>> sequences_;
  std::set<Sequence*, RunsBefore> waiting_;
  std::set<Sequence*, RunsBefore> running_;
  std::set<std::pair<TimePoint, request::RequestId>> deadlines_;
  Sequence* blocked_ = nullptr;         // the first in line, when the last step had no room for it
  std::deque<StepInFlight> in_flight_;  // between Schedule and Commit, oldest first; at most two
  uint64_t step_ = 0;
  uint64_t next_order_ = 0;
  uint64_t num_preemptions_ = 0;
};

}  // namespace fathom::scheduler
