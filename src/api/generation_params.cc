#include "api/generation_params.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_set>
#include <utility>

#include "api/auth.h"
#include "api/identifiers.h"

namespace fathom::api {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

void ReadDistribution(FieldReader* fields, request::SamplingParams* sampling) {
  sampling->temperature = fields->Number("temperature", 0, 2).value_or(sampling->temperature);
  sampling->top_p = fields->Number("top_p", 0, 1).value_or(sampling->top_p);
  if (sampling->top_p == 0) fields->Fail("top_p", "top_p must be greater than 0");
  const auto top_k = fields->Integer("top_k", -1, kMaxInt);
  if (top_k) sampling->top_k = static_cast<int>(std::max<int64_t>(*top_k, 0));
  sampling->min_p = fields->Number("min_p", 0, 1).value_or(sampling->min_p);
  sampling->presence_penalty = fields->Number("presence_penalty", -2, 2).value_or(0);
  sampling->frequency_penalty = fields->Number("frequency_penalty", -2, 2).value_or(0);
  // Far below 1 it would make logits infinite.
  sampling->repetition_penalty =
      fields->Number("repetition_penalty", 0.001, 100).value_or(sampling->repetition_penalty);
}

void ReadLogitBias(FieldReader* fields, const ServerContext& context,
                   request::SamplingParams* sampling) {
  const json::Value* object = fields->Object("logit_bias");
  if (object == nullptr) return;
  const auto max_items = static_cast<size_t>(context.options.limits.max_logit_bias);
  if (object->members().size() > max_items) {
    return fields->Fail("logit_bias", fmt::format("logit_bias may have at most {} entries, got {}",
                                                  max_items, object->members().size()));
  }
  const int32_t vocab_size = context.tokenizer.vocab_size();
  std::unordered_set<int32_t> seen;
  for (const json::Member& member : object->members()) {
    int32_t id = -1;
    const char* end = member.key.data() + member.key.size();
    const auto parsed = std::from_chars(member.key.data(), end, id);
    const bool is_id = parsed.ec == std::errc() && parsed.ptr == end && id >= 0 && id < vocab_size;
    if (!is_id || !seen.insert(id).second) {
      return fields->Fail(
          "logit_bias",
          fmt::format("logit_bias: the keys must be distinct token ids from 0 to {}, got {}",
                      vocab_size - 1, ShortDump(json::Value::String(member.key))));
    }
    const std::optional<double> bias =
        member.value.is_number() ? member.value.ToDouble() : std::nullopt;
    if (!bias || std::fabs(*bias) > 100) {
      return fields->Fail("logit_bias",
                          fmt::format("logit_bias: the values must be between -100 and 100, got {}",
                                      ShortDump(member.value)));
    }
    sampling->logit_bias.emplace_back(id, static_cast<float>(*bias));
  }
}

// A string or a list of strings, each of 1 to max_bytes bytes.
std::vector<std::string> ReadStrings(FieldReader* fields, std::string_view name, int max_items,
                                     int max_bytes) {
  const json::Value* value = fields->Find(name);
  if (value == nullptr) return {};
  std::vector<std::string> out;
  const auto add = [&](const json::Value& item) {
    const bool fits = item.is_string() && !item.AsString().empty() &&
                      item.AsString().size() <= static_cast<size_t>(max_bytes);
    if (fits) {
      out.push_back(item.AsString());
    } else {
      fields->Fail(name, fmt::format("{} must be strings of 1 to {} bytes", name, max_bytes));
    }
  };
  if (!value->is_array()) {
    add(*value);
  } else if (value->items().size() > static_cast<size_t>(max_items)) {
    fields->Fail(name, fmt::format("{} may have at most {} strings, got {}", name, max_items,
                                   value->items().size()));
  } else {
    for (const json::Value& item : value->items()) add(item);
  }
  return out;
}

// A word is avoided both at the start of a text and after a space.
void ReadBadWords(FieldReader* fields, const ServerContext& context,
                  request::SamplingParams* sampling) {
  const RequestLimits& limits = context.options.limits;
  for (const std::string& word :
       ReadStrings(fields, "bad_words", limits.max_bad_words, limits.max_stop_string_bytes)) {
    for (const std::string& form : {word, " " + word}) {
      std::vector<int32_t> ids;
      context.tokenizer.Encode(form, text::Tokenizer::AddedTokens::kAsPlain, &ids);
      sampling->bad_words.push_back(std::move(ids));
    }
  }
}

void ReadLength(FieldReader* fields, GenerationParams* params) {
  const auto max_tokens = fields->Integer("max_tokens", 1, kMaxInt);
  params->max_tokens = fields->Integer("max_completion_tokens", 1, kMaxInt);
  if (!params->max_tokens) params->max_tokens = max_tokens;
  params->sampling.min_tokens =
      static_cast<int>(fields->Integer("min_tokens", 0, kMaxInt).value_or(0));
  if (params->max_tokens && params->sampling.min_tokens > *params->max_tokens) {
    fields->Fail("min_tokens",
                 fmt::format("min_tokens must not be greater than max_tokens, got {} and {}",
                             params->sampling.min_tokens, *params->max_tokens));
  }
  params->truncate_prompt_tokens = fields->Integer("truncate_prompt_tokens", -1, kMaxInt);
  if (params->truncate_prompt_tokens == 0) {
    fields->Fail("truncate_prompt_tokens",
                 "truncate_prompt_tokens must be at least 1, or -1 for the context");
  }
}

void ReadStreaming(FieldReader* fields, GenerationParams* params) {
  params->stream = fields->Bool("stream").value_or(false);
  params->return_progress = fields->Bool("return_progress").value_or(false);
  if (params->return_progress && !params->stream) {
    fields->Fail("return_progress", "return_progress is only allowed when stream is true");
  }
  const json::Value* options = fields->Object("stream_options");
  if (options == nullptr) return;
  if (!params->stream) {
    return fields->Fail("stream_options", "stream_options is only allowed when stream is true");
  }
  FieldReader reader(*options);
  params->include_usage = reader.Bool("include_usage").value_or(false);
  params->continuous_usage = reader.Bool("continuous_usage_stats").value_or(false);
  if (!reader.ok()) fields->Fail("stream_options", "stream_options." + reader.error()->message);
}

// -1, which the engine refuses with the ranks there are, for what is no number.
int DataRankOf(const std::string& header) {
  int rank = -1;
  const char* end = header.data() + header.size();
  const auto [parsed_end, error] = std::from_chars(header.data(), end, rank);
  return error == std::errc() && parsed_end == end ? rank : -1;
}

void ReadScope(FieldReader* fields, const ServerContext& context, GenerationParams* params) {
  params->cache_salt = ReadCacheSalt(fields);
  const std::string user = fields->String("user").value_or("");
  params->session = SanitizeClientId(fields->String("session_id").value_or(user));
  params->client_request_id = SanitizeClientId(fields->String("request_id").value_or(""));
  const int64_t priority =
      fields->Integer("priority", std::numeric_limits<int32_t>::min(), kMaxInt).value_or(0);
  params->priority = static_cast<int>(priority);
  if (priority != 0 && !context.options.allow_priority) {
    fields->Fail("priority",
                 "priority needs a server that was started with --scheduling-policy priority");
  }
}

void ReadRoutedExperts(FieldReader* fields, const ServerContext& context,
                       GenerationParams* params) {
  // vLLM's name, and SGLang's.
  const auto start = fields->Integer("routed_experts_prompt_start", 0, kMaxInt);
  const auto start_len = fields->Integer("routed_experts_start_len", 0, kMaxInt);
  if (!fields->Bool("return_routed_experts").value_or(false)) return;
  params->routed_experts_start = static_cast<int32_t>(start.value_or(start_len.value_or(0)));
  if (!context.options.allow_routed_experts) {
    fields->Fail("return_routed_experts",
                 "return_routed_experts needs a server that was started with "
                 "--enable-return-routed-experts");
  }
  if (params->stream) {
    fields->Fail("return_routed_experts",
                 "return_routed_experts is not allowed when stream is true");
  }
}

}  // namespace

GenerationParams ReadGenerationParams(FieldReader* fields, const ServerContext& context) {
  const RequestLimits& limits = context.options.limits;
  GenerationParams params;
  params.sampling = context.options.default_sampling;
  ReadDistribution(fields, &params.sampling);
  ReadLogitBias(fields, context, &params.sampling);
  ReadBadWords(fields, context, &params.sampling);
  ReadLength(fields, &params);
  const auto seed = fields->Integer("seed", std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<int64_t>::max());
  params.seed_given = seed.has_value();
  params.sampling.seed = seed ? static_cast<uint64_t>(*seed) : 0;
  params.num_choices = static_cast<int>(fields->Integer("n", 1, limits.max_sequences).value_or(1));
  const int32_t vocab_size = context.tokenizer.vocab_size();
  params.sampling.stop_token_ids = fields->TokenIds("stop_token_ids", vocab_size, 64);
  params.sampling.allowed_token_ids =
      fields->TokenIds("allowed_token_ids", vocab_size, static_cast<size_t>(vocab_size));
  params.stop = ReadStrings(fields, "stop", limits.max_stop_strings, limits.max_stop_string_bytes);
  params.include_stop_str_in_output = fields->Bool("include_stop_str_in_output").value_or(false);
  params.sampling.ignore_eos = fields->Bool("ignore_eos").value_or(false);
  params.skip_special_tokens = fields->Bool("skip_special_tokens").value_or(true);
  params.add_special_tokens = fields->Bool("add_special_tokens").value_or(true);
  params.echo = fields->Bool("echo").value_or(false);
  ReadStreaming(fields, &params);
  params.return_token_ids = fields->Bool("return_token_ids").value_or(false);
  params.return_tokens_as_token_ids = fields->Bool("return_tokens_as_token_ids").value_or(false);
  const auto prompt_logprobs = fields->Integer("prompt_logprobs", 0, limits.max_logprobs);
  if (prompt_logprobs && params.stream) {
    fields->Fail("prompt_logprobs", "prompt_logprobs is not allowed when stream is true");
  }
  if (prompt_logprobs) params.sampling.num_prompt_logprobs = static_cast<int>(*prompt_logprobs);
  ReadRoutedExperts(fields, context, &params);
  ReadScope(fields, context, &params);
  return params;
}

std::string ReadCacheSalt(FieldReader* fields) {
  constexpr size_t kMaxBytes = 1024;
  const std::optional<std::string> salt = fields->String("cache_salt");
  if (salt && (salt->empty() || salt->size() > kMaxBytes))
    fields->Fail("cache_salt", fmt::format("cache_salt must be 1 to {} bytes", kMaxBytes));
  return salt.value_or("");
}

void BindToCaller(const http::Request& request, const ServerContext& context,
                  GenerationParams* params) {
  if (!params->session.empty()) params->session = CallerScope(request, params->session);
  if (context.options.isolate_keys) params->cache_salt = CallerScope(request, params->cache_salt);
  if (const std::string* rank = request.FindHeader("X-data-parallel-rank")) {
    params->data_rank = DataRankOf(*rank);
  }
}

Parsed<std::string> ReadModelName(FieldReader* fields, const ServerContext& context) {
  const std::optional<std::string> name = fields->String("model");
  if (!fields->ok()) return *fields->error();
  const std::vector<std::string>& served = context.options.served_model_names;
  if (!name) return context.default_model_name();
  if (std::find(served.begin(), served.end(), *name) != served.end()) return *name;
  return ModelNotFound(*name, served);
}

void RefuseUnsupportedFields(FieldReader* fields) {
  struct Refused {
    std::string_view name;
    std::string_view reason;
  };
  static constexpr Refused kRefused[] = {
      {"chat_template", "the prompt format is the model's own; remove chat_template"},
      {"logits_processors",
       "logits_processors are not served; use logit_bias or allowed_token_ids"},
      {"functions", "functions is the old form of tools; send tools"},
      {"function_call", "function_call is the old form of tool_choice; send tool_choice"},
      {"audio", "audio output is not served; remove the field"},
      {"kv_transfer_params", "kv_transfer_params needs a server with a KV transfer role"},
      {"thinking_token_budget",
       "thinking_token_budget is not served; use max_tokens or reasoning_effort"},
      {"repetition_detection", "repetition_detection is not served; remove the field"},
  };
  for (const Refused& refused : kRefused) {
    if (fields->Find(refused.name) != nullptr) {
      fields->Fail(refused.name, std::string(refused.reason));
    }
  }
  if (fields->Bool("use_beam_search").value_or(false)) {
    fields->Fail("use_beam_search", "beam search is not served; remove use_beam_search");
  }
}

}  // namespace fathom::api
