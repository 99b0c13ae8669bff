// CudaPeers: memory on each GPU of a group that the others write to (kernels/collective), and what
// says that a rank was waited for in vain. The ranks are of one process, or each of its own on one
// host. Made and freed by one thread while nothing runs; views and Check by any, of ranks of this
// process.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "comm/transport.h"
#include "kernels/collective/peer_view.h"

namespace fathom::comm {

// What a rank's memory takes with its own counters, which lie behind it.
constexpr int64_t PeerMemoryBytes(const kernels::PeerLayout& layout) { return layout.bytes + 1024; }
// The view of a rank that has such memory: it knows no others' yet, and nobody to tell of a
// timeout.
kernels::PeerView OwnView(int rank, int size, const kernels::PeerLayout& layout, std::byte* memory);
// On the GPU of a view whose memory is zero, once, before anything is exchanged.
bool StartExchanges(const kernels::PeerView& view);

// Kernels on each of these GPUs reach the memory of all the others.
bool AllReachAll(std::span<const int> gpus);

class CudaPeers {
 public:
  // With so much shared memory. All GPUs reach each other. kDevice: they do not, or kernels are
  // loaded lazily (device/cuda/multi_gpu.h); kOutOfMemory.
  static Result<std::unique_ptr<CudaPeers>> Make(std::span<const int> gpus, int64_t shared_bytes,
                                                 Duration timeout);
  // With the only rank of this process; all `members`, ranks of the transport, call it. kDevice,
  // too: a member's memory cannot be reached from here; kPeer: as Transport.
  static Result<std::unique_ptr<CudaPeers>> Join(Transport& transport, std::span<const int> members,
                                                 int gpu, int64_t shared_bytes, Duration timeout);
  ~CudaPeers();
  CudaPeers(const CudaPeers&) = delete;
  CudaPeers& operator=(const CudaPeers&) = delete;

  const kernels::PeerView& view(int rank) const { return views_[static_cast<size_t>(rank)]; }
  // Of this process, among the members; after Join.
  int only_rank() const { return only_rank_; }

  // kPeer names the rank that `rank` waited for in vain.
  Status Check(int rank) const;

 private:
  CudaPeers(std::vector<int> gpus, int64_t shared_bytes, Duration timeout);
  Status AllocateReports();
  Status Allocate(int rank);
  Status EnableAccess() const;
  Status Exchange(Transport& transport, std::span<const int> members, int rank);
  void Compare(std::span<const int> multiprocessors);

  std::vector<int> gpus_;  // as their processes number them
  const kernels::PeerLayout layout_;
  const Duration timeout_;
  int only_rank_ = -1;  // of this process; -1: all are
  std::vector<kernels::PeerView> views_;
  uint32_t* timed_out_ = nullptr;  // pinned, one for each rank, kReportStride apart
};

}  // namespace fathom::comm
