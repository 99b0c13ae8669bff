// A body of POST /v1/chat/completions: refused with one line, or read into a request whose prompt
// and output format can be made.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/openai/chat_request.h"
#include "api/openai/completion_request.h"
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
}

void ReadChat(const json::Value& body) {
  const auto request = api::openai::ParseChatRequest(body, Context());
  if (!request.ok()) return CheckError(request.error());
  const auto prompt = api::openai::EncodePrompt(*request, Context(), "scope");
  if (!prompt.ok()) return CheckError(prompt.error());
  CHECK(!prompt->empty());
  const api::OutputRules& rules = request->rules;
  const std::string tag =
      text::StructuralTag({.in_reasoning = true, .content = rules.content, .calls = rules.calls});
  CHECK(json::Parse(tag, {.max_depth = 512}).ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto body = json::Parse(text, Context().options.limits.json);
  if (!body.ok() || !body->is_object()) return 0;
  ReadChat(*body);
  const auto completion = api::openai::ParseCompletionRequest(*body, Context());
  if (!completion.ok()) CheckError(completion.error());
  return 0;
}
