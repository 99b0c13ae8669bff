// ChunkStream: the server-sent events of an OpenAI answer: chunks, usage, an error, [DONE]. Lives
// on the connection's executor.
#pragma once

#include <memory>
#include <string>

#include "api/api_options.h"
#include "api/generation_params.h"
#include "api/openai/answer_format.h"
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
};

}  // namespace fathom::api::openai
