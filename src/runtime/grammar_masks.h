// GrammarMasks: which tokens the grammars of a step's sequences allow next, found while the step
// runs: a grammar needs to know the tokens so far, not this step's logits. Start, run the forward,
// Wait, read. Owned by a ModelRunner, on whose thread all of it is called; the grammars work on
// threads of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/status.h"
#include "request/token_constraint.h"

namespace fathom::runtime {

class GrammarMasks {
 public:
  struct Sequence {
    request::TokenConstraint* constraint = nullptr;  // null: every token is allowed
    std::span<const int32_t> output;                 // its tokens so far
  };
  struct Mask {
    // Bit t is set for every token that is allowed: [ceil(vocab / 32)]. Empty: all are.
    std::span<const uint32_t> words;
    Status status;  // not OK: this sequence fails
  };

  GrammarMasks(int vocab_size, int num_threads);
  ~GrammarMasks();
  GrammarMasks(const GrammarMasks&) = delete;
  GrammarMasks& operator=(const GrammarMasks&) = delete;

  // Brings each constraint up to its output (a token may have been sampled, or drafts taken back
  // since) and fills its mask. Constraints and outputs stay as they are until Wait.
  void Start(std::span<const Sequence> sequences);
  // Whether a grammar was given work in the last Start, finished or not.
  bool is_working() const { return has_work_; }
  // One mask per sequence, valid until the next Start.
  std::span<const Mask> Wait();

 private:
  void Run();
  void Fill(size_t idx);

  const size_t num_words_;
  std::vector<Sequence> sequences_;  // those of this step
  std::vector<Mask> masks_;
  std::vector<uint32_t> words_;  // [sequences, num_words_]

  bool has_work_ = false;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  size_t num_taken_ = 0;   // guarded by mutex_
  size_t num_filled_ = 0;  // guarded by mutex_
  bool stopping_ = false;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace fathom::runtime
