// The answer to a text completion, streamed or whole. Choice p * n + i is the i-th answer to prompt
// p. Lives on the connection's executor.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/generation.h"
#include "api/openai/answer_format.h"
#include "api/openai/chunk_stream.h"
#include "api/openai/completion_request.h"
#include "api/openai/logprobs_format.h"
#include "api/server_context.h"

namespace fathom::api::openai {

class CompletionAnswer final : public GenerationListener {
 public:
  CompletionAnswer(const ServerContext& context, Envelope envelope, CompletionRequest request,
                   std::shared_ptr<http::ResponseWriter> writer);

  // Sends the headers of a stream.
  void Begin();
  void OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) override;
  void OnError(ApiError error) override;

 private:
  struct Choice {
    bool started = false;
    std::string text;                // since the last chunk
    std::vector<int32_t> token_ids;  // since the last chunk
    CompletionLogprobs logprobs;
    json::Value prompt_logprobs;
    std::vector<uint16_t> routed_experts;
    ChoiceFinish finish;
  };
  const CompletionPrompt& PromptOf(size_t choice_idx) const;
  void Start(size_t choice_idx, const ChoiceDelta& delta);
  // What was gathered since the last call.
  json::Value TakeChoice(size_t choice_idx, bool finished);
  void SendWhole();

  const ServerContext& context_;
  const Envelope envelope_;
  const CompletionRequest request_;
  const LogprobsFormat format_;
  const std::shared_ptr<http::ResponseWriter> writer_;
  ChunkStream stream_;
  UsageTally usage_;
  std::vector<Choice> choices_;
  size_t num_finished_ = 0;
};

}  // namespace fathom::api::openai
