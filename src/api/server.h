// ApiServer: the OpenAI API of one engine on one port. Started once, stopped once; the engine,
// tokenizer and metrics outlive it.
#pragma once

#include <chrono>
#include <memory>

#include "api/api_options.h"
#include "base/metrics.h"
#include "base/status.h"
#include "engine/engine.h"
#include "text/tokenizer.h"

namespace fathom::api {

class ApiServer {
 public:
  virtual ~ApiServer() = default;  // stops at once

  virtual int port() const = 0;
  // Refuses new generations with 503, lets running ones finish for at most `drain_timeout` (then
  // they end with an error), then closes the port. Any thread but an io thread; blocks.
  virtual void Stop(std::chrono::milliseconds drain_timeout) = 0;
};

// Listens and serves. kInvalidArgument: an option is wrong or the address cannot be used; says what
// to do.
Result<std::unique_ptr<ApiServer>> StartApiServer(ApiOptions options, engine::Engine& engine,
                                                  const text::Tokenizer& tokenizer, ModelInfo model,
                                                  MetricsRegistry& metrics);

}  // namespace fathom::api
