#include "engine/throughput_log.h"

#include "base/log.h"

namespace fathom::engine {
namespace {

constexpr double kIntervalSeconds = 10;

}  // namespace

void ThroughputLog::Restart(TimePoint now, uint64_t num_prompt_tokens,
                            uint64_t num_generation_tokens) {
  begin_ = now;
  num_prompt_tokens_ = num_prompt_tokens;
  num_generation_tokens_ = num_generation_tokens;
}

void ThroughputLog::Update(TimePoint now, uint64_t num_prompt_tokens,
                           uint64_t num_generation_tokens, const EngineStats& stats) {
  const double seconds = Seconds(now - begin_);
  if (seconds < kIntervalSeconds) return;
  LogInfo(
      "Avg prompt throughput: {:.1f} tokens/s, Avg generation throughput: {:.1f} tokens/s, "
      "Running: {} reqs, Waiting: {} reqs, KV cache usage: {:.1f}%",
      static_cast<double>(num_prompt_tokens - num_prompt_tokens_) / seconds,
      static_cast<double>(num_generation_tokens - num_generation_tokens_) / seconds,
      stats.num_running, stats.num_waiting, stats.kv_cache_usage * 100);
  Restart(now, num_prompt_tokens, num_generation_tokens);
}

}  // namespace fathom::engine
