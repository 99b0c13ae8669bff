// TaggedWriter: a ResponseWriter that puts the request id on the answer's head. Same threads as the
// writer it wraps.
#pragma once

#include <memory>
#include <string>

#include "http/response_writer.h"

namespace fathom::api {

// The client's own x-request-id if it may be echoed, else a new one.
http::Header RequestIdHeader(const http::Request& request);

std::shared_ptr<http::ResponseWriter> TagWriter(std::shared_ptr<http::ResponseWriter> writer,
                                                http::Header tag);

}  // namespace fathom::api
