// ServerContext: what every handler works with. Made once at start; the rest of the server outlives
// it. Constant but for its atomics; any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "api/api_options.h"
#include "api/prompt_history.h"
#include "api/replay/reasoning_seal.h"
#include "api/replay/replay_store.h"
#include "api/responses/response_store.h"
#include "base/metrics.h"
#include "engine/engine.h"
#include "text/grammar_compiler.h"
#include "text/tokenizer.h"

namespace fathom::api {

// Servers that share their keys read each other's sealed reasoning, and their own after a restart.
// Without keys each process has a secret of its own.
inline std::string SealSecret(const ApiOptions& options) {
  std::string secret;
  for (const std::string& key : options.api_keys) secret += key + "\n";
  return secret;
}

struct ServerContext {
  const ApiOptions options;
  const ModelInfo model;
  engine::Engine& engine;
  const text::Tokenizer& tokenizer;
  MetricsRegistry& metrics;
  const int64_t start_time;  // Unix seconds

  std::atomic<bool> draining{false};
  const std::unique_ptr<const ReasoningSeal> reasoning_seal =
      std::make_unique<ReasoningSeal>(SealSecret(options));
  const std::unique_ptr<PromptHistory> history =
      std::make_unique<PromptHistory>(options.prompt_history_bytes);
  const std::unique_ptr<ReplayStore> replay = std::make_unique<ReplayStore>(options.replay_bytes);
  const std::unique_ptr<responses::ResponseStore> responses =
      std::make_unique<responses::ResponseStore>(options.response_store_bytes);
  const std::unique_ptr<text::GrammarCompiler> grammars =
      text::GrammarCompiler::Make(tokenizer, model.special_tokens, options.grammar);

  const std::string& default_model_name() const { return options.served_model_names.front(); }
};

}  // namespace fathom::api
