// StepGaps: what lies between the steps of an engine, as the device sees it: waiting for the host,
// and the sampling. Marks the model's steps on its stream. Made before the engine and read after
// its end; the engine's worker uses it meanwhile.
#pragma once

#include <memory>
#include <vector>

#include "device/timeline.h"
#include "model/model.h"

namespace fathom::app {

class StepGaps {
 public:
  explicit StepGaps(device::DeviceKind kind) : timeline_(device::MakeTimeline(kind)) {}

  // The model with its steps marked; `this` outlives it.
  std::unique_ptr<model::DeepSeekV4> Watch(std::unique_ptr<model::DeepSeekV4> model);

  // Microseconds between a decode step of so many sequences and the next one.
  Result<std::vector<double>> BetweenDecodes(int num_seqs);

 private:
  class MarkedModel;
  struct Step {
    int num_tokens, num_seqs;
  };

  const std::unique_ptr<device::Timeline> timeline_;
  std::vector<Step> steps_;  // two marks each
};

}  // namespace fathom::app
