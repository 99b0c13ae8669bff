#include "comm/mailboxes.h"

#include <cstring>

#include "base/check.h"

namespace fathom::comm {

Mailboxes::Mailboxes(int num_ranks)
    : wakers_(static_cast<size_t>(num_ranks)),
      boxes_(static_cast<size_t>(num_ranks) * static_cast<size_t>(num_ranks)) {}

void Mailboxes::Post(int from, int to, std::span<const std::byte> bytes) {
  {
    const std::lock_guard lock(mutex_);
    Box& box = At(from, to);
    CHECK(box.state == State::kEmpty);
    box = {State::kFull, bytes};
  }
  waker(to).Wake();
}

bool Mailboxes::TryTake(int from, int to, std::span<std::byte> into) {
  std::unique_lock lock(mutex_);
  Box& box = At(from, to);
  if (box.state != State::kFull) return false;
  CHECK_EQ(box.bytes.size(), into.size());
  box.state = State::kReading;
  lock.unlock();
  if (!into.empty()) std::memcpy(into.data(), box.bytes.data(), into.size());
  lock.lock();
  box.state = State::kEmpty;
  lock.unlock();
  read_.notify_all();
  waker(from).Wake();
  return true;
}

bool Mailboxes::IsTaken(int from, int to) {
  const std::lock_guard lock(mutex_);
  return At(from, to).state == State::kEmpty;
}

void Mailboxes::Withdraw(int from, int to) {
  std::unique_lock lock(mutex_);
  Box& box = At(from, to);
  read_.wait(lock, [&] { return box.state != State::kReading; });
  box.state = State::kEmpty;
}

void Mailboxes::WakeAll() {
  for (Waker& waker : wakers_) waker.Wake();
}

Mailboxes::Box& Mailboxes::At(int from, int to) {
  CHECK(from != to);
  return boxes_[static_cast<size_t>(from) * wakers_.size() + static_cast<size_t>(to)];
}

}  // namespace fathom::comm
