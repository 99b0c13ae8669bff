// ChunkStream: the server-sent events of an OpenAI answer: chunks, usage, an error, [DONE]. Lives
// on the connection's executor.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "api/api_options.h"
#include "api/generation_params.h"
#include "api/openai/answer_format.h"
#include "base/clock.h"
#include "http/response_writer.h"

namespace fathom::api::openai {

class ChunkStream {
 public:
  ChunkStream(std::shared_ptr<http::ResponseWriter> writer, const Envelope& envelope,
              const GenerationParams& params);

  // Sends the headers; comments keep a silent stream alive.
  void Begin(std::chrono::milliseconds keep_alive_interval);
  // Adds one chunk with one choice to what Send writes.
  void Add(const json::Value& choice, const UsageTally& usage);
  // Adds a chunk without choices: how far the prompts are. `prompt_idx` counts those of the
  // request.
  void AddProgress(size_t prompt_idx, int num_processed_tokens, int num_cached_tokens,
                   int64_t num_prompt_tokens);
  // Adds a chunk without choices, with one more member.
  void AddMember(std::string_view name, const json::Value& value);
  void Send();
  // The usage chunk if asked for, [DONE], the end.
  void Finish(const UsageTally& usage);
  // The error as an event, [DONE], the end.
  void Fail(const ApiError& error);

 private:
  const std::shared_ptr<http::ResponseWriter> writer_;
  const std::string open_object_;
  const bool include_usage_;
  const bool continuous_usage_;
  std::string pending_;
  const TimePoint begin_ = std::chrono::steady_clock::now();
  struct Progress {
    int processed = 0;
    int cached = 0;
  };
  std::map<size_t, Progress> progress_;  // by prompt
};

}  // namespace fathom::api::openai
