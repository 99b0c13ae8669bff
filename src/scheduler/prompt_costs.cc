#include "scheduler/prompt_costs.h"

#include <algorithm>
#include <bit>
#include <ranges>

namespace fathom::scheduler {
namespace {

constexpr double kGuessedSecondsPerToken = 1e-4;
// Of a new step: between cheap tokens come dear ones, of a long context.
constexpr double kRiseWeight = 0.5;
constexpr double kFallWeight = 0.1;
// A step that something else held up is no measure: what is more than so many times the point.
constexpr double kMostRise = 2;
// How far beyond the last point a line says anything.
constexpr double kReach = 8;
constexpr int64_t kForgetAfter = 256;  // steps with prompt tokens

}  // namespace

void PromptCosts::Add(int64_t num_tokens, double seconds) {
  ++num_steps_;
  for (Point& point : points_) {
    if (num_steps_ - point.last_step > kForgetAfter) point = {};
  }
  const auto octave = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(num_tokens)));
  Point& point = points_[std::min(octave, points_.size() - 1)];
  const auto tokens = static_cast<double>(num_tokens);
  if (point.tokens == 0) {
    point = {.tokens = tokens, .seconds = seconds};
  } else {
    const double usual = point.seconds * tokens / point.tokens;
    const double weight = seconds > usual ? kRiseWeight : kFallWeight;
    point.tokens += weight * (tokens - point.tokens);
    point.seconds += weight * (std::min(seconds, kMostRise * usual) - point.seconds);
  }
  point.last_step = num_steps_;
}

double PromptCosts::Seconds(int64_t num_tokens) const {
  const auto tokens = static_cast<double>(num_tokens);
  const Point *below = nullptr, *above = nullptr;
  for (const Point& point : points_) {
    if (point.tokens == 0) continue;
    if (point.tokens >= tokens) {
      above = &point;
      break;
    }
    below = &point;
  }
  if (above == nullptr && below == nullptr) return kGuessedSecondsPerToken * tokens;
  if (below == nullptr) return above->seconds * tokens / above->tokens;
  if (above == nullptr && kReach * below->tokens < tokens) {
    const double reach = kReach * below->tokens;
    return Seconds(static_cast<int64_t>(reach)) * tokens / reach;
  }
  if (above == nullptr) {
    // From two that are far enough apart for their difference to be more than noise.
    above = below;
    below = nullptr;
    for (const Point& point : points_) {
      if (point.tokens > 0 && 2 * point.tokens <= above->tokens) below = &point;
    }
    if (below == nullptr) return above->seconds * tokens / above->tokens;
  }
  const double slope = (above->seconds - below->seconds) / (above->tokens - below->tokens);
  return above->seconds + std::max(0.0, slope) * (tokens - above->tokens);
}

int64_t PromptCosts::TokensWithin(double seconds, int64_t most) const {
  const auto more = std::views::iota(int64_t{2}, std::max<int64_t>(most, 1) + 1);
  const auto beyond =
      std::ranges::partition_point(more, [&](int64_t n) { return Seconds(n) <= seconds; });
  return 1 + (beyond - more.begin());
}

int64_t PromptCosts::TokensFrom(double seconds_per_token, int64_t most) const {
  const auto fewer = std::views::iota(int64_t{1}, most);
  const auto first = std::ranges::partition_point(
      fewer, [&](int64_t n) { return SecondsPerToken(n) > seconds_per_token; });
  return 1 + (first - fewer.begin());
}

}  // namespace fathom::scheduler
