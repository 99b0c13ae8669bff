// CudaMilestones: how far a GPU came, which the host can read when it is broken. Each boundary of a
// step (kernels/hyper_connection) leaves which half of which layer begins, in a word of pinned
// memory. Layers are the rank's own. Milestones are made by the thread that enqueues; LastBegun by
// any.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/status.h"
#include "device/device.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"

namespace fathom::model {

class CudaMilestones {
 public:
  // kOutOfMemory.
  static Result<CudaMilestones> Make(device::Device& device);

  kernels::Milestone Attention(int layer) const { return At(2 * layer); }
  kernels::Milestone Experts(int layer) const { return At(2 * layer + 1); }

  // "attention of layer 3"; with `layers` of them, behind the last one's experts what follows, too.
  std::string LastBegun(int num_layers) const;

 private:
  explicit CudaMilestones(device::Buffer word) : word_(std::move(word)) {}
  uint32_t* word() const { return reinterpret_cast<uint32_t*>(word_.data()); }
  kernels::Milestone At(int half) const { return {word(), static_cast<uint32_t>(half) + 1}; }

  device::Buffer word_;  // 0: nothing has begun
};

}  // namespace fathom::model
