#include <utility>

#include "api/auth.h"
#include "api/openai/answer_format.h"
#include "api/openai/chat_request.h"
#include "api/openai/completion_request.h"
#include "api/openai/handlers.h"
#include "api/openai/logprobs_format.h"
#include "api/request_body.h"

namespace fathom::api::openai {
namespace {

using json::Value;

// The ids of a chat ("messages" and the fields that shape its prompt) or of a text ("prompt").
Parsed<std::vector<int32_t>> EncodeEither(const Value& body, const ServerContext& context,
                                          const http::Request& http_request) {
  FieldReader fields(body);
  if (fields.Find("messages") != nullptr) {
    Parsed<ChatRequest> request = ParseChatRequest(body, context);
    if (!request.ok()) return request.error();
    return EncodePrompt(*request, context, CallerScope(http_request, request->params.cache_salt));
  }
  Parsed<std::string> model = ReadModelName(&fields, context);
  if (!model.ok()) return model.error();
  const std::optional<std::string> prompt = fields.String("prompt");
  const bool add_bos = fields.Bool("add_special_tokens").value_or(true);
  if (!fields.ok()) return *fields.error();
  if (!prompt) return BadRequest("prompt or messages is required", "prompt");
  return EncodeText(*prompt, add_bos, context);
}

Parsed<Value> Tokenize(const ServerContext& context, const http::Request& request) {
  Parsed<Value> body = ReadJsonObject(request, context.options.limits.json);
  if (!body.ok()) return body.error();
  Parsed<std::vector<int32_t>> ids = EncodeEither(*body, context, request);
  if (!ids.ok()) return ids.error();
  FieldReader fields(*body);
  const bool with_strings = fields.Bool("return_token_strs").value_or(false);
  if (!fields.ok()) return *fields.error();
  Value strings;
  if (with_strings) {
    const LogprobsFormat format(context.tokenizer, false);
    std::vector<Value> items;
    for (const int32_t id : *ids) items.push_back(Text(format.TokenText(id)));
    strings = Value::Array(std::move(items));
  }
  return Value::Object({{"count", Integer(static_cast<int64_t>(ids->size()))},
                        {"max_model_len", Integer(context.engine.max_model_len())},
                        {"tokens", IntegerArray(*ids)},
                        {"token_strs", std::move(strings)}});
}

Parsed<Value> Detokenize(const ServerContext& context, const http::Request& request) {
  Parsed<Value> body = ReadJsonObject(request, context.options.limits.json);
  if (!body.ok()) return body.error();
  FieldReader fields(*body);
  Parsed<std::string> model = ReadModelName(&fields, context);
  if (!model.ok()) return model.error();
  const Value* tokens = fields.Array("tokens");
  if (!fields.ok()) return *fields.error();
  if (tokens == nullptr) return BadRequest("tokens is required", "tokens");
  Parsed<std::vector<int32_t>> ids =
      ReadTokenIds(*tokens, "tokens", context.tokenizer.vocab_size());
  if (!ids.ok()) return ids.error();
  return Value::Object({{"prompt", Text(context.tokenizer.Decode(*ids, false))}});
}

void Answer(Parsed<Value> result, const Writer& writer) {
  writer->Send(result.ok() ? JsonResponse(*result) : ErrorResponse(result.error()));
}

}  // namespace

void HandleTokenize(const ServerContext& context, const http::Request& request,
                    const Writer& writer) {
  Answer(Tokenize(context, request), writer);
}

void HandleDetokenize(const ServerContext& context, const http::Request& request,
                      const Writer& writer) {
  Answer(Detokenize(context, request), writer);
}

}  // namespace fathom::api::openai
