#include "engine/engine_metrics.h"

#include <vector>

namespace fathom::engine {
namespace {

// The bounds are vLLM's, so that its dashboards' quantiles mean the same.
const std::vector<double> kFirstTokenBounds = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                               0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                               20,    40,    80,   160,  640,  2560};
const std::vector<double> kInterTokenBounds = {
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
const std::vector<double> kRequestBounds = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                            30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
const std::vector<double> kIterationBounds = {1,   8,    16,   32,   64,   128,  256,
                                              512, 1024, 2048, 4096, 8192, 16384};

// 1, 2, 5, 10, 20, 50, … up to `max`.
std::vector<double> TokenBounds(int64_t max) {
  std::vector<double> bounds;
  for (int64_t decade = 1; decade <= max; decade *= 10) {
    for (const int64_t step : {1, 2, 5}) {
      if (decade * step <= max) bounds.push_back(static_cast<double>(decade * step));
    }
  }
  return bounds;
}

}  // namespace

EngineMetrics::EngineMetrics(MetricsRegistry& registry, const MetricLabels& labels,
                             int64_t max_model_len)
    : prefix_cache_(registry, labels),
      num_requests_running_(
          registry.AddGauge("vllm:num_requests_running", "Requests in the running batch.", labels)),
      num_requests_waiting_(
          registry.AddGauge("vllm:num_requests_waiting", "Requests waiting to run.", labels)),
      kv_cache_usage_(registry.AddGauge("vllm:kv_cache_usage_perc",
                                        "Share of the KV cache's blocks in use, 0 to 1.", labels)),
      session_spread_(registry.AddGauge(
          "fathom:session_spread_seconds",
          "Device time by which the live session served most is ahead of the one served least.",
          labels)),
      num_preemptions_(registry.AddCounter("vllm:num_preemptions",
                                           "Running requests put back for memory.", labels)),
      prompt_tokens_(registry.AddCounter("vllm:prompt_tokens", "Prompt tokens processed.", labels)),
      generation_tokens_(
          registry.AddCounter("vllm:generation_tokens", "Tokens generated.", labels)),
      iteration_tokens_(registry.AddHistogram("vllm:iteration_tokens_total", "Tokens of a step.",
                                              kIterationBounds, labels)),
      time_to_first_token_(registry.AddHistogram("vllm:time_to_first_token_seconds",
                                                 "Arrival to first token.", kFirstTokenBounds,
                                                 labels)),
      inter_token_latency_(registry.AddHistogram("vllm:inter_token_latency_seconds",
                                                 "Between the tokens of a request.",
                                                 kInterTokenBounds, labels)),
      e2e_request_latency_(registry.AddHistogram("vllm:e2e_request_latency_seconds",
                                                 "Arrival to end.", kRequestBounds, labels)),
      request_queue_time_(registry.AddHistogram("vllm:request_queue_time_seconds",
                                                "Arrival to first step.", kRequestBounds, labels)),
      request_prefill_time_(registry.AddHistogram("vllm:request_prefill_time_seconds",
                                                  "First step to first token.", kRequestBounds,
                                                  labels)),
      request_decode_time_(registry.AddHistogram("vllm:request_decode_time_seconds",
                                                 "First token to last token.", kRequestBounds,
                                                 labels)),
      request_inference_time_(registry.AddHistogram("vllm:request_inference_time_seconds",
                                                    "First step to last token.", kRequestBounds,
                                                    labels)),
      request_prompt_tokens_(registry.AddHistogram("vllm:request_prompt_tokens",
                                                   "Prompt tokens of a request.",
                                                   TokenBounds(max_model_len), labels)),
      request_generation_tokens_(registry.AddHistogram("vllm:request_generation_tokens",
                                                       "Tokens generated for a request.",
                                                       TokenBounds(max_model_len), labels)) {
  // In FinishReason's order.
  constexpr std::array<const char*, 4> kReasons = {"stop", "length", "abort", "error"};
  for (size_t i = 0; i < kReasons.size(); ++i) {
    MetricLabels with_reason = labels;
    with_reason.emplace_back("finished_reason", kReasons[i]);
    request_success_[i] =
        &registry.AddCounter("vllm:request_success", "Requests ended.", std::move(with_reason));
  }
}

void EngineMetrics::SetCacheStats(const kv_cache::PrefixCacheStats& stats) {
  prefix_cache_.Set(stats);
}

void EngineMetrics::OnStep(int num_tokens) { iteration_tokens_.Observe(num_tokens); }

void EngineMetrics::OnTokens(const RequestTimes& times, TimePoint now, size_t num_prompt_tokens,
                             size_t num_new_tokens) {
  if (!times.first_token) {
    prompt_tokens_.Increment(num_prompt_tokens);
    time_to_first_token_.Observe(Seconds(now - times.arrival));
  } else {
    inter_token_latency_.Observe(Seconds(now - *times.last_token));
  }
  generation_tokens_.Increment(num_new_tokens);
}

void EngineMetrics::OnFinish(const RequestTimes& times, TimePoint now, request::FinishReason reason,
                             size_t num_prompt_tokens, size_t num_output_tokens) {
  request_success_[static_cast<size_t>(reason)]->Increment();
  e2e_request_latency_.Observe(Seconds(now - times.arrival));
  request_prompt_tokens_.Observe(static_cast<double>(num_prompt_tokens));
  request_generation_tokens_.Observe(static_cast<double>(num_output_tokens));
  if (!times.scheduled) return;
  request_queue_time_.Observe(Seconds(*times.scheduled - times.arrival));
  if (!times.first_token) return;
  request_prefill_time_.Observe(Seconds(*times.first_token - *times.scheduled));
  request_decode_time_.Observe(Seconds(*times.last_token - *times.first_token));
  request_inference_time_.Observe(Seconds(*times.last_token - *times.scheduled));
}

void EngineMetrics::SetState(int num_running, int num_waiting, double kv_cache_usage,
                             uint64_t num_preemptions, double session_spread_seconds) {
  num_requests_running_.Set(num_running);
  num_requests_waiting_.Set(num_waiting);
  kv_cache_usage_.Set(kv_cache_usage);
  session_spread_.Set(session_spread_seconds);
  num_preemptions_.Increment(num_preemptions - last_num_preemptions_);
  last_num_preemptions_ = num_preemptions;
}

}  // namespace fathom::engine
