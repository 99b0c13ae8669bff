// A body of POST /v1/messages or /v1/responses: refused with one line, or read into a request whose
// prompt can be made.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/anthropic/messages_request.h"
#include "api/responses/response_request.h"
#include "base/check.h"
#include "request_context.h"

namespace {

using namespace fathom;

void CheckRefusal(const api::ApiError& error) {
  CheckError(error);
  CHECK(error.message.size() < 1000);
}

void CheckPrompt(const api::Conversation& conversation) {
  const auto prompt = api::EncodeConversation(conversation, FuzzContext(), "scope");
  if (!prompt.ok()) return CheckRefusal(prompt.error());
  CHECK(!prompt->empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto body = json::Parse(text, FuzzContext().options.limits.json);
  if (!body.ok() || !body->is_object()) return 0;
  const http::Request request;
  const auto messages = api::anthropic::ParseMessagesRequest(request, *body, FuzzContext(), false);
  messages.ok() ? CheckPrompt(messages->conversation) : CheckRefusal(messages.error());
  const auto response = api::responses::ParseResponseRequest(request, *body, FuzzContext());
  response.ok() ? CheckPrompt(response->conversation) : CheckRefusal(response.error());
  return 0;
}
