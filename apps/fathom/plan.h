// What `fathom plan` found out, apart from how it is shown. Values.
#pragma once

#include <string>
#include <vector>

#include "apps/fathom/commands.h"
#include "config/model_config.h"
#include "model/device_ceilings.h"
#include "model/layout_roofline.h"
#include "model/memory_plan.h"

namespace fathom::app {

// A floor: no layout of these GPUs can be faster than that.
struct PlannedSpeed {
  std::string what;  // "decode, 1 stream at 4096 tokens"
  std::string key;   // of JSON: "decode_1_stream_4096"
  double ms = 0;     // of the step, or until the first token; 0: a rate alone
  double tokens_per_s = 0;
};

struct PlannedLayout {
  config::ParallelConfig parallel;
  model::MemoryPlan memory;
  std::vector<PlannedSpeed> speeds;
  double single_stream_ms = 0;     // a decode step at 4K
  int num_streams = 0;             // of the workload, as many as fit at once
  double output_tokens_per_s = 0;  // with these
};

struct PlanReport {
  config::ModelConfig config;
  model::DeviceCeilings device;
  std::vector<PlannedLayout> layouts;  // one that was asked for, or all of so many GPUs
  // Where nothing fits: the fewest GPUs that do, and how; 0: none that was tried.
  int fitting_gpus = 0;
  config::ParallelConfig fitting;
};

// "--tensor-parallel-size 2 --data-parallel-size 4 --enable-expert-parallel".
std::string LayoutFlags(const config::ParallelConfig& parallel);

// Whether `fathom serve` runs it on GPUs.
bool RunsOnGpus(const config::ParallelConfig& parallel);

// Requests of these lengths are counted, where the context holds them.
std::vector<int64_t> RequestLengths(const PlanOptions& options, const model::MemoryPlan& memory);

// The whole of --json (plan_json.cc).
std::string PlanJson(const PlanOptions& options, const PlanReport& report);

}  // namespace fathom::app
