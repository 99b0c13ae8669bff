// A body of POST /v1/messages or /v1/responses: refused with one line, or read into a request whose
// prompt can be made.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/anthropic/messages_request.h"
#include "api/responses/response_request.h"
#include "api/scripted_engine.h"
#include "base/check.h"

namespace {

using namespace fathom;

api::ApiOptions Options() {
  api::ApiOptions options;
  options.served_model_names = {"m"};
  options.grammar.num_threads = 0;
  return options;
}

const api::ServerContext& Context() {
  static const auto tokenizer =
      *text::Tokenizer::Load(FATHOM_SOURCE_DIR "/models/fathom-tiny/tokenizer.json");
  static api::ScriptedEngine engine(  // nothing is generated here
      [](const request::Request&) { return std::vector<int32_t>(); }, 1, 4096);
  static MetricsRegistry metrics;
  static const api::ServerContext context{
      .options = Options(),
      .model = {.root = "m", .special_tokens = *text::SpecialTokens::Find(*tokenizer)},
      .engine = engine,
      .tokenizer = *tokenizer,
      .metrics = metrics,
      .start_time = 0};
  return context;
}

void CheckError(const api::ApiError& error) {
  CHECK(error.status >= 400 && error.status < 500);
  CHECK(!error.message.empty());
  CHECK_EQ(error.message.find('\n'), std::string::npos);
  CHECK(error.message.size() < 1000);
}

void CheckPrompt(const api::Conversation& conversation) {
  const auto prompt = api::EncodeConversation(conversation, Context(), "scope");
  if (!prompt.ok()) return CheckError(prompt.error());
  CHECK(!prompt->empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto body = json::Parse(text, Context().options.limits.json);
  if (!body.ok() || !body->is_object()) return 0;
  const http::Request request;
  const auto messages = api::anthropic::ParseMessagesRequest(request, *body, Context(), false);
  messages.ok() ? CheckPrompt(messages->conversation) : CheckError(messages.error());
  const auto response = api::responses::ParseResponseRequest(request, *body, Context());
  response.ok() ? CheckPrompt(response->conversation) : CheckError(response.error());
  return 0;
}
