#include "api/responses/response_answer.h"

#include <ctime>
#include <utility>

#include "api/identifiers.h"
#include "api/openai/answer_format.h"
#include "http/sse.h"

namespace fathom::api::responses {
namespace {

using json::Value;
using openai::Integer;
using openai::Text;
using Kind = AnswerBlock::Kind;

std::string_view IdPrefix(Kind kind) {
  switch (kind) {
    case Kind::kReasoning:
      return "rs_";
    case Kind::kText:
      return "msg_";
    case Kind::kToolCall:
      return "fc_";
  }
  return "";
}

// The text that a call of a custom tool has for its input.
std::string CustomInput(const AnswerBlock& block) {
  const auto arguments = json::Parse(block.text);
  const Value* input = arguments.ok() ? arguments->Find("input") : nullptr;
  return input != nullptr && input->is_string() ? input->AsString() : block.text;
}

}  // namespace

ResponseAnswer::ResponseAnswer(const ServerContext& context, ResponseSpec spec,
                               std::shared_ptr<http::ResponseWriter> writer)
    : context_(context),
      spec_(std::move(spec)),
      writer_(std::move(writer)),
      id_(NewId("resp_")),
      reasoning_id_(ReasoningSeal::NewId()),
      created_at_(static_cast<int64_t>(std::time(nullptr))),
      blocks_(this, spec_.request.conversation.thinking.mode == text::ThinkingMode::kThinking),
      recorder_(*context.replay, spec_.request.scope, spec_.in_reasoning,
                context.model.special_tokens.think_end) {
  recorder_.AddKey(id_);
}

void ResponseAnswer::Begin() {
  writer_->BeginStream({.content_type = "text/event-stream; charset=utf-8",
                        .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                        .body = ""});
  Emit("response.created", {{"response", ResponseJson("in_progress", nullptr)}});
  Emit("response.in_progress", {{"response", ResponseJson("in_progress", nullptr)}});
  Flush();
  writer_->SetKeepAlive(context_.options.keep_alive_interval, http::SseComment("keep-alive"));
}

void ResponseAnswer::OnDelta(size_t, const ChoiceText& text, ChoiceDelta delta) {
  num_cached_tokens_ = text.num_cached_tokens();
  num_output_tokens_ = text.num_tokens();
  num_reasoning_tokens_ = text.num_reasoning_tokens();
  blocks_.Add(delta.events);
  if (delta.finish) {
    was_cut_ = delta.finish->is_length;
    blocks_.Finish();
  }
  recorder_.Add(delta);
  if (delta.finish) return Finish(*delta.finish);
  Flush();
}

bool ResponseAnswer::IsCustom(const AnswerBlock& block) const {
  return block.kind == Kind::kToolCall && spec_.request.tool_use.custom_names.count(block.name) > 0;
}

Value ResponseAnswer::PartJson(const AnswerBlock& block, const std::string& text) const {
  if (block.kind == Kind::kReasoning) {
    const char* type = spec_.request.wants_summary ? "summary_text" : "reasoning_text";
    return Value::Object({{"type", Text(type)}, {"text", Text(text)}});
  }
  return Value::Object({{"type", Text("output_text")},
                        {"text", Text(text)},
                        {"annotations", Value::Array()},
                        {"logprobs", Value::Array()}});
}

// `status`: in_progress: without its text.
Value ResponseAnswer::ItemJson(size_t idx, std::string_view status) const {
  const AnswerBlock& block = blocks_.blocks()[idx];
  const ItemIds& ids = ids_[idx];
  const bool is_whole = status != "in_progress";
  Value parts = Value::Array();
  if (is_whole) parts.items().push_back(PartJson(block, block.text));
  if (block.kind == Kind::kReasoning) {
    Value item = Value::Object({{"type", Text("reasoning")}, {"id", Text(ids.id)}});
    item.Set("summary", spec_.request.wants_summary ? parts : Value::Array());
    if (!spec_.request.wants_summary) item.Set("content", parts);
    if (spec_.request.wants_encrypted) {
      const std::string sealed =
          is_whole ? context_.reasoning_seal->Seal(spec_.request.scope, {reasoning_id_, block.text})
                   : "";
      item.Set("encrypted_content", Text(sealed));
    }
    item.Set("status", Text(status));
    return item;
  }
  if (block.kind == Kind::kText) {
    return Value::Object({{"type", Text("message")},
                          {"id", Text(ids.id)},
                          {"status", Text(status)},
                          {"role", Text("assistant")},
                          {"content", std::move(parts)}});
  }
  const bool is_custom = IsCustom(block);
  Value item = Value::Object({{"type", Text(is_custom ? "custom_tool_call" : "function_call")},
                              {"id", Text(ids.id)},
                              {"status", Text(status)},
                              {"call_id", Text(ids.call_id)},
                              {"name", Text(block.name)}});
  if (is_custom) {
    item.Set("input", Text(is_whole ? CustomInput(block) : ""));
  } else {
    item.Set("arguments", Text(is_whole ? block.text : ""));
  }
  return item;
}

Value ResponseAnswer::OutputJson() const {
  std::vector<Value> items;
  for (size_t i = 0; i < blocks_.blocks().size(); ++i) {
    const bool is_cut = was_cut_ && i + 1 == blocks_.blocks().size();
    items.push_back(ItemJson(i, is_cut ? "incomplete" : "completed"));
  }
  return Value::Array(std::move(items));
}

Value ResponseAnswer::UsageJson() const {
  return Value::Object(
      {{"input_tokens", Integer(spec_.num_prompt_tokens)},
       {"input_tokens_details", Value::Object({{"cached_tokens", Integer(num_cached_tokens_)},
                                               {"cache_write_tokens", Integer(0)}})},
       {"output_tokens", Integer(num_output_tokens_)},
       {"output_tokens_details",
        Value::Object({{"reasoning_tokens", Integer(num_reasoning_tokens_)}})},
       {"total_tokens", Integer(spec_.num_prompt_tokens + num_output_tokens_)}});
}

Value ResponseAnswer::ResponseJson(std::string_view status, const ApiError* error) const {
  const bool is_over = status == "completed" || status == "incomplete";
  Value response = Value::Object({{"id", Text(id_)},
                                  {"object", Text("response")},
                                  {"created_at", Integer(created_at_)},
                                  {"status", Text(status)},
                                  {"model", Text(spec_.request.model)}});
  response.Set("error", error == nullptr ? Value()
                                         : Value::Object({{"code", Text("server_error")},
                                                          {"message", Text(error->message)}}));
  response.Set("incomplete_details", status == "incomplete"
                                         ? Value::Object({{"reason", Text("max_output_tokens")}})
                                         : Value());
  response.Set("output", is_over ? OutputJson() : Value::Array());
  response.Set("usage", is_over ? UsageJson() : Value());
  for (const json::Member& member : spec_.request.echo.members())
    response.Set(member.key, member.value);
  return response;
}

void ResponseAnswer::Emit(std::string_view type, std::vector<json::Member> fields) {
  if (!spec_.request.params.stream) return;
  Value event =
      Value::Object({{"type", Text(type)}, {"sequence_number", Integer(next_sequence_number_++)}});
  for (json::Member& field : fields) event.Set(field.key, std::move(field.value));
  pending_ += http::SseEvent(type, json::Dump(event));
}

void ResponseAnswer::EmitOfItem(std::string_view type, size_t idx,
                                std::vector<json::Member> fields) {
  if (!spec_.request.params.stream) return;
  fields.insert(fields.begin(), {{"output_index", Integer(static_cast<int64_t>(idx))},
                                 {"item_id", Text(ids_[idx].id)}});
  Emit(type, std::move(fields));
}

void ResponseAnswer::EmitOfPart(std::string_view type, size_t idx,
                                std::vector<json::Member> fields) {
  const bool is_summary =
      blocks_.blocks()[idx].kind == Kind::kReasoning && spec_.request.wants_summary;
  fields.insert(fields.begin(), {is_summary ? "summary_index" : "content_index", Integer(0)});
  EmitOfItem(type, idx, std::move(fields));
}

void ResponseAnswer::OnBlockBegin(size_t idx, const AnswerBlock& block) {
  ItemIds ids{NewId(IdPrefix(block.kind)), ""};
  if (block.kind == Kind::kToolCall) {
    ids.call_id = NewToolCallId();
    recorder_.AddKey(ids.call_id);
  } else {
    recorder_.AddKey(ids.id);
  }
  if (block.kind == Kind::kReasoning) recorder_.AddKey(SignatureKey(reasoning_id_));
  ids_.push_back(std::move(ids));
  Emit("response.output_item.added", {{"output_index", Integer(static_cast<int64_t>(idx))},
                                      {"item", ItemJson(idx, "in_progress")}});
  if (block.kind != Kind::kToolCall) BeginPart(idx, block);
}

void ResponseAnswer::BeginPart(size_t idx, const AnswerBlock& block) {
  const bool is_summary = block.kind == Kind::kReasoning && spec_.request.wants_summary;
  EmitOfPart(is_summary ? "response.reasoning_summary_part.added" : "response.content_part.added",
             idx, {{"part", PartJson(block, "")}});
}

void ResponseAnswer::OnBlockText(size_t idx, const AnswerBlock& block, const std::string& piece) {
  if (!spec_.request.params.stream) return;
  switch (block.kind) {
    case Kind::kReasoning:
      return EmitOfPart(spec_.request.wants_summary ? "response.reasoning_summary_text.delta"
                                                    : "response.reasoning_text.delta",
                        idx, {{"delta", Text(piece)}});
    case Kind::kText:
      return EmitOfPart("response.output_text.delta", idx,
                        {{"delta", Text(piece)}, {"logprobs", Value::Array()}});
    case Kind::kToolCall:
      if (IsCustom(block)) return;  // its input is known when it is complete
      return EmitOfItem("response.function_call_arguments.delta", idx, {{"delta", Text(piece)}});
  }
}

void ResponseAnswer::OnBlockEnd(size_t idx, const AnswerBlock& block) {
  if (!spec_.request.params.stream) return;
  block.kind == Kind::kToolCall ? EndCall(idx, block) : EndPart(idx, block);
  const bool is_cut = !block.is_complete || was_cut_;
  Emit("response.output_item.done", {{"output_index", Integer(static_cast<int64_t>(idx))},
                                     {"item", ItemJson(idx, is_cut ? "incomplete" : "completed")}});
}

void ResponseAnswer::EndPart(size_t idx, const AnswerBlock& block) {
  const bool is_reasoning = block.kind == Kind::kReasoning;
  const bool is_summary = is_reasoning && spec_.request.wants_summary;
  std::vector<json::Member> text = {{"text", Text(block.text)}};
  if (!is_reasoning) text.push_back({"logprobs", Value::Array()});
  EmitOfPart(!is_reasoning ? "response.output_text.done"
             : is_summary  ? "response.reasoning_summary_text.done"
                           : "response.reasoning_text.done",
             idx, std::move(text));
  EmitOfPart(is_summary ? "response.reasoning_summary_part.done" : "response.content_part.done",
             idx, {{"part", PartJson(block, block.text)}});
}

void ResponseAnswer::EndCall(size_t idx, const AnswerBlock& block) {
  if (IsCustom(block)) {
    const std::string input = CustomInput(block);
    EmitOfItem("response.custom_tool_call_input.delta", idx, {{"delta", Text(input)}});
    return EmitOfItem("response.custom_tool_call_input.done", idx, {{"input", Text(input)}});
  }
  EmitOfItem("response.function_call_arguments.done", idx,
             {{"name", Text(block.name)}, {"arguments", Text(block.text)}});
}

void ResponseAnswer::Finish(const ChoiceFinish& finish) {
  Value response = ResponseJson(finish.is_length ? "incomplete" : "completed", nullptr);
  const ResponseRequest& request = spec_.request;
  if (request.is_stored) {
    context_.responses->Put(
        request.scope, id_,
        {.previous_id = request.previous_id, .input = request.input, .response = response});
  }
  if (!request.params.stream) return writer_->Send(openai::JsonResponse(response));
  Emit(finish.is_length ? "response.incomplete" : "response.completed",
       {{"response", std::move(response)}});
  Flush();
  writer_->End();
}

void ResponseAnswer::OnError(ApiError error) {
  if (!spec_.request.params.stream) return writer_->Send(openai::ErrorResponse(error));
  Emit("response.failed", {{"response", ResponseJson("failed", &error)}});
  Flush();
  writer_->End();
}

void ResponseAnswer::Flush() {
  if (!pending_.empty()) writer_->Write(std::exchange(pending_, ""));
}

}  // namespace fathom::api::responses
