#include "text/grammar.h"

#include <time.h>
#include <xgrammar/checkpoint.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "base/log.h"

// xgrammar's messages come to us (XGRAMMAR_LOG_CUSTOMIZE).
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string&, int, int, const std::string& message) {
  fathom::LogDebug("grammar: {}", message);
}

}  // namespace xgrammar

namespace fathom::text {
namespace {

// Steps between two looks at the clock.
constexpr int64_t kStepsPerLook = 4096;

struct BudgetExceeded : std::runtime_error {
  BudgetExceeded() : std::runtime_error("budget") {}
};
struct Cancelled : std::runtime_error {
  Cancelled() : std::runtime_error("cancelled") {}
};

std::chrono::nanoseconds ThreadCpuTime() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// While it lives, xgrammar's work on this thread throws when the budget is spent.
class Meter {
 public:
  Meter(const GrammarBudget& budget, const std::atomic<bool>& cancelled)
      : cancelled_(cancelled), end_(ThreadCpuTime() + budget.cpu_time), left_(budget.num_steps) {
    current_ = this;
    xgrammar::checkpoint_hook = [] { current_->Step(); };
  }
  ~Meter() { xgrammar::checkpoint_hook = nullptr; }
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

 private:
  void Step() {
    if (--left_ % kStepsPerLook != 0) return;
    if (cancelled_) throw Cancelled();
    if (left_ <= 0 || ThreadCpuTime() > end_) throw BudgetExceeded();
  }

  static thread_local Meter* current_;
  const std::atomic<bool>& cancelled_;
  const std::chrono::nanoseconds end_;
  int64_t left_;
};

thread_local Meter* Meter::current_ = nullptr;

class Vocabulary final : public GrammarVocabulary {
 public:
  explicit Vocabulary(const Tokens& tokens)
      : info(tokens.bytes, xgrammar::VocabType::RAW, static_cast<int>(tokens.bytes.size()),
             tokens.end_token_ids) {}
  const xgrammar::TokenizerInfo info;
};

class Constraint final : public request::TokenConstraint {
 public:
  explicit Constraint(const xgrammar::CompiledGrammar& grammar)
      : matcher_(grammar),
        num_words_((static_cast<size_t>(grammar.GetTokenizerInfo().GetVocabSize()) + 31) / 32) {}

  bool FillNextTokenMask(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), 0u);
    if (mask.size() < num_words_) return true;
    try {
      if (matcher_.IsTerminated()) {
        // Past its end (ignore_eos) an answer can only end again.
        for (const int id : matcher_.GetStopTokenIds()) SetBit(mask, id);
        return true;
      }
      int64_t shape = static_cast<int64_t>(num_words_);
      DLTensor tensor{.data = mask.data(),
                      .device = {kDLCPU, 0},
                      .ndim = 1,
                      .dtype = xgrammar::GetBitmaskDLType(),
                      .shape = &shape,
                      .strides = nullptr,
                      .byte_offset = 0};
      return matcher_.FillNextTokenBitmask(&tensor);
    } catch (const std::exception& e) {
      LogError("grammar: no mask: {}", e.what());
      std::fill(mask.begin(), mask.end(), 0u);  // nothing may follow: the sequence fails
      return true;
    }
  }

  bool AcceptToken(int32_t token_id) override {
    try {
      if (matcher_.IsTerminated()) {
        const std::vector<int>& ends = matcher_.GetStopTokenIds();
        if (std::find(ends.begin(), ends.end(), token_id) == ends.end()) return false;
        ++num_after_end_;
      } else if (!matcher_.AcceptToken(token_id)) {
        return false;
      }
    } catch (const std::exception& e) {
      LogError("grammar: token {}: {}", token_id, e.what());
      return false;
    }
    ++num_accepted_;
    return true;
  }

  void Rollback(int num_tokens) override {
    CHECK_LE(num_tokens, num_accepted_);
    num_accepted_ -= num_tokens;
    const int after_end = std::min(num_tokens, num_after_end_);
    num_after_end_ -= after_end;
    if (num_tokens > after_end) matcher_.Rollback(num_tokens - after_end);
  }

  int num_accepted() const override { return num_accepted_; }

 private:
  static void SetBit(std::span<uint32_t> mask, int id) {
    mask[static_cast<size_t>(id) / 32] |= 1u << (static_cast<size_t>(id) % 32);
  }

  xgrammar::GrammarMatcher matcher_;
  const size_t num_words_;
  int num_accepted_ = 0;
  int num_after_end_ = 0;
};

class CompiledGrammar final : public Grammar {
 public:
  explicit CompiledGrammar(xgrammar::CompiledGrammar grammar)
      : grammar_(std::move(grammar)), memory_bytes_(grammar_.MemorySizeBytes()) {}
  std::shared_ptr<request::TokenConstraint> NewConstraint() const override {
    return std::make_shared<Constraint>(grammar_);
  }
  size_t memory_bytes() const override { return memory_bytes_; }

 private:
  const xgrammar::CompiledGrammar grammar_;
  const size_t memory_bytes_;
};

bool AllowsNothing(const Grammar& grammar, int vocab_size) {
  std::vector<uint32_t> mask((static_cast<size_t>(vocab_size) + 31) / 32);
  const bool masked = grammar.NewConstraint()->FillNextTokenMask(mask);
  return masked && std::all_of(mask.begin(), mask.end(), [](uint32_t word) { return word == 0; });
}

Status Refused(std::string_view why) {
  while (!why.empty() && (why.back() == '\n' || why.back() == ' ')) why.remove_suffix(1);
  return InvalidArgument("the output format cannot be compiled: " + std::string(why));
}

}  // namespace

std::shared_ptr<const GrammarVocabulary> GrammarVocabulary::Make(const Tokens& tokens) {
  return std::make_shared<Vocabulary>(tokens);
}

Result<std::shared_ptr<const Grammar>> Grammar::Compile(const GrammarVocabulary& vocabulary,
                                                        const std::string& format,
                                                        const GrammarBudget& budget,
                                                        const std::atomic<bool>& cancelled) {
  const xgrammar::TokenizerInfo& info = static_cast<const Vocabulary&>(vocabulary).info;
  try {
    const Meter meter(budget, cancelled);
    xgrammar::GrammarCompiler compiler(info, /*max_threads=*/1, /*cache_enabled=*/false);
    auto grammar = std::make_shared<const CompiledGrammar>(compiler.CompileStructuralTag(format));
    if (AllowsNothing(*grammar, info.GetVocabSize())) {
      return InvalidArgument("the output format allows no answer at all");
    }
    return std::shared_ptr<const Grammar>(std::move(grammar));
  } catch (const BudgetExceeded&) {
    return InvalidArgument("the output format is too complex to compile: simplify it");
  } catch (const Cancelled&) {
    return Status(StatusCode::kCancelled, "compiling was cancelled");
  } catch (const std::bad_alloc&) {
    return InvalidArgument("the output format needs too much memory to compile: simplify it");
  } catch (const std::exception& e) {
    return Refused(e.what());
  }
}

}  // namespace fathom::text
