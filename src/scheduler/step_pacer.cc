#include "scheduler/step_pacer.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace fathom::scheduler {
namespace {

// How many mixed steps a measurement of decodes alone stays good for: contexts grow, machines slow
// down.
constexpr int kMaxMixedSteps = 64;
// An estimate falls fast and rises slowly: a step that something else held up is no measure.
constexpr double kFallWeight = 0.5;
constexpr double kRiseWeight = 0.1;
// What of its share one step is planned to use, because steps vary.
constexpr double kPlannedShare = 0.9;
// How many times as dear as in a full step a token may be: for the time between two tokens to stay
// short, and of a chunk that makes it long anyway.
constexpr double kDearnessOfSmall = 4;
constexpr double kDearnessOfLarge = 1.25;

// Exact up to 8 decodes, then four buckets an octave.
size_t BucketOf(int num_decodes) {
  const auto n = static_cast<unsigned>(num_decodes);
  if (n <= 8) return n;
  const auto octave = static_cast<unsigned>(std::bit_width(n)) - 1;  // from 3 on
  return 8 + (octave - 3) * 4 + (n >> (octave - 2)) % 4;
}

}  // namespace

void StepLoad::TakeMost(const StepLoad& other) {
  num_decodes = std::max(num_decodes, other.num_decodes);
  num_prefill_tokens = std::max(num_prefill_tokens, other.num_prefill_tokens);
  num_waiting_sessions = std::max(num_waiting_sessions, other.num_waiting_sessions);
}

StepPacer::StepPacer(double decode_floor) : decode_floor_(decode_floor) {
  CHECK(decode_floor >= 0 && decode_floor < 1);
}

double StepPacer::DecodeSeconds(int num_decodes) const {
  const size_t end = decode_costs_.size();
  const size_t bucket = std::min(BucketOf(num_decodes), end);
  for (size_t b = std::min(bucket + 1, end); b-- > 0;) {
    if (decode_costs_[b].num_measured > 0) return decode_costs_[b].seconds;
  }
  for (size_t b = bucket; b < end; ++b) {
    if (decode_costs_[b].num_measured > 0) return decode_costs_[b].seconds;
  }
  return -1;
}

// What prompts may add to a step of decodes.
double StepPacer::PrefillShare(const StepLoad& load) const {
  return DecodeSeconds(load.num_decodes) * (1 / decode_floor_ - 1);
}

int64_t StepPacer::ChunkTokens(const StepLoad& load, int64_t wanted) const {
  const int64_t small = prompt_costs_.TokensWithin(PrefillShare(load) * kPlannedShare, wanted);
  const double cheapest = prompt_costs_.SecondsPerToken(wanted);
  if (prompt_costs_.SecondsPerToken(small) <= kDearnessOfSmall * cheapest) return small;
  if (load.num_waiting_sessions > 1) return wanted;  // for as many of them as it has room for
  return prompt_costs_.TokensFrom(kDearnessOfLarge * cheapest, wanted);
}

int64_t StepPacer::PrefillTokens(const StepLoad& load, int64_t wanted, int64_t in_flight) const {
  if (load.num_decodes == 0 || decode_floor_ == 0 || wanted == 0) return wanted;
  if (DecodeSeconds(load.num_decodes) < 0) return 0;
  const size_t bucket = BucketOf(load.num_decodes);
  if (bucket < decode_costs_.size() && decode_costs_[bucket].num_mixed >= kMaxMixedSteps) return 0;
  const double owed = in_flight == 0 ? 0 : prompt_costs_.Seconds(in_flight);
  if (balance_seconds_ < owed) return 0;
  return ChunkTokens(load, wanted);
}

void StepPacer::MeasureDecodes(DecodeCost& cost, double seconds) {
  const double weight = cost.num_measured == 0   ? 1
                        : seconds < cost.seconds ? kFallWeight
                                                 : kRiseWeight;
  cost.seconds += weight * (seconds - cost.seconds);
  ++cost.num_measured;
  cost.num_mixed = 0;
}

void StepPacer::OnStep(const StepLoad& load, double seconds) {
  if (load.num_decodes == 0) {
    // A step's fixed cost, which a decode alone is nearly all of, is no prompt's.
    const double fixed = DecodeSeconds(1);
    if (fixed >= 0) prompt_costs_.Add(load.num_prefill_tokens, std::max(0.0, seconds - fixed));
    balance_seconds_ = kBurstSeconds;  // nobody is held up
    return;
  }
  const size_t bucket = BucketOf(load.num_decodes);
  if (bucket >= decode_costs_.size()) decode_costs_.resize(bucket + 1);
  double added = 0;
  if (load.num_prefill_tokens == 0) {
    MeasureDecodes(decode_costs_[bucket], seconds);
  } else {
    ++decode_costs_[bucket].num_mixed;
    const double alone = DecodeSeconds(load.num_decodes);
    if (alone < 0) return;  // nothing to compare with
    added = std::max(0.0, seconds - alone);
    // A single stall must not hold prompts up for long.
    const double most = std::max(kBurstSeconds, 2 * prompt_costs_.Seconds(load.num_prefill_tokens));
    prompt_costs_.Add(load.num_prefill_tokens, added);
    added = std::min(added, most);
  }
  if (decode_floor_ == 0) return;
  balance_seconds_ = std::min(balance_seconds_ + PrefillShare(load) - added, kBurstSeconds);
}

}  // namespace fathom::scheduler
