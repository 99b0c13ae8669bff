// ThroughputLog: a line every 10 seconds of work, as operators know it from vLLM. One thread (the
// engine's).
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "engine/engine.h"

namespace fathom::engine {

class ThroughputLog {
 public:
  // Work begins after a pause: the pause is not part of any average.
  void Restart(TimePoint now, uint64_t num_prompt_tokens, uint64_t num_generation_tokens);

  // After a step, with the totals since start.
  void Update(TimePoint now, uint64_t num_prompt_tokens, uint64_t num_generation_tokens,
              const EngineStats& stats);

 private:
  TimePoint begin_;
  uint64_t num_prompt_tokens_ = 0;
  uint64_t num_generation_tokens_ = 0;
};

}  // namespace fathom::engine
