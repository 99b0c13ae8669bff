// StepPacer: how many prompt tokens a step may carry beside decodes, so that the decodes keep a
// floor of the speed that they have alone. It learns what a step costs from the steps that were
// run: decode-only steps by their number of decodes, and the time that a prompt token adds to them.
//
// The floor is kept twice. No step is planned longer than `decode step / floor`, which bounds the
// time between two tokens; and time that prompts took beyond their share is owed and paid back
// before the next prompt runs, so that the average holds even where an estimate is wrong. Pure
// arithmetic on given durations: no clock. One thread (the engine's).
#pragma once

#include <cstdint>
#include <vector>

namespace fathom::scheduler {

class StepPacer {
 public:
  // decode_floor: the share of their solo speed that decodes keep, below 1; 0: no floor.
  explicit StepPacer(double decode_floor);

  // The prompt tokens, at most `wanted`, that a step with `num_decodes` decodes may carry. 0 also
  // where the step is needed to measure decodes alone.
  int64_t PrefillTokens(int num_decodes, int64_t wanted) const;

  // After a step.
  void OnStep(int num_decodes, int64_t num_prefill_tokens, double seconds);

  // What prompt tokens add to a step. A guess until one was run.
  double PrefillSeconds(int64_t num_tokens) const;
  // What a step of so many decodes takes alone; negative when none like it was run yet.
  double DecodeSeconds(int num_decodes) const;

 private:
  // Steps of about the same number of decodes.
  struct DecodeCost {
    double seconds = 0;
    int num_measured = 0;
    int num_mixed = 0;  // steps with prompt tokens since the last measurement
  };
  // What a prompt token costs, in steps of one kind.
  struct TokenRate {
    double per_token = 0;     // seconds
    double usual_tokens = 0;  // in a step; 0: none was run
    void Add(double step_seconds, int64_t step_tokens);
  };

  double PrefillShare(double decode_seconds) const;
  void MeasureDecodes(DecodeCost& cost, double seconds);

  const double decode_floor_;
  std::vector<DecodeCost> decode_costs_;  // by bucket of num_decodes
  TokenRate mixed_rate_;                  // prompt tokens beside decodes: what is planned with
  TokenRate alone_rate_;                  // in steps of prompts alone: until there is a mixed one
  double balance_seconds_ = 0;            // that prompts may take now; negative: owed
};

}  // namespace fathom::scheduler
