// LocalEngine: a model and its engine inside this process, for the commands that talk to it
// directly. Owned by the command; main thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/fathom/model_session.h"
#include "base/clock.h"
#include "base/metrics.h"
#include "engine/engine.h"
#include "request/request.h"

namespace fathom::app {

class LocalEngine {
 public:
  // `model_name` is the metrics' label; `max_queue` as --max-queue.
  static Result<std::unique_ptr<LocalEngine>> Start(const ModelOptions& options,
                                                    const std::string& model_name, int max_queue);
  // The same with a model that is open already, by the same options.
  static Result<std::unique_ptr<LocalEngine>> Start(ModelSession session,
                                                    const ModelOptions& options,
                                                    const std::string& model_name, int max_queue);

  // What a session of another node than 0 does: runs the steps of node 0's engine, until that ends
  // or this node leaves (session.nodes->control().Close()).
  static Status Follow(const ModelSession& session, const ModelOptions& options);

  // What a generation brings: called for each token as it comes; return false to stop.
  using OnToken = std::function<bool(int32_t token_id)>;
  // Runs one request to its end. The end token that stopped it is not shown.
  Result<request::FinishReason> Generate(std::vector<int32_t> prompt,
                                         const request::SamplingParams& sampling,
                                         const OnToken& on_token);

  const ModelSession& session() const { return session_; }
  engine::Engine& engine() { return *engine_; }
  MetricsRegistry& metrics() { return metrics_; }

 private:
  explicit LocalEngine(ModelSession session) : session_(std::move(session)) {}

  ModelSession session_;
  MetricsRegistry metrics_;
  SystemClock clock_;
  std::unique_ptr<engine::Engine> engine_;  // last: it uses the rest
};

}  // namespace fathom::app
