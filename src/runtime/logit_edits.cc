#include "runtime/logit_edits.h"

#include <algorithm>
#include <limits>

namespace fathom::runtime {
namespace {

constexpr float kRuledOut = -std::numeric_limits<float>::infinity();

bool InRow(int32_t id, std::span<const float> logits) {
  return id >= 0 && static_cast<size_t>(id) < logits.size();
}

bool HasPenalties(const request::SamplingParams& params) {
  return params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 ||
         params.presence_penalty != 0.0;
}

void KeepAllowed(std::span<const int32_t> allowed, std::span<float> logits) {
  if (allowed.empty()) return;
  std::vector<int32_t> ids(allowed.begin(), allowed.end());
  std::sort(ids.begin(), ids.end());
  auto next = ids.begin();
  for (size_t i = 0; i < logits.size(); ++i) {
    while (next != ids.end() && *next < static_cast<int32_t>(i)) ++next;
    if (next == ids.end() || *next != static_cast<int32_t>(i)) logits[i] = kRuledOut;
  }
}

void KeepMasked(std::span<const uint32_t> mask, std::span<float> logits) {
  if (mask.empty()) return;
  // Most words are all ones or all zeros.
  for (size_t begin = 0; begin < logits.size(); begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == ~0u) continue;
    const std::span<float> some =
        logits.subspan(begin, std::min<size_t>(32, logits.size() - begin));
    for (size_t i = 0; i < some.size(); ++i) {
      some[i] = (word >> i & 1u) != 0 ? some[i] : kRuledOut;
    }
  }
}

// Rules out the token that would complete a bad word at the end of the output.
void RuleOutBadWords(const std::vector<std::vector<int32_t>>& bad_words,
                     std::span<const int32_t> output, std::span<float> logits) {
  for (const std::vector<int32_t>& word : bad_words) {
    if (CompletesBadWord(word, output) && InRow(word.back(), logits)) {
      logits[static_cast<size_t>(word.back())] = kRuledOut;
    }
  }
}

bool AnyLeft(std::span<const float> logits) {
  return std::any_of(logits.begin(), logits.end(), [](float x) { return x > kRuledOut; });
}

// Rules end and stop ids out, unless nothing else is left (a grammar that is complete).
void RuleOutStops(const request::SamplingParams& params, std::span<const int32_t> eos_token_ids,
                  std::span<float> logits) {
  std::vector<std::pair<int32_t, float>> before;
  for (const std::span<const int32_t> ids :
       {eos_token_ids, std::span<const int32_t>(params.stop_token_ids)}) {
    for (const int32_t id : ids) {
      if (!InRow(id, logits)) continue;
      float& logit = logits[static_cast<size_t>(id)];
      before.emplace_back(id, logit);
      logit = kRuledOut;
    }
  }
  if (AnyLeft(logits)) return;
  // An id that is listed twice was saved first with its true value.
  for (auto it = before.rbegin(); it != before.rend(); ++it) {
    logits[static_cast<size_t>(it->first)] = it->second;
  }
}

void Repeat(double penalty, std::span<const int32_t> ids, std::span<float> logits,
            std::vector<int32_t>& counts) {
  for (const int32_t id : ids) {
    if (!InRow(id, logits) || counts[static_cast<size_t>(id)]++ > 0) continue;
    float& logit = logits[static_cast<size_t>(id)];
    logit = static_cast<float>(logit > 0 ? logit / penalty : logit * penalty);
  }
}

void Clear(std::span<const int32_t> ids, std::vector<int32_t>& counts) {
  for (const int32_t id : ids) {
    if (id >= 0 && static_cast<size_t>(id) < counts.size()) counts[static_cast<size_t>(id)] = 0;
  }
}

void ApplyPenalties(const request::SamplingParams& params, const TokenHistory& history,
                    std::span<float> logits, std::vector<int32_t>& counts) {
  if (params.repetition_penalty != 1.0) {
    Repeat(params.repetition_penalty, history.prompt, logits, counts);
    Repeat(params.repetition_penalty, history.output, logits, counts);
    Clear(history.prompt, counts);
    Clear(history.output, counts);
  }
  for (const int32_t id : history.output) {
    if (InRow(id, logits)) ++counts[static_cast<size_t>(id)];
  }
  for (const int32_t id : history.output) {
    if (!InRow(id, logits)) continue;
    int32_t& count = counts[static_cast<size_t>(id)];
    if (count == 0) continue;  // done already
    logits[static_cast<size_t>(id)] -=
        static_cast<float>(params.frequency_penalty * count + params.presence_penalty);
    count = 0;
  }
}

}  // namespace

bool IsMinTokensPending(const request::SamplingParams& params, size_t num_output_tokens) {
  return !params.ignore_eos && static_cast<int64_t>(num_output_tokens) < params.min_tokens;
}

bool CompletesBadWord(const std::vector<int32_t>& word, std::span<const int32_t> output) {
  if (word.empty() || word.size() - 1 > output.size()) return false;
  const auto tail = output.last(word.size() - 1);
  return std::equal(tail.begin(), tail.end(), word.begin());
}

bool EditsNothing(const request::SamplingParams& params, size_t num_output_tokens) {
  return params.allowed_token_ids.empty() && params.bad_words.empty() &&
         params.logit_bias.empty() && !IsMinTokensPending(params, num_output_tokens) &&
         !HasPenalties(params);
}

Status NoTokenLeft() {
  return InvalidArgument(
      "no token may follow: allowed_token_ids, bad_words and the output's grammar rule all out");
}

Status EditLogits(const request::SamplingParams& params, const TokenHistory& history,
                  std::span<const int32_t> eos_token_ids, std::span<const uint32_t> mask,
                  std::span<float> logits, std::vector<int32_t>& counts) {
  KeepAllowed(params.allowed_token_ids, logits);
  KeepMasked(mask, logits);
  RuleOutBadWords(params.bad_words, history.output, logits);
  for (const auto& [id, bias] : params.logit_bias) {
    if (InRow(id, logits)) logits[static_cast<size_t>(id)] += bias;
  }
  if (IsMinTokensPending(params, history.num_output())) {
    RuleOutStops(params, eos_token_ids, logits);
  }
  if (!AnyLeft(logits)) return NoTokenLeft();
  if (HasPenalties(params)) ApplyPenalties(params, history, logits, counts);
  return OkStatus();
}

}  // namespace fathom::runtime
