// A body of POST /v1/chat/completions: refused with one line, or read into a request whose prompt
// and output format can be made.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/openai/chat_request.h"
#include "api/openai/completion_request.h"
#include "base/check.h"
#include "request_context.h"

namespace {

using namespace fathom;

void ReadChat(const json::Value& body) {
  const auto request = api::openai::ParseChatRequest(body, FuzzContext());
  if (!request.ok()) return CheckError(request.error());
  const auto prompt = api::openai::EncodePrompt(*request, FuzzContext(), "scope");
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
  const auto body = json::Parse(text, FuzzContext().options.limits.json);
  if (!body.ok() || !body->is_object()) return 0;
  ReadChat(*body);
  const auto completion = api::openai::ParseCompletionRequest(*body, FuzzContext());
  if (!completion.ok()) CheckError(completion.error());
  return 0;
}
