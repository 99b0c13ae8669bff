// The answer to a chat completion, streamed or whole: the deltas of its choices as OpenAI's JSON.
// Lives on the connection's executor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/generation.h"
#include "api/generation_params.h"
#include "api/openai/answer_format.h"
#include "api/openai/chunk_stream.h"
#include "api/openai/logprobs_format.h"
#include "api/replay/recorder.h"
#include "api/server_context.h"

namespace fathom::api::openai {

struct ChatAnswerSpec {
  Envelope envelope;
  GenerationParams params;
  bool has_reasoning_field = false;  // the request thinks, and wants to see it
  std::string echo;                  // goes before the content
  std::vector<int32_t> prompt_ids;
  json::Value cache_explanation;  // null: not asked for
  std::string replay_scope;  // empty: the answer goes on with a given text and is not remembered
  bool in_reasoning = false;
};

class ChatStreamAnswer final : public GenerationListener {
 public:
  ChatStreamAnswer(const ServerContext& context, ChatAnswerSpec spec,
                   std::shared_ptr<http::ResponseWriter> writer);

  void Begin();
  void OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) override;
  void OnError(ApiError error) override { stream_.Fail(error); }

 private:
  struct Choice {
    bool started = false;
    std::vector<json::Value> logprobs = {};  // for the next chunk
    std::vector<int32_t> token_ids = {};     // for the next chunk
    ReplayRecorder recorder;
  };
  // What the client sees of an event; nothing for one that has no text of its own.
  std::optional<json::Value> DeltaOf(const text::OutputEvent& event, Choice* choice) const;
  void Start(size_t choice_idx);
  // One chunk; takes the choice's waiting logprobs and token ids along.
  void AddChunk(size_t choice_idx, json::Value delta, const ChoiceFinish* finish);

  const ServerContext& context_;
  const ChatAnswerSpec spec_;
  const LogprobsFormat format_;
  ChunkStream stream_;
  UsageTally usage_;
  std::vector<Choice> choices_;
  size_t num_finished_ = 0;
};

class ChatWholeAnswer final : public GenerationListener {
 public:
  ChatWholeAnswer(const ServerContext& context, ChatAnswerSpec spec,
                  std::shared_ptr<http::ResponseWriter> writer);

  void OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) override;
  void OnError(ApiError error) override { writer_->Send(ErrorResponse(error)); }

 private:
  struct Choice {
    text::OutputMessage message = {};
    std::vector<json::Value> logprobs = {};
    std::vector<int32_t> token_ids = {};
    std::vector<uint16_t> routed_experts = {};
    std::vector<std::string> call_ids = {};
    ChoiceFinish finish = {};
    ReplayRecorder recorder;
  };
  json::Value MessageJson(const Choice& choice) const;
  json::Value ChoiceJson(size_t choice_idx) const;
  void Send();

  const ServerContext& context_;
  const ChatAnswerSpec spec_;
  const LogprobsFormat format_;
  const std::shared_ptr<http::ResponseWriter> writer_;
  UsageTally usage_;
  std::vector<Choice> choices_;
  json::Value prompt_logprobs_;
  size_t num_finished_ = 0;
};

}  // namespace fathom::api::openai
