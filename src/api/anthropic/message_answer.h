// The answer to POST /v1/messages, streamed or whole. Lives on the connection's executor.
//
// A stream is message_start (at once, before prefill; its usage counts the whole prompt as input),
// ping, the blocks one after another, message_delta (with the usage as it turned out) and
// message_stop. Pings go on while nothing else does.
#pragma once

#include <memory>
#include <string>

#include "api/answer_blocks.h"
#include "api/generation.h"
#include "api/replay/recorder.h"
#include "api/server_context.h"

namespace fathom::api::anthropic {

struct MessageSpec {
  std::string model;
  std::string replay_scope;  // of signatures, and of what is remembered
  std::string request_id;
  int64_t num_prompt_tokens = 0;
  bool has_thinking = false;    // the request thinks
  bool omits_thinking = false;  // and wants the signatures only
  bool in_reasoning = false;    // the prompt ended with <think>
  bool is_remembered = true;
};

// What both forms share: the blocks, their ids and signatures, and how the answer ended.
class MessageAnswer : public GenerationListener, protected AnswerBlocks::Listener {
 public:
  void OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) final;

 protected:
  MessageAnswer(const ServerContext& context, MessageSpec spec);

  virtual void OnFinish(const ChoiceFinish& finish) = 0;
  virtual void AfterDelta() {}

  json::Value MessageJson(json::Value content, json::Value stop_reason, json::Value stop_sequence,
                          json::Value usage) const;
  json::Value UsageJson() const;
  // A block as it stands in `content`; `whole`: with its text and signature.
  json::Value BlockJson(size_t idx, bool whole) const;
  std::string SignatureOf(const AnswerBlock& block) const;

  void OnBlockBegin(size_t idx, const AnswerBlock& block) override;

  const ServerContext& context_;
  const MessageSpec spec_;
  AnswerBlocks blocks_;

 private:
  const std::string message_id_;
  const std::string reasoning_id_;     // in the signatures
  std::vector<std::string> call_ids_;  // of every block; empty for those that are no calls
  ReplayRecorder recorder_;
  int64_t num_cached_tokens_ = 0;
  int64_t num_output_tokens_ = 0;
  int64_t num_thinking_tokens_ = 0;
};

class MessageStreamAnswer final : public MessageAnswer {
 public:
  MessageStreamAnswer(const ServerContext& context, MessageSpec spec,
                      std::shared_ptr<http::ResponseWriter> writer)
      : MessageAnswer(context, std::move(spec)), writer_(std::move(writer)) {}

  void Begin();
  void OnError(ApiError error) override;

 private:
  void OnBlockBegin(size_t idx, const AnswerBlock& block) override;
  void OnBlockText(size_t idx, const AnswerBlock& block, const std::string& piece) override;
  void OnBlockEnd(size_t idx, const AnswerBlock& block) override;
  void OnFinish(const ChoiceFinish& finish) override;
  void AfterDelta() override;
  void AddEvent(const json::Value& event);
  void AddDelta(size_t idx, std::string_view type, std::string_view field, const std::string& text);

  const std::shared_ptr<http::ResponseWriter> writer_;
  std::string pending_;
};

class MessageWholeAnswer final : public MessageAnswer {
 public:
  MessageWholeAnswer(const ServerContext& context, MessageSpec spec,
                     std::shared_ptr<http::ResponseWriter> writer)
      : MessageAnswer(context, std::move(spec)), writer_(std::move(writer)) {}

  void OnError(ApiError error) override;

 private:
  void OnBlockText(size_t, const AnswerBlock&, const std::string&) override {}
  void OnBlockEnd(size_t, const AnswerBlock&) override {}
  void OnFinish(const ChoiceFinish& finish) override;

  const std::shared_ptr<http::ResponseWriter> writer_;
};

}  // namespace fathom::api::anthropic
