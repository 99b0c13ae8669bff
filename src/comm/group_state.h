// GroupState: whether the group of this node's ranks and control link has ended, and why. The first
// reason counts. Any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace fathom::comm {

class GroupState {
 public:
  void Fail(const Status& reason);
  bool failed() const { return failed_; }
  Status error() const;  // OK until Fail
  // Waits for at most `limit`; error().
  Status AwaitError(Duration limit);

  // `wake` is called once when the group ends, now if it has ended, by the thread that ends it. It
  // must stay callable as long as this lives.
  void OnFailure(std::function<void()> wake);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_ = false;
  Status error_;                              // guarded
  std::vector<std::function<void()>> wakes_;  // guarded
};

}  // namespace fathom::comm
