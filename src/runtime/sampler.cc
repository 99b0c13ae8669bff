#include "runtime/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"
#include "runtime/logit_edits.h"
#include "runtime/logprobs.h"
#include "runtime/philox.h"

namespace fathom::runtime {
namespace {

// Below this a temperature is greedy: it would only overflow.
constexpr double kMinTemperature = 1e-5;

bool IsBetter(const Candidate& a, const Candidate& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.token_id < b.token_id);
}

// Calls take(i) for every index that `mask` allows, in order; for all when it is empty.
template <typename Take>
void ForEachAllowed(std::span<const uint32_t> mask, size_t size, const Take& take) {
  for (size_t begin = 0; begin < size; begin += 32) {
    const size_t end = std::min(begin + 32, size);
    uint32_t word = mask.empty() ? ~0u : mask[begin / 32];
    if (word == ~0u) {
      for (size_t i = begin; i < end; ++i) take(i);
      continue;
    }
    for (; word != 0; word &= word - 1) {
      const size_t i = begin + static_cast<size_t>(std::countr_zero(word));
      if (i < end) take(i);
    }
  }
}

// The first of equals: the lowest id. -1 when nothing is allowed.
int32_t BestToken(std::span<const float> logits, std::span<const uint32_t> mask) {
  if (mask.empty()) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  int32_t best = -1;
  float best_logit = 0;
  ForEachAllowed(mask, logits.size(), [&](size_t i) {
    if (best >= 0 && logits[i] <= best_logit) return;
    best = static_cast<int32_t>(i);
    best_logit = logits[i];
  });
  return best;
}

void KeepTopK(int top_k, std::vector<Candidate>& candidates) {
  if (top_k <= 0 || static_cast<size_t>(top_k) >= candidates.size()) return;
  std::nth_element(candidates.begin(), candidates.begin() + top_k, candidates.end(), IsBetter);
  candidates.resize(static_cast<size_t>(top_k));
  std::sort(candidates.begin(), candidates.end(), IsBetter);
}

double SumOfWeights(std::span<const Candidate> candidates) {
  double sum = 0;
  for (const Candidate& c : candidates) sum += c.weight;
  return sum;
}

// The fewest best candidates whose probabilities reach top_p. Sorts no more than it has to: a sharp
// distribution has its nucleus in the first few of a large vocabulary.
void KeepTopP(double top_p, std::vector<Candidate>& candidates) {
  if (top_p >= 1.0) return;
  const double target = top_p * SumOfWeights(candidates);
  double sum = 0;
  size_t begin = 0;
  for (size_t end = 64; begin < candidates.size(); end *= 8) {
    end = std::min(end, candidates.size());
    const auto first = candidates.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = candidates.begin() + static_cast<std::ptrdiff_t>(end);
    std::partial_sort(first, last, candidates.end(), IsBetter);
    for (; begin < end; ++begin) {
      sum += candidates[begin].weight;
      if (sum >= target) {
        candidates.resize(begin + 1);
        return;
      }
    }
  }
}

int32_t Draw(std::span<const Candidate> candidates, double uniform) {
  const double target = uniform * SumOfWeights(candidates);
  double sum = 0;
  for (const Candidate& c : candidates) {
    sum += c.weight;
    if (sum > target) return c.token_id;
  }
  return candidates.back().token_id;  // uniform * sum was rounded up to the sum
}

}  // namespace

void CollectCandidates(const request::SamplingParams& params, std::span<const float> logits,
                       std::span<const uint32_t> mask, std::vector<Candidate>& candidates) {
  candidates.clear();
  const int32_t best = BestToken(logits, mask);
  if (best < 0) return;
  const double max = logits[static_cast<size_t>(best)];
  ForEachAllowed(mask, logits.size(), [&](size_t i) {
    const double weight = std::exp((logits[i] - max) / params.temperature);
    // The best weight is 1. One that underflows to zero is never drawn.
    if (weight > 0 && weight >= params.min_p) {
      candidates.push_back({static_cast<int32_t>(i), weight});
    }
  });
  KeepTopK(params.top_k, candidates);
  KeepTopP(params.top_p, candidates);
}

Sampler::Sampler(int vocab_size, std::vector<int32_t> eos_token_ids, ThreadPool* pool)
    : vocab_size_(vocab_size), eos_token_ids_(std::move(eos_token_ids)), pool_(pool) {
  const auto vocab = static_cast<size_t>(vocab_size);
  scratch_.resize(pool == nullptr ? 1 : static_cast<size_t>(pool->num_threads()));
  for (Scratch& scratch : scratch_) {
    scratch.logits.resize(vocab);
    scratch.counts.resize(vocab);
  }
}

void Sampler::Sample(std::span<const SampleRow> rows, std::span<request::SequenceResult*> results) {
  CHECK_EQ(rows.size(), results.size());
  const auto num_rows = static_cast<int64_t>(rows.size());
  const auto num_threads = static_cast<int64_t>(scratch_.size());
  const int64_t grain = std::max<int64_t>(1, (num_rows + num_threads - 1) / num_threads);
  const auto sample_range = [&](int64_t begin, int64_t end) {
    Scratch& scratch = scratch_[static_cast<size_t>(begin / grain)];
    for (int64_t i = begin; i < end; ++i) {
      request::SequenceResult& result = *results[static_cast<size_t>(i)];
      result.status = SampleRowInto(rows[static_cast<size_t>(i)], scratch, result);
    }
  };
  if (pool_ == nullptr) {
    sample_range(0, num_rows);
  } else {
    pool_->ParallelFor(num_rows, grain, sample_range);
  }
}

Status Sampler::SampleRowInto(const SampleRow& row, Scratch& scratch,
                              request::SequenceResult& result) const {
  CHECK_EQ(row.logits.size(), static_cast<size_t>(vocab_size_));
  RETURN_IF_ERROR(CheckLogits(row.logits));
  ASSIGN_OR_RETURN(const int32_t token_id, DrawToken(row, scratch));
  result.sampled_token_ids.push_back(token_id);
  if (const auto& num_logprobs = row.request->sampling.num_logprobs) {
    result.logprobs.push_back(ComputeLogprobs(row.logits, token_id, *num_logprobs));
  }
  return OkStatus();
}

Result<int32_t> Sampler::DrawToken(const SampleRow& row, Scratch& scratch) const {
  const request::SamplingParams& params = row.request->sampling;
  const size_t num_prompt_tokens = row.request->prompt_token_ids.size();
  const TokenHistory history{row.all_token_ids.first(num_prompt_tokens),
                             row.all_token_ids.subspan(num_prompt_tokens), row.num_missing};
  std::span<const float> logits = row.logits;
  std::span<const uint32_t> mask = row.mask;
  if (!EditsNothing(params, history.num_output())) {
    std::copy(logits.begin(), logits.end(), scratch.logits.begin());
    RETURN_IF_ERROR(
        EditLogits(params, history, eos_token_ids_, mask, scratch.logits, scratch.counts));
    logits = scratch.logits;
    mask = {};  // done
  }
  if (params.temperature < kMinTemperature) {
    const int32_t best = BestToken(logits, mask);
    if (best < 0) return NoTokenLeft();
    return best;
  }
  CollectCandidates(params, logits, mask, scratch.candidates);
  if (scratch.candidates.empty()) return NoTokenLeft();
  return Draw(scratch.candidates, UniformAt(params.seed, history.num_output()));
}

}  // namespace fathom::runtime
