// Sampler: the next token of each row of logits, on the CPU. A row's token depends on its logits,
// its request's parameters and tokens, and (seed, number of the output token) alone: never on the
// batch, the thread or what came before. Owned by the ModelRunner; called on the worker's thread.
//
// A draw: raw logits -> log-probabilities, when asked for -> edits (logit_edits.h) -> greedy, or
// divide by temperature -> min_p -> top_k -> top_p, each on what the one before left -> draw.
// Probabilities are doubles.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "request/scheduled_batch.h"

namespace fathom::runtime {

// One row to sample from.
struct SampleRow {
  std::span<const float> logits;  // [vocab]
  const request::Request* request = nullptr;
  // Prompt and output so far. A token of the output may be missing at its end, when nothing of the
  // request depends on it (request::DependsOnOutput).
  std::span<const int32_t> all_token_ids;
  std::span<const uint32_t> mask = {};  // bit t: the grammar allows t; empty: it allows all
  size_t num_missing = 0;
};

// A token that may be drawn, and its weight: probabilities up to a common factor.
struct Candidate {
  int32_t token_id = 0;
  double weight = 0;
};

// What a row's edited logits and its mask leave to draw from, for temperature > 0: empty only if
// the mask is all zeros. In the order in which a draw walks through it, which is fixed by the
// logits.
void CollectCandidates(const request::SamplingParams& params, std::span<const float> logits,
                       std::span<const uint32_t> mask, std::vector<Candidate>& candidates);

class Sampler {
 public:
  // `pool` may be null: then rows are sampled one after the other.
  Sampler(int vocab_size, std::vector<int32_t> eos_token_ids, ThreadPool* pool);

  // Fills token, log-probabilities and status of results[i] from rows[i].
  void Sample(std::span<const SampleRow> rows, std::span<request::SequenceResult*> results);

 private:
  // One thread's memory.
  struct Scratch {
    std::vector<float> logits;    // [vocab]
    std::vector<int32_t> counts;  // [vocab], zero between rows
    std::vector<Candidate> candidates;
  };
  Result<int32_t> DrawToken(const SampleRow& row, Scratch& scratch) const;
  Status SampleRowInto(const SampleRow& row, Scratch& scratch,
                       request::SequenceResult& result) const;

  const int vocab_size_;
  const std::vector<int32_t> eos_token_ids_;
  ThreadPool* const pool_;
  std::vector<Scratch> scratch_;  // one per thread
};

}  // namespace fathom::runtime
