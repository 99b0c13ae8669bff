// GenerationParams: what a request asks of generation besides its prompt; the fields that chat and
// text completions share, read and checked in one place. Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api/field_reader.h"
#include "api/server_context.h"
#include "http/message.h"
#include "request/sampling_params.h"

namespace fathom::api {

struct GenerationParams {
  request::SamplingParams sampling;   // but max_tokens, which follows from the prompt's length
  std::optional<int64_t> max_tokens;  // as asked
  bool seed_given = false;
  int num_choices = 1;
  std::vector<std::string> stop;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  std::optional<int64_t> truncate_prompt_tokens;
  bool add_special_tokens = true;
  bool echo = false;

  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool return_progress = false;
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;

  std::optional<int32_t> routed_experts_start;  // set: they are asked for, from this token on

  std::string client_request_id;
  std::string cache_salt;
  std::string session;
  int priority = 0;
  std::optional<int> data_rank;  // of --data-parallel-size, as the caller's header asks
};

GenerationParams ReadGenerationParams(FieldReader* fields, const ServerContext& context);

// The salt of a request's prefixes: any text of 1 to 1024 bytes. Empty when there is none.
std::string ReadCacheSalt(FieldReader* fields);

// What the headers say: nobody else's session has the same name, with `isolate_keys` nobody else's
// prefixes are found, and X-data-parallel-rank chooses the data rank.
void BindToCaller(const http::Request& request, const ServerContext& context,
                  GenerationParams* params);

// 404 model_not_found unless the request names a served model or none. The name to answer with.
Parsed<std::string> ReadModelName(FieldReader* fields, const ServerContext& context);

// A field that would change the answer and is not served refuses the request; it is never ignored.
void RefuseUnsupportedFields(FieldReader* fields);

}  // namespace fathom::api
