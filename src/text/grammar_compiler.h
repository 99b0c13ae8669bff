// GrammarCompiler: formats to grammars, on threads of its own and within a budget, so that no
// request can hold up another. Grammars, and refusals, are kept for the next request that asks for
// the same (bounded, least recently used out first). Any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "text/grammar.h"
#include "text/tokenizer.h"

namespace fathom::text {

struct GrammarCompilerOptions {
  int num_threads = 2;
  size_t max_waiting = 64;                // formats in work or waiting
  size_t max_cache_bytes = 256ull << 20;  // of grammars and their formats
  GrammarBudget budget = {};
};

class GrammarCompiler {
 public:
  using Compiled = Result<std::shared_ptr<const Grammar>>;
  using Done = std::function<void(const Compiled&)>;

  // The tokenizer outlives it. The first compile prepares the vocabulary (0.1 s for V4's).
  static std::unique_ptr<GrammarCompiler> Make(const Tokenizer& tokenizer,
                                               const SpecialTokens& special,
                                               const GrammarCompilerOptions& options);
  virtual ~GrammarCompiler() = default;  // stops

  // Calls `done` once: now, when the format is known, else later on a compiler's thread, where it
  // must return at once. kInvalidArgument: the format; kUnavailable: too many are waiting.
  virtual void Compile(const std::string& format, Done done) = 0;

  // Ends what is compiling; every `done` has been called when it returns. Then Compile gives what
  // is cached and refuses the rest.
  virtual void Stop() = 0;

  virtual size_t cache_bytes() const = 0;
};

}  // namespace fathom::text
