// ApiOptions: what the API server is told at start. Plain values.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api/resumable_stream.h"
#include "http/limits.h"
#include "json/json.h"
#include "request/sampling_params.h"
#include "text/chat_encoder.h"
#include "text/grammar_compiler.h"
#include "text/tokenizer.h"

namespace fathom::api {

// Bounds of what one request may ask for.
struct RequestLimits {
  int max_messages = 10'000;
  int max_tools = 128;
  int max_sequences = 64;  // prompts times n
  int max_logprobs = 20;
  int max_logit_bias = 1024;
  int max_stop_strings = 16;
  int max_stop_string_bytes = 256;
  int max_bad_words = 256;
  json::ParseLimits json;
};

struct ApiOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0: any free one
  int num_io_threads = 2;
  // A port of 127.0.0.1 that has /metrics, without keys, instead of the API's; 0: any free one.
  std::optional<int> metrics_port;
  std::vector<std::string> served_model_names;  // at least one; the first is the default
  std::vector<std::string> api_keys;            // empty: no key is asked for
  json::Value default_chat_template_kwargs = json::Value::Object();
  text::EffortProfile effort_profile = text::EffortProfile::kPreview;
  bool raw_special_tokens = false;  // special-token text in messages becomes control tokens
  // Defaults of temperature, top_p, top_k, min_p and repetition_penalty (generation_config.json).
  request::SamplingParams default_sampling;
  std::optional<uint64_t> seed;  // of requests that bring none; unset: from the system
  std::chrono::milliseconds keep_alive_interval{10'000};  // comments on silent streams
  size_t replay_bytes = size_t{64} << 20;           // for answers remembered as they were sampled
  size_t response_store_bytes = size_t{256} << 20;  // for what previous_response_id may name
  ResumableStreams::Options resumable_streams;
  bool allow_routed_experts = false;  // requests may ask for them: up to 1 KB a token
  bool allow_priority = false;        // requests may say theirs
  bool allow_cache_reset = false;     // POST /reset_prefix_cache
  bool isolate_keys = false;          // prefixes are shared between requests of one API key only
  size_t prompt_history_bytes = size_t{64} << 20;  // for explain_cache
  RequestLimits limits;
  text::GrammarCompilerOptions grammar;
  http::Limits http_limits;
};

struct ModelInfo {
  std::string root;  // where the model was loaded from, as told in /v1/models
  text::SpecialTokens special_tokens;
  int num_layers = 0;
  int num_experts = 0;
  int num_experts_per_token = 0;
};

}  // namespace fathom::api
