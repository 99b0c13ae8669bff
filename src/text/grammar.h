// Grammar: a compiled output format over a vocabulary: which tokens may follow which text. The one
// adapter of xgrammar. Immutable, any thread; each sequence gets a constraint of its own.
//
// A format is a JSON text of xgrammar's structural-tag formats (text/output_format.h writes them).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "request/token_constraint.h"

namespace fathom::text {

// The bytes of each token; empty for tokens that no grammar may give (control tokens). Shared by
// all grammars over it.
class GrammarVocabulary {
 public:
  struct Tokens {
    std::vector<std::string> bytes;      // [vocab]
    std::vector<int32_t> end_token_ids;  // what ends an answer that may end
  };
  static std::shared_ptr<const GrammarVocabulary> Make(const Tokens& tokens);
  virtual ~GrammarVocabulary() = default;
};

// What compiling may cost. More is an error of the format's author.
struct GrammarBudget {
  std::chrono::milliseconds cpu_time{5'000};  // of the compiling thread
  int64_t num_steps = 200'000'000;            // bounds memory: a step takes at most a few bytes
};

class Grammar {
 public:
  // Takes up to the budget of the calling thread, whose stack should be large (recursive formats).
  // kInvalidArgument: the format is wrong, too costly or allows no answer; kCancelled once
  // `*cancelled` is set.
  static Result<std::shared_ptr<const Grammar>> Compile(const GrammarVocabulary& vocabulary,
                                                        const std::string& format,
                                                        const GrammarBudget& budget,
                                                        const std::atomic<bool>& cancelled);
  virtual ~Grammar() = default;

  // For one sequence, from its first output token. Masks have ceil(vocab / 32) words or more.
  virtual std::shared_ptr<request::TokenConstraint> NewConstraint() const = 0;
  virtual size_t memory_bytes() const = 0;
};

}  // namespace fathom::text
