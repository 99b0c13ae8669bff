#include "comm/group_state.h"

#include <utility>

#include "base/check.h"

namespace fathom::comm {

void GroupState::Fail(const Status& reason) {
  CHECK(!reason.ok());
  std::vector<std::function<void()>> wakes;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    error_ = reason;
    failed_ = true;
    wakes.swap(wakes_);
  }
  changed_.notify_all();
  for (const auto& wake : wakes) wake();
}

Status GroupState::error() const {
  if (!failed_) return OkStatus();
  const std::lock_guard lock(mutex_);
  return error_;
}

Status GroupState::AwaitError(Duration limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return failed_.load(); });
  return error_;
}

void GroupState::OnFailure(std::function<void()> wake) {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) return wakes_.push_back(std::move(wake));
  }
  wake();
}

}  // namespace fathom::comm
