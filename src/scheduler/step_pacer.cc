#include "scheduler/step_pacer.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace fathom::scheduler {
namespace {

constexpr double kGuessedSecondsPerToken = 1e-4;
// Measurements of decodes alone before prompts may join, and how many mixed steps one stays good
// for: contexts grow, machines slow down.
constexpr int kMinMeasured = 2;
constexpr int kMaxMixedSteps = 64;
// An estimate falls fast and rises slowly: a step that something else held up is no measure.
constexpr double kFallWeight = 0.5;
constexpr double kRiseWeight = 0.1;
// The opposite for prompts: between cheap tokens come dear ones, of a long context.
constexpr double kRateRiseWeight = 0.5;
constexpr double kRateFallWeight = 0.1;
// What of its share one step is planned to use, because steps vary.
constexpr double kPlannedShare = 0.9;
// The most that prompts can owe, in shares of one step: a single stall must not hold them for long.
constexpr double kMaxOwedShares = 8;

// Exact up to 8 decodes, then four buckets an octave.
size_t BucketOf(int num_decodes) {
  const auto n = static_cast<unsigned>(num_decodes);
  if (n <= 8) return n;
  const auto octave = static_cast<unsigned>(std::bit_width(n)) - 1;  // from 3 on
  return 8 + (octave - 3) * 4 + (n >> (octave - 2)) % 4;
}

}  // namespace

void StepPacer::TokenRate::Add(double step_seconds, int64_t step_tokens) {
  const auto tokens = static_cast<double>(step_tokens);
  const double rate = step_seconds / tokens;
  if (usual_tokens == 0) {
    per_token = rate;
    usual_tokens = tokens;
    return;
  }
  // A prompt's short last chunk says little.
  const double weight =
      (rate > per_token ? kRateRiseWeight : kRateFallWeight) * std::min(1.0, tokens / usual_tokens);
  per_token += weight * (rate - per_token);
  usual_tokens += kRateFallWeight * (tokens - usual_tokens);
}

StepPacer::StepPacer(double decode_floor) : decode_floor_(decode_floor) {
  CHECK(decode_floor >= 0 && decode_floor < 1);
}

double StepPacer::PrefillSeconds(int64_t num_tokens) const {
  const TokenRate& rate = mixed_rate_.usual_tokens > 0 ? mixed_rate_ : alone_rate_;
  const double per_token = rate.usual_tokens > 0 ? rate.per_token : kGuessedSecondsPerToken;
  return per_token * static_cast<double>(num_tokens);
}

double StepPacer::DecodeSeconds(int num_decodes) const {
  const size_t bucket = BucketOf(num_decodes);
  if (bucket >= decode_costs_.size() || decode_costs_[bucket].num_measured == 0) return -1;
  return decode_costs_[bucket].seconds;
}

// What prompts may add to a step of decodes.
double StepPacer::PrefillShare(double decode_seconds) const {
  return decode_seconds * (1 / decode_floor_ - 1);
}

int64_t StepPacer::PrefillTokens(int num_decodes, int64_t wanted) const {
  if (num_decodes == 0 || decode_floor_ == 0) return wanted;
  const size_t bucket = BucketOf(num_decodes);
  if (bucket >= decode_costs_.size()) return 0;
  const DecodeCost& cost = decode_costs_[bucket];
  if (cost.num_measured < kMinMeasured || cost.num_mixed >= kMaxMixedSteps) return 0;
  const double token_seconds = PrefillSeconds(1);
  // A token that takes longer than that waits until several shares have come together.
  const double most = std::max(PrefillShare(cost.seconds) * kPlannedShare, token_seconds);
  const double seconds = std::min(balance_seconds_, most);
  if (seconds >= token_seconds * static_cast<double>(wanted)) return wanted;
  return std::max<int64_t>(0, static_cast<int64_t>(seconds / token_seconds));
}

void StepPacer::MeasureDecodes(DecodeCost& cost, double seconds) {
  const double weight = cost.num_measured == 0   ? 1
                        : seconds < cost.seconds ? kFallWeight
                                                 : kRiseWeight;
  cost.seconds += weight * (seconds - cost.seconds);
  ++cost.num_measured;
  cost.num_mixed = 0;
}

void StepPacer::OnStep(int num_decodes, int64_t num_prefill_tokens, double seconds) {
  if (num_decodes == 0) {
    // The step's fixed cost is no prompt's: a decode alone is nearly nothing else.
    const double fixed = std::max(0.0, DecodeSeconds(1));
    if (num_prefill_tokens > 0) {
      alone_rate_.Add(std::max(0.0, seconds - fixed), num_prefill_tokens);
    }
    return;
  }
  const size_t bucket = BucketOf(num_decodes);
  if (bucket >= decode_costs_.size()) decode_costs_.resize(bucket + 1);
  DecodeCost& cost = decode_costs_[bucket];
  double added_seconds = 0;
  if (num_prefill_tokens == 0) {
    MeasureDecodes(cost, seconds);
  } else {
    ++cost.num_mixed;
    if (cost.num_measured == 0) return;  // nothing to compare with
    added_seconds = std::max(0.0, seconds - cost.seconds);
    mixed_rate_.Add(added_seconds, num_prefill_tokens);
  }
  if (decode_floor_ == 0) return;
  const double share = PrefillShare(cost.seconds);
  balance_seconds_ = std::clamp(balance_seconds_ + share - added_seconds, -kMaxOwedShares * share,
                                std::max(share, PrefillSeconds(1)));
}

}  // namespace fathom::scheduler
