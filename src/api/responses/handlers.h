// The endpoints of OpenAI's Responses API: a request to its answer. Each runs on the connection's
// executor and keeps no state of its own.
#pragma once

#include <memory>

#include "api/server_context.h"
#include "http/response_writer.h"

namespace fathom::api::responses {

using Writer = std::shared_ptr<http::ResponseWriter>;

void HandleCreate(const ServerContext& context, const http::Request& request, const Writer& writer);
void HandleGet(const ServerContext& context, const http::Request& request, const Writer& writer);
void HandleDelete(const ServerContext& context, const http::Request& request, const Writer& writer);

}  // namespace fathom::api::responses
