// EngineMetrics: what the engine counts and times, under the names that vLLM's dashboards know; one
// for each data rank.
// Written by the engine's thread; read by anyone through the registry, which outlives it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/metrics.h"
#include "engine/prefix_cache_metrics.h"
#include "request/request.h"

namespace fathom::engine {

// The times of one request, filled as it goes.
struct RequestTimes {
  TimePoint arrival;
  std::optional<TimePoint> scheduled;  // first time in a batch
  std::optional<TimePoint> first_token;
  std::optional<TimePoint> last_token;
};

class EngineMetrics {
 public:
  // `labels`: of each metric.
  EngineMetrics(MetricsRegistry& registry, const MetricLabels& labels, int64_t max_model_len);

  void OnStep(int num_tokens);
  // Call before times.last_token moves to `now`.
  void OnTokens(const RequestTimes& times, TimePoint now, size_t num_prompt_tokens,
                size_t num_new_tokens);
  void OnFinish(const RequestTimes& times, TimePoint now, request::FinishReason reason,
                size_t num_prompt_tokens, size_t num_output_tokens);
  void SetState(int num_running, int num_waiting, double kv_cache_usage, uint64_t num_preemptions,
                double session_spread_seconds);

  void SetCacheStats(const kv_cache::PrefixCacheStats& stats);

  uint64_t num_prompt_tokens() const { return prompt_tokens_.value(); }
  uint64_t num_generation_tokens() const { return generation_tokens_.value(); }

 private:
  PrefixCacheMetrics prefix_cache_;
  Gauge& num_requests_running_;
  Gauge& num_requests_waiting_;
  Gauge& kv_cache_usage_;
  Gauge& session_spread_;
  Counter& num_preemptions_;
  Counter& prompt_tokens_;
  Counter& generation_tokens_;
  std::array<Counter*, 4> request_success_;  // by FinishReason
  Histogram& iteration_tokens_;
  Histogram& time_to_first_token_;
  Histogram& inter_token_latency_;
  Histogram& e2e_request_latency_;
  Histogram& request_queue_time_;
  Histogram& request_prefill_time_;
  Histogram& request_decode_time_;
  Histogram& request_inference_time_;
  Histogram& request_prompt_tokens_;
  Histogram& request_generation_tokens_;
  uint64_t last_num_preemptions_ = 0;
};

}  // namespace fathom::engine
