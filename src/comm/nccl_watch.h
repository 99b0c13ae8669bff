// NcclWatch: a group's NCCL communicators, and a thread that sees when one rank does not come. NCCL
// waits without end: a rank that has begun an exchange of a step which does not end, while nothing
// moves on any rank for the group's timeout, waits in vain; then all communicators are aborted,
// which ends the exchanges, and Check names the rank that has begun the fewest. Made and freed by
// one thread while nothing runs, and freed after all graphs that hold exchanges, for which NCCL
// waits; a rank's calls by its thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "comm/nccl.h"
#include "device/device.h"
#include "kernels/collective/exchange_count_cuda.h"

namespace fathom::comm {

class NcclWatch {
 public:
  // kDevice: NCCL's words; kOutOfMemory.
  static Result<std::shared_ptr<NcclWatch>> Make(const NcclLibrary& nccl, std::span<const int> gpus,
                                                 Duration timeout);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  NcclCommunicator communicator(int rank) const {
    return communicators_[static_cast<size_t>(rank)];
  }

  // Enqueued before each of a rank's exchanges, and at the end of its step.
  void Begin(int rank, device::Stream& stream) const;
  void EndStep(int rank, device::Stream& stream) const;

  // kPeer: the group has ended, and its communicators are gone.
  Status Check() const;

 private:
  NcclWatch(const NcclLibrary& nccl, std::span<const int> gpus, Duration timeout);
  Status AllocateCounts();
  void Watch();
  bool IsWaiting() const;  // some rank, in a step
  std::vector<uint32_t> Read() const;
  void EndGroup();
  void Abort();

  const NcclLibrary nccl_;
  const std::vector<int> gpus_;
  const Duration timeout_;
  std::vector<NcclCommunicator> communicators_;
  uint32_t* words_ = nullptr;  // pinned: of each rank what has begun and what has ended
  std::vector<kernels::ExchangeCount> counts_;
  std::atomic<int> missing_ = -1;  // the rank that did not come
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stops_ = false;
  std::thread thread_;
};

}  // namespace fathom::comm
