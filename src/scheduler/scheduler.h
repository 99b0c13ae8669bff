// Scheduler: which tokens of which sequences run in the next step, and where their KV goes. It
// alone admits, preempts and ends sequences. Host code only, deterministic: the same calls give the
// same batches. One thread (the engine's); Validate from any.
//
// A step runs every decode first, then prompts in chunks, in order of priority and arrival, within
// a budget of tokens. A prompt is admitted when the history blocks of all of it and of its next
// token are free: it then needs only window pages until it decodes. The first waiting request is
// never passed by, so none starves. When a decode finds no block, the newest running sequence is
// preempted: its memory is freed and it is computed anew later, from its prompt and its output so
// far. The first in order can always preempt all others and fits alone, so every step makes
// progress.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_pool.h"
#include "request/scheduled_batch.h"
#include "scheduler/sequence.h"

namespace fathom::scheduler {

struct SchedulerOptions {
  int max_num_seqs = 0;            // running at once
  int max_num_batched_tokens = 0;  // in one step; at least max_num_seqs
  // In one step; at least max_num_seqs. A token whose prompt log-probabilities were asked for takes
  // a row, too.
  int max_logits_rows = 0;
  int64_t max_model_len = 0;
  int vocab_size = 0;
  int sliding_window = 128;
  std::vector<int32_t> eos_token_ids;
  kv_cache::PoolSizes pools;
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

  // Ends a request and frees its memory; false when the id is unknown. Not between Schedule and
  // Commit.
  bool Cancel(request::RequestId id);

  // The next step; empty when nothing waits or runs. Its views live until Commit, which must come
  // next.
  request::ScheduledBatch Schedule();

  // Takes the step's tokens. Returns the events of the requests that have something to tell.
  std::vector<SequenceOutput> Commit(const request::StepResult& result);

  int num_running() const { return static_cast<int>(running_.size()); }
  int num_waiting() const { return static_cast<int>(waiting_.size()); }
  uint64_t num_preemptions() const { return num_preemptions_; }
  double kv_cache_usage() const;  // share of the history blocks in use
  // Prompt plus output that one sequence may have: the model's limit, or less where the pool is
  // smaller.
  int64_t max_model_len() const { return max_model_len_; }
  const kv_cache::BlockPool& pool() const { return pool_; }

 private:
  struct Step;  // what is left of a step's budget
  void PlanStep(Step& step);
  void AddDecodes(Step& step);
  void AddPrefills(Step& step);
  void AdmitWaiting(Step& step);
  int64_t ChunkSize(const Step& step, const Sequence& sequence) const;
  void Add(Step& step, Sequence& sequence, int64_t num_tokens);
  void Preempt(Sequence& sequence);
  void CollectPromptLogprobs(Sequence& sequence, const request::SequenceResult& result);
  void CommitTokens(Sequence& sequence, const request::SequenceResult& result,
                    request::TokenEvent& event);
  void Finish(Sequence& sequence);

  const SchedulerOptions options_;
  const int64_t max_model_len_;
  kv_cache::BlockPool pool_;
  std::unordered_map<request::RequestId, std::unique_ptr<Sequence>> sequences_;
  std::set<Sequence*, RunsBefore> waiting_;
  std::set<Sequence*, RunsBefore> running_;
  struct Scheduled {
    Sequence* sequence;
    int64_t num_tokens;
  };
  std::vector<Scheduled> in_flight_;  // between Schedule and Commit
  uint64_t step_ = 0;
  uint64_t next_order_ = 0;
  uint64_t num_preemptions_ = 0;
};

}  // namespace fathom::scheduler
