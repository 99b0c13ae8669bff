// StepPacer: how many prompt tokens a step may carry beside decodes, so that the decodes keep a
// floor of the speed that they have alone. It learns what a step costs from the steps that were
// run: those of decodes alone by their number of decodes, and what prompt tokens add to them
// (prompt_costs.h).
//
// Where small chunks of a prompt are not much dearer a token than full steps, no step is planned
// longer than `decode step / floor`, which bounds the time between two tokens. Where they are (on a
// GPU any step of a prompt reads most experts), a chunk is as large as makes its tokens cheap, and
// steps of decodes follow until these have had their share. The floor holds on average: time that
// prompts took beyond their share is owed and paid back before the next prompt runs; what they left
// unused can be taken at once, up to kBurstSeconds, so that prompts which come together start
// together.
//
// Pure arithmetic on given durations: no clock. One thread (the engine's).
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/prompt_costs.h"

namespace fathom::scheduler {

// What a step has to do: with several data ranks, on the one that has most.
struct StepLoad {
  int num_decodes = 0;
  int64_t num_prefill_tokens = 0;
  int num_waiting_sessions = 0;  // with a prompt to run, now or later
  void TakeMost(const StepLoad& other);
};

class StepPacer {
 public:
  // decode_floor: the share of their solo speed that decodes keep, below 1; 0: no floor.
  explicit StepPacer(double decode_floor);

  // The prompt tokens, at most `wanted`, that a step with `load`'s decodes may carry. 0 also where
  // the step is needed to measure decodes alone. `in_flight`: prompt tokens of a step whose
  // duration is not known yet.
  int64_t PrefillTokens(const StepLoad& load, int64_t wanted, int64_t in_flight = 0) const;

  // After a step.
  void OnStep(const StepLoad& load, double seconds);

  // What prompt tokens add to a step. A guess until one was run.
  double PrefillSeconds(int64_t num_tokens) const { return prompt_costs_.Seconds(num_tokens); }
  // What a step of so many decodes takes alone, or of the next fewer (else more) that were run;
  // negative when none were.
  double DecodeSeconds(int num_decodes) const;

  static constexpr double kBurstSeconds = 0.5;

 private:
  // Steps of about the same number of decodes.
  struct DecodeCost {
    double seconds = 0;
    int num_measured = 0;
    int num_mixed = 0;  // steps with prompt tokens since the last measurement
  };

  double PrefillShare(const StepLoad& load) const;
  int64_t ChunkTokens(const StepLoad& load, int64_t wanted) const;
  static void MeasureDecodes(DecodeCost& cost, double seconds);

  const double decode_floor_;
  std::vector<DecodeCost> decode_costs_;  // by bucket of num_decodes
  PromptCosts prompt_costs_;
  double balance_seconds_ = kBurstSeconds;  // that prompts may take now; negative: owed
};

}  // namespace fathom::scheduler
