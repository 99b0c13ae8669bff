// Serving an engine: `fathom serve` in two halves, so that a test program can put a scripted model
// behind everything else. Main thread.
#pragma once

#include <csignal>
#include <string>

#include "apps/fathom/model_session.h"
#include "apps/fathom/serve_options.h"
#include "base/metrics.h"
#include "base/status.h"
#include "engine/engine.h"

namespace fathom::app {

// Blocks SIGINT and SIGTERM in this thread and those it starts later. Call before any thread is
// started.
sigset_t BlockStopSignals();

// What the metrics and the log call the model: the first served name, else as given.
std::string ModelName(const ServeOptions& options);

// Answers the API until one of `signals` comes, then drains. Of the session only folder, config,
// tokenizer and special tokens are used.
Status ServeUntilSignal(const ServeOptions& options, const ModelSession& session,
                        engine::Engine& engine, MetricsRegistry& metrics, const sigset_t& signals);

}  // namespace fathom::app
