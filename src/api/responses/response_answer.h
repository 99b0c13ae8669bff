// The answer to POST /v1/responses, streamed or whole. Lives on the connection's executor.
//
// Both forms build the same response object; a stream tells how it grows, in events that are
// numbered from 0 without a gap.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "api/answer_blocks.h"
#include "api/generation.h"
#include "api/replay/recorder.h"
#include "api/responses/response_request.h"
#include "api/server_context.h"

namespace fathom::api::responses {

struct ResponseSpec {
  ResponseRequest request;
  int64_t num_prompt_tokens = 0;
  bool in_reasoning = false;  // the prompt ended with <think>
};

class ResponseAnswer final : public GenerationListener, private AnswerBlocks::Listener {
 public:
  ResponseAnswer(const ServerContext& context, ResponseSpec spec,
                 std::shared_ptr<http::ResponseWriter> writer);

  // Sends the headers and first events of a stream.
  void Begin();
  void OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) override;
  void OnError(ApiError error) override;

 private:
  // The ids of an output item.
  struct ItemIds {
    std::string id;
    std::string call_id;  // of calls
  };

  void OnBlockBegin(size_t idx, const AnswerBlock& block) override;
  void OnBlockText(size_t idx, const AnswerBlock& block, const std::string& piece) override;
  void OnBlockEnd(size_t idx, const AnswerBlock& block) override;
  void BeginPart(size_t idx, const AnswerBlock& block);
  void EndPart(size_t idx, const AnswerBlock& block);
  void EndCall(size_t idx, const AnswerBlock& block);

  bool IsCustom(const AnswerBlock& block) const;
  json::Value PartJson(const AnswerBlock& block, const std::string& text) const;
  json::Value ItemJson(size_t idx, std::string_view status) const;
  json::Value OutputJson() const;
  json::Value UsageJson() const;
  // `status`: in_progress, completed, incomplete or failed.
  json::Value ResponseJson(std::string_view status, const ApiError* error) const;
  void Finish(const ChoiceFinish& finish);

  void Emit(std::string_view type, std::vector<json::Member> fields);
  // An event of an item, or of its part.
  void EmitOfItem(std::string_view type, size_t idx, std::vector<json::Member> fields);
  void EmitOfPart(std::string_view type, size_t idx, std::vector<json::Member> fields);
  void Flush();

  const ServerContext& context_;
  const ResponseSpec spec_;
  const std::shared_ptr<http::ResponseWriter> writer_;
  const std::string id_;
  const std::string reasoning_id_;  // in seals
  const int64_t created_at_;
  AnswerBlocks blocks_;
  std::vector<ItemIds> ids_;  // of every block
  bool was_cut_ = false;      // at a limit
  ReplayRecorder recorder_;
  int64_t num_cached_tokens_ = 0;
  int64_t num_output_tokens_ = 0;
  int64_t num_reasoning_tokens_ = 0;
  int64_t next_sequence_number_ = 0;
  std::string pending_;
};

}  // namespace fathom::api::responses
