// StepGaps: the steps of an engine and what lies between them, as the device sees it: waiting for
// the host, and the sampling. Marks the model's steps on its stream. Made before the engine and
// read after its end; the engine's worker uses it meanwhile.
#pragma once

#include <atomic>
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

  // Steps from here on are what Take tells of. Any thread.
  void BeginRun() { ++run_; }

  struct Step {
    int num_tokens = 0;  // of all data ranks together
    bool has_prompt = false;
    double us = 0;          // microseconds
    double us_to_next = 0;  // to where the next step begins; 0 of the last
  };
  // In the order in which they ran.
  Result<std::vector<Step>> Take();

 private:
  class MarkedModel;
  struct Marked {  // two marks each
    int run;
    Step step;
  };

  const std::unique_ptr<device::Timeline> timeline_;
  std::atomic<int> run_{0};
  std::vector<Marked> steps_;
};

}  // namespace fathom::app
