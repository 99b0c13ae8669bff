// What `bench latency` and `bench kernels` measure of one batch, and how it is shown.
#pragma once

#include <cstdint>
#include <vector>

#include "apps/fathom/bench/operator_profile.h"
#include "json/json.h"

namespace fathom::app {

// Equal prompts that run together.
struct Case {
  int batch_size = 1;
  int64_t input_len = 0;
  int64_t prefill_len = 0;
};

// The steps of one kind that a case takes.
struct StepTimes {
  std::vector<double> seconds;  // decode: of a step; prefill: of all chunks, one an iteration
  double floor_us = 0;          // 0: no ceilings are known for the device
  double bytes = 0;
  double flops = 0;
  double experts = 0;  // distinct ones a layer chose
};

struct CaseResult {
  Case of;
  std::vector<double> latencies;  // seconds, from the first chunk to the last token
  StepTimes prefill, decode;
  double decode_device_us = 0;  // a decode step's time when the host is ahead
  std::vector<OperatorTime> prefill_operators, decode_operators;
};

void PrintCase(const CaseResult& result);
json::Value ToJson(const CaseResult& result, int output_len);

}  // namespace fathom::app
