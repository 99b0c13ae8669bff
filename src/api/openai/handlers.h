// The OpenAI endpoints: a request to its answer. Each runs on the connection's executor and keeps
// no state of its own.
#pragma once

#include <memory>

#include "api/server_context.h"
#include "http/response_writer.h"

namespace fathom::api::openai {

using Writer = std::shared_ptr<http::ResponseWriter>;

void HandleChatCompletions(const ServerContext& context, const http::Request& request,
                           const Writer& writer);
void HandleCompletions(const ServerContext& context, const http::Request& request,
                       const Writer& writer);
void HandleModels(const ServerContext& context, const http::Request& request, const Writer& writer);
void HandleModel(const ServerContext& context, const http::Request& request, const Writer& writer);
void HandleTokenize(const ServerContext& context, const http::Request& request,
                    const Writer& writer);
void HandleDetokenize(const ServerContext& context, const http::Request& request,
                      const Writer& writer);

// vLLM's; 403 unless the server allows it.
void HandleResetPrefixCache(const ServerContext& context, const http::Request& request,
                            const Writer& writer);

}  // namespace fathom::api::openai
