#include "runtime/grammar_masks.h"

#include <algorithm>
#include <exception>
#include <string>

#include "base/check.h"

namespace fathom::runtime {
namespace {

// The constraint has accepted `output`, and no more.
Status CatchUp(request::TokenConstraint& constraint, std::span<const int32_t> output) {
  const int num_tokens = static_cast<int>(output.size());
  if (constraint.num_accepted() > num_tokens) {
    constraint.Rollback(constraint.num_accepted() - num_tokens);
  }
  for (const int32_t token_id : output.subspan(static_cast<size_t>(constraint.num_accepted()))) {
    if (!constraint.AcceptToken(token_id)) {
      return InternalError("the output's grammar refuses a token that it had allowed");
    }
  }
  return OkStatus();
}

}  // namespace

GrammarMasks::GrammarMasks(int vocab_size, int num_threads)
    : num_words_((static_cast<size_t>(vocab_size) + 31) / 32) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
}

GrammarMasks::~GrammarMasks() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void GrammarMasks::Start(std::span<const Sequence> sequences) {
  const std::lock_guard lock(mutex_);
  CHECK_EQ(num_filled_, sequences_.size());  // the last step's were waited for
  sequences_.assign(sequences.begin(), sequences.end());
  masks_.assign(sequences.size(), Mask());
  if (words_.size() < sequences.size() * num_words_) words_.resize(sequences.size() * num_words_);
  num_taken_ = 0;
  num_filled_ = 0;
  has_work_ = std::any_of(sequences_.begin(), sequences_.end(),
                          [](const Sequence& s) { return s.constraint != nullptr; });
  if (has_work_) return work_.notify_all();
  num_taken_ = num_filled_ = sequences_.size();
}

std::span<const GrammarMasks::Mask> GrammarMasks::Wait() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return num_filled_ == sequences_.size(); });
  return masks_;
}

void GrammarMasks::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || num_taken_ < sequences_.size(); });
    if (stopping_) return;
    const size_t idx = num_taken_++;
    lock.unlock();
    if (sequences_[idx].constraint != nullptr) Fill(idx);
    lock.lock();
    if (++num_filled_ == sequences_.size()) done_.notify_one();
  }
}

void GrammarMasks::Fill(size_t idx) {
  const Sequence& sequence = sequences_[idx];
  Mask& mask = masks_[idx];
  const std::span<uint32_t> words = std::span(words_).subspan(idx * num_words_, num_words_);
  std::fill(words.begin(), words.end(), 0u);
  // A grammar is foreign code: what it throws ends its own request only.
  try {
    mask.status = CatchUp(*sequence.constraint, sequence.output);
    if (mask.status.ok() && sequence.constraint->FillNextTokenMask(words)) mask.words = words;
  } catch (const std::exception& e) {
    mask.status = InternalError(std::string("the output's grammar failed: ") + e.what());
  }
}

}  // namespace fathom::runtime
