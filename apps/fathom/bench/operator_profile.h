// OperatorProfile: what each operator of a step takes when it runs alone, and what it must at least
// take. On a GPU; owned by a bench command; main thread.
#pragma once

#include <string>
#include <vector>

#include "apps/fathom/bench/step_bench.h"

namespace fathom::app {

struct OperatorTime {
  std::string name;             // of the operator
  std::string layer_kind = {};  // "window", "ratio 4", "ratio 128"; "" for what belongs to no layer
  int count = 0;                // in one step
  double us = 0;                // of all of them
  double floor_us = 0;          // of the bytes and products they stand for; 0 where none is counted
  double bytes = 0;
  double flops = 0;
};

// Runs the step `repeats` times operator by operator, nothing overlapped, and takes each one's
// median; what two marks without work between them take is subtracted. In the order of the step.
// `experts`: what CountExperts gave for the step.
Result<std::vector<OperatorTime>> ProfileOperators(StepBench& bench, const model::StepShape& shape,
                                                   const ExpertCounts& experts, int repeats);

// The same without the kinds of layers.
std::vector<OperatorTime> MergeLayerKinds(const std::vector<OperatorTime>& operators);

}  // namespace fathom::app
