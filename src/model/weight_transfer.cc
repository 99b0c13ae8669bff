#include "model/weight_transfer.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/thread_pool.h"
#include "device/cuda/cuda_check.h"
#include "model/weights.h"

namespace fathom::model {
namespace {

using checkpoint::TensorSource;

// Between two copies the link rests for some 3 us, so a batch is worth 150 us of it, four units.
// The slots together are small enough to stay in a processor's cache from the reading to the link.
constexpr int64_t kBatchBytes = int64_t{9} << 20;
constexpr size_t kNumSlots = 8;
// So many read faster than the link takes it; more take cores and memory from it.
constexpr int kMaxReaders = 12;

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

// Units that go to the GPU in one copy, beside each other.
struct Batch {
  std::span<const WeightUnit> units = {};
  int64_t bytes = 0;
};

// What a unit takes of its batch.
int64_t PlaceBytes(const WeightUnit& unit) { return (unit.bytes + 255) / 256 * 256; }

std::vector<Batch> MakeBatches(std::span<const WeightUnit> units) {
  std::vector<Batch> batches;
  for (size_t i = 0; i < units.size(); ++i) {
    const int64_t bytes = PlaceBytes(units[i]);
    if (batches.empty() || batches.back().bytes + bytes > kBatchBytes) {
      batches.push_back({.units = units.subspan(i, 0)});
    }
    Batch& batch = batches.back();
    batch.units = {batch.units.data(), batch.units.size() + 1};
    batch.bytes += bytes;
  }
  return batches;
}

// Batch b goes through slot b % kNumSlots. Readers take its units one by one; who reads the last of
// them enqueues the batch at once, so that the link finds the next copy behind the one that it is
// at. The thread that began all this waits until the GPU is done with it, which frees the slot.
class Transfer {
 public:
  Transfer(const std::vector<WeightUnit>& units, const TensorSource& source, int num_experts,
           device::Device& device)
      : batches_(MakeBatches(units)), source_(source), num_experts_(num_experts), device_(device) {}

  Status Run() {
    RETURN_IF_ERROR(Open());
    std::vector<std::thread> readers;
    const int num_readers = std::clamp(NumUsableCores() - 1, 1, kMaxReaders);
    for (int i = 0; i < num_readers; ++i) readers.emplace_back([this] { ReadAndSend(); });
    FreeSlots();
    for (std::thread& reader : readers) reader.join();
    // Before the slots' memory goes, whatever happened.
    for (const auto& stream : streams_) Keep(stream->Synchronize());
    return error_;
  }

 private:
  struct Slot {
    std::byte* pinned = nullptr;
    std::byte* staging = nullptr;          // on the GPU
    std::unique_ptr<device::Event> event;  // behind the batch
    size_t num_read = 0;                   // units of the batch; guarded by mutex_
    bool is_sent = false;                  // guarded by mutex_
  };
  // A unit to be read.
  struct Piece {
    size_t batch = 0;
    const WeightUnit* unit = nullptr;
    int64_t place = 0;  // in the slot
  };

  Slot& SlotOf(size_t batch) { return slots_[batch % kNumSlots]; }

  Status Open() {
    int64_t bytes = 0;
    for (const Batch& batch : batches_) bytes = std::max(bytes, batch.bytes);
    ASSIGN_OR_RETURN(pinned_, device_.AllocateHost(kNumSlots * bytes));
    ASSIGN_OR_RETURN(staging_, device_.Allocate(kNumSlots * bytes));
    for (auto& stream : streams_) {
      ASSIGN_OR_RETURN(stream, device_.MakeStream());
    }
    for (size_t i = 0; i < kNumSlots; ++i) {
      const int64_t place = static_cast<int64_t>(i) * bytes;
      slots_[i].pinned = pinned_.data() + place;
      slots_[i].staging = staging_.data() + place;
      ASSIGN_OR_RETURN(slots_[i].event, device_.MakeEvent());
    }
    device::CheckCuda(cudaGetDevice(&gpu_), __FILE__, __LINE__);  // the device's own, by now
    return OkStatus();
  }

  void ReadAndSend() {
    device::CheckCuda(cudaSetDevice(gpu_), __FILE__, __LINE__);
    while (const std::optional<Piece> piece = Take()) {
      Status status = Read(*piece);
      if (status.ok() && IsLastRead(piece->batch)) status = Send(piece->batch);
      Keep(status);
    }
  }

  // The next unit, when its slot is free; nothing: all are taken, or it came to an error.
  std::optional<Piece> Take() {
    std::unique_lock lock(mutex_);
    slot_was_freed_.wait(lock, [&] {
      return !error_.ok() || next_.batch < std::min(num_freed_ + kNumSlots, batches_.size()) ||
             next_.batch == batches_.size();
    });
    if (!error_.ok() || next_.batch == batches_.size()) return {};
    const Batch& batch = batches_[next_.batch];
    const Piece piece{next_.batch, &batch.units[next_.unit], next_.place};
    next_.place += PlaceBytes(*piece.unit);
    if (++next_.unit == batch.units.size()) next_ = {.batch = next_.batch + 1};
    // Nobody frees a slot for those who wait when there is nothing more to take.
    if (next_.batch == batches_.size()) slot_was_freed_.notify_all();
    return piece;
  }

  Status Read(const Piece& piece) {
    std::byte* const to = SlotOf(piece.batch).pinned + piece.place;
    for (const WeightUnit::Read& read : piece.unit->reads) {
      RETURN_IF_ERROR(ReadTensor(source_, *read.tensor, read.offset, num_experts_,
                                 {to + read.place, static_cast<size_t>(read.bytes)}));
    }
    return OkStatus();
  }

  bool IsLastRead(size_t batch) {
    const std::lock_guard lock(mutex_);
    return ++SlotOf(batch).num_read == batches_[batch].units.size();
  }

  // Streams take turns, so that one batch's tiles are made while the next one is on the link.
  Status Send(size_t b) {
    const Batch& batch = batches_[b];
    Slot& slot = SlotOf(b);
    const std::lock_guard sending(sending_);
    device::Stream& stream = *streams_[b % streams_.size()];
    RETURN_IF_ERROR(stream.Copy(slot.staging, slot.pinned, batch.bytes));
    const std::byte* at = slot.staging;
    for (const WeightUnit& unit : batch.units) {
      if (unit.destination == nullptr) {
        MakeTiles(unit, at, stream);
      } else {
        RETURN_IF_ERROR(stream.Copy(unit.destination, at, unit.bytes));
      }
      at += PlaceBytes(unit);
    }
    RETURN_IF_ERROR(slot.event->Record(stream));
    const std::lock_guard lock(mutex_);
    slot.is_sent = true;
    batch_was_sent_.notify_one();
    return OkStatus();
  }

  void FreeSlots() {
    for (size_t b = 0; b < batches_.size(); ++b) {
      Slot& slot = SlotOf(b);
      {
        std::unique_lock lock(mutex_);
        batch_was_sent_.wait(lock, [&] { return !error_.ok() || slot.is_sent; });
        if (!error_.ok()) return;
      }
      Keep(slot.event->Wait());
      const std::lock_guard lock(mutex_);
      slot.num_read = 0;
      slot.is_sent = false;
      num_freed_ = b + 1;
      slot_was_freed_.notify_all();
    }
  }

  void Keep(const Status& status) {
    if (status.ok()) return;
    const std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = status;
    slot_was_freed_.notify_all();
    batch_was_sent_.notify_all();
  }

  const std::vector<Batch> batches_;
  const TensorSource& source_;
  const int num_experts_;
  device::Device& device_;
  int gpu_ = 0;  // the device's number
  device::Buffer pinned_, staging_;
  std::array<Slot, kNumSlots> slots_;
  std::array<std::unique_ptr<device::Stream>, 2> streams_;
  std::mutex sending_;  // held by who uses the streams

  std::mutex mutex_;
  std::condition_variable slot_was_freed_, batch_was_sent_;
  struct {
    size_t batch = 0, unit = 0;
    int64_t place = 0;
  } next_;                // to be taken; guarded by mutex_
  size_t num_freed_ = 0;  // batches that the GPU has done with; guarded by mutex_
  Status error_;          // guarded by mutex_; the first
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
