// CudaStages: the residual streams on their way from a stage's GPU to the next stage's. Between
// GPUs of one process they are copied from device to device, straight into the receiver's
// workspace: the receiver says where to and from when on, and the host waits until the copy is
// enqueued, not until it has run. Otherwise they pass through host memory and the transport, in
// pieces. Used by the thread of Forward; copies are not captured. kPeer: as comm::Transport.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "device/device.h"
#include "model/model.h"

namespace fathom::model {

class CudaStages {
 public:
  // With the current GPU. kOutOfMemory.
  static Result<std::unique_ptr<CudaStages>> Make(const ModelRank& rank);
  ~CudaStages();
  CudaStages(const CudaStages&) = delete;
  CudaStages& operator=(const CudaStages&) = delete;

  bool is_first() const { return rank_.place.pipeline == 0; }
  bool is_last() const { return rank_.place.pipeline == rank_.parallel.pipeline_parallel_size - 1; }

  // `streams` becomes what the stage before sends, behind all that `stream` has so far.
  Status Receive(std::byte* streams, int64_t bytes, device::Stream& stream);
  // Sends what `stream` will have written.
  Status Send(const std::byte* streams, int64_t bytes, device::Stream& stream);

 private:
  explicit CudaStages(const ModelRank& rank) : rank_(rank) {}
  int Neighbour(int stages_on) const;
  template <typename Value>
  Status Tell(int to, const Value& value);
  template <typename Value>
  Status Hear(int from, Value& value);

  const ModelRank rank_;
  int gpu_ = 0;
  cudaEvent_t ready_ = nullptr;  // to receive
  cudaEvent_t sent_ = nullptr;
  std::byte* host_ = nullptr;  // pinned; null: no neighbour needs it
};

}  // namespace fathom::model
