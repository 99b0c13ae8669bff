// PromptCosts: what prompt tokens add to a step, by their number, learned from steps that were run.
// Any step of a prompt may have to read most of the weights, so few tokens can cost nearly what
// many do (a GPU), or each the same (a CPU). Pure arithmetic on given durations. One thread.
//
// A point for each octave of tokens, straight lines between the points and a while beyond the last;
// further, below the first, and with one point only, in proportion: a guess that the next step
// corrects. A point that no step met for long is forgotten, so that what was once found dear is
// tried again.
#pragma once

#include <array>
#include <cstdint>

namespace fathom::scheduler {

class PromptCosts {
 public:
  // A step had so many prompt tokens, at least one, and took so many seconds more for it.
  void Add(int64_t num_tokens, double seconds);

  double Seconds(int64_t num_tokens) const;
  double SecondsPerToken(int64_t num_tokens) const {
    return Seconds(num_tokens) / static_cast<double>(num_tokens);
  }
  // The most tokens, 1 to `most`, that add no more than `seconds`; one adds what it must.
  int64_t TokensWithin(double seconds, int64_t most) const;
  // The least tokens, 1 to `most`, that add no more than `seconds` each.
  int64_t TokensFrom(double seconds_per_token, int64_t most) const;

 private:
  struct Point {
    double tokens = 0;  // 0: there is none
    double seconds = 0;
    int64_t last_step = 0;
  };
  std::array<Point, 32> points_;  // by octave
  int64_t num_steps_ = 0;
};

}  // namespace fathom::scheduler
