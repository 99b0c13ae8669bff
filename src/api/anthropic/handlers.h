// Anthropic's endpoints: a request to its answer. Each runs on the connection's executor and keeps
// no state of its own. `request_id`: as the header request-id tells it, for error bodies.
#pragma once

#include <memory>
#include <string>

#include "api/server_context.h"
#include "http/response_writer.h"

namespace fathom::api::anthropic {

using Writer = std::shared_ptr<http::ResponseWriter>;

void HandleMessages(const ServerContext& context, const http::Request& request,
                    const std::string& request_id, const Writer& writer);
void HandleCountTokens(const ServerContext& context, const http::Request& request,
                       const std::string& request_id, const Writer& writer);
// GET /v1/models, as clients that send anthropic-version expect it.
void HandleModels(const ServerContext& context, const Writer& writer);

}  // namespace fathom::api::anthropic
