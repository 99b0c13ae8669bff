#include "model/weight_transfer.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/thread_pool.h"
#include "device/cuda/cuda_check.h"
#include "model/weights.h"

namespace fathom::model {
namespace {

using checkpoint::TensorSource;

// From `at`, the unit in device memory, to its tiles.
void MakeTiles(const WeightUnit& unit, const std::byte* at, device::Stream& stream) {
  kernels::WeightMatrix matrix = unit.matrix;
  matrix.data = at;
  matrix.scales =
      unit.scales_place == 0 ? nullptr : reinterpret_cast<const uint8_t*>(at + unit.scales_place);
  kernels::LaunchTileWeights(matrix, unit.kind, unit.tiles, stream, unit.interleave);
}

int64_t LargestUnit(const std::vector<WeightUnit>& units) {
  int64_t bytes = 0;
  for (const WeightUnit& unit : units) bytes = std::max(bytes, unit.bytes);
  return bytes;
}

// One unit on its way.
class Slot {
 public:
  Status Open(int64_t capacity, device::Device& device) {
    ASSIGN_OR_RETURN(stream_, device.MakeStream());
    ASSIGN_OR_RETURN(pinned_, device.AllocateHost(capacity));
    ASSIGN_OR_RETURN(staging_, device.Allocate(capacity));
    device::CheckCuda(cudaGetDevice(&gpu_), __FILE__, __LINE__);  // the device's own, by now
    return OkStatus();
  }

  // Waits for the unit before; returns when this one is read and its copy enqueued.
  Status Send(const WeightUnit& unit, const TensorSource& source, int num_experts) {
    RETURN_IF_ERROR(stream_->Synchronize());
    device::CheckCuda(cudaSetDevice(gpu_), __FILE__,
                      __LINE__);  // another thread may have opened it
    for (const WeightUnit::Read& read : unit.reads) {
      RETURN_IF_ERROR(ReadTensor(source, *read.tensor, read.offset, num_experts,
                                 {pinned_.data() + read.place, static_cast<size_t>(read.bytes)}));
    }
    if (unit.destination != nullptr) {
      return stream_->Copy(unit.destination, pinned_.data(), unit.bytes);
    }
    RETURN_IF_ERROR(stream_->Copy(staging_.data(), pinned_.data(), unit.bytes));
    MakeTiles(unit, staging_.data(), *stream_);
    return OkStatus();
  }
  Status Finish() { return stream_->Synchronize(); }

 private:
  device::Buffer pinned_, staging_;
  int gpu_ = 0;
  std::unique_ptr<device::Stream> stream_;  // first to go: it waits for nothing, Finish does
};

class Transfer {
 public:
  Transfer(const std::vector<WeightUnit>& units, const TensorSource& source, int num_experts,
           device::Device& device)
      : units_(units), source_(source), num_experts_(num_experts), device_(device) {}

  Status Run() {
    // Beyond this many threads the link, not the reading, is the limit.
    constexpr int kMaxThreads = 16;
    ThreadPool pool(std::min(NumUsableCores(), kMaxThreads));
    const int64_t capacity = LargestUnit(units_);
    std::vector<SlotPair> slots(static_cast<size_t>(pool.num_threads()));
    pool.ParallelFor(pool.num_threads(), 1, [&](int64_t i, int64_t) {
      for (Slot& slot : slots[static_cast<size_t>(i)]) Keep(slot.Open(capacity, device_));
    });
    if (failed_) return error_;
    pool.ParallelFor(pool.num_threads(), 1,
                     [&](int64_t i, int64_t) { Keep(Work(slots[static_cast<size_t>(i)])); });
    return error_;
  }

 private:
  using SlotPair = std::array<Slot, 2>;

  Status Work(SlotPair& slots) {
    Status status;
    for (size_t turn = 0; status.ok() && !failed_; turn ^= 1) {
      const size_t i = next_.fetch_add(1);
      if (i >= units_.size()) break;
      status = slots[turn].Send(units_[i], source_, num_experts_);
    }
    // Before the slots' memory goes, whatever happened.
    for (Slot& slot : slots) {
      const Status finished = slot.Finish();
      if (status.ok()) status = finished;
    }
    return status;
  }

  void Keep(const Status& status) {
    if (status.ok()) return;
    const std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = status;
    failed_ = true;
  }

  const std::vector<WeightUnit>& units_;
  const TensorSource& source_;
  const int num_experts_;
  device::Device& device_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  Status error_;  // guarded by mutex_; the first
};

}  // namespace

Status TransferWeights(const std::vector<WeightUnit>& units, const TensorSource& source,
                       int num_experts, device::Device& device) {
  return Transfer(units, source, num_experts, device).Run();
}

Status MakeDummyWeights(const std::vector<WeightUnit>& units, int num_experts,
                        device::Device& device) {
  ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
  ASSIGN_OR_RETURN(const device::Buffer staging, device.Allocate(LargestUnit(units)));
  uint32_t seed = 0;
  for (const WeightUnit& unit : units) {
    std::byte* const to = unit.destination != nullptr ? unit.destination : staging.data();
    for (const WeightUnit::Read& read : unit.reads) {
      FillDummy(read.dummy, to + read.place, read.bytes, ++seed, num_experts, *stream);
    }
    if (unit.destination == nullptr) MakeTiles(unit, staging.data(), *stream);
  }
  return stream->Synchronize();
}

}  // namespace fathom::model
