// Mailboxes: how the ranks of one node hand each other messages: one box for every pair, which
// holds one message, in the sender's memory, until its receiver has copied it. Nothing here waits
// for another rank; whoever has something to do is woken. Ranks are local: from 0. Any thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "comm/waker.h"

namespace fathom::comm {

class Mailboxes {
 public:
  explicit Mailboxes(int num_ranks);

  // `bytes` stay where they are until IsTaken, or until Withdraw has returned. The box is empty.
  void Post(int from, int to, std::span<const std::byte> bytes);
  // False when there is no message yet. It has the size of `into`.
  bool TryTake(int from, int to, std::span<std::byte> into);
  bool IsTaken(int from, int to);
  void Withdraw(int from, int to);

  int num_ranks() const { return static_cast<int>(wakers_.size()); }
  Waker& waker(int rank) { return wakers_[static_cast<size_t>(rank)]; }
  void WakeAll();

 private:
  enum class State { kEmpty, kFull, kReading };
  struct Box {
    State state = State::kEmpty;
    std::span<const std::byte> bytes = {};
  };
  Box& At(int from, int to);

  std::deque<Waker> wakers_;
  std::mutex mutex_;
  std::condition_variable read_;
  std::vector<Box> boxes_;  // guarded; a box's bytes are read without, in kReading
};

}  // namespace fathom::comm
