#include "model/weight_transfer.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
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
constexpr int64_t kNumSlots = 8;
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

// Readers take the units of a batch one by one into a slot; who reads the last of them enqueues the
// batch at once, so that the link finds the next copy behind the one that it is at. The thread that
// began all this waits until the GPU is done with a batch, which frees the slot.
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
    const Batch* batch = nullptr;          // what it is given to, before anyone reads into it
    size_t num_read = 0;                   // of the batch's units; guarded by mutex_
  };
  // A unit to be read.
  struct Piece {
    Slot* slot = nullptr;
    const WeightUnit* unit = nullptr;
    int64_t place = 0;  // in the slot
  };

  Status Open() {
    int64_t bytes = 0;
    for (const Batch& batch : batches_) bytes = std::max(bytes, batch.bytes);
    ASSIGN_OR_RETURN(pinned_, device_.AllocateHost(kNumSlots * bytes));
    ASSIGN_OR_RETURN(staging_, device_.Allocate(kNumSlots * bytes));
    for (auto& stream : streams_) {
      ASSIGN_OR_RETURN(stream, device_.MakeStream());
    }
    for (int64_t i = 0; i < kNumSlots; ++i) {
      Slot& slot = slots_[static_cast<size_t>(i)];
      slot.pinned = pinned_.data() + i * bytes;
      slot.staging = staging_.data() + i * bytes;
      ASSIGN_OR_RETURN(slot.event, device_.MakeEvent());
      free_.push_back(&slot);
    }
    device::CheckCuda(cudaGetDevice(&gpu_), __FILE__, __LINE__);  // the device's own, by now
    return OkStatus();
  }

  void ReadAndSend() {
    device::CheckCuda(cudaSetDevice(gpu_), __FILE__, __LINE__);
    while (const std::optional<Piece> piece = Take()) {
      Status status = Read(*piece);
      if (status.ok() && IsLastRead(*piece->slot)) status = Send(*piece->slot);
      Keep(status);
    }
  }

  // The next unit, when there is a slot for it; nothing: all are taken, or it came to an error.
  std::optional<Piece> Take() {
    std::unique_lock lock(mutex_);
    const auto is_over = [&] { return !error_.ok() || next_.batch == batches_.size(); };
    can_take_.wait(lock, [&] { return is_over() || next_.slot != nullptr || !free_.empty(); });
    if (is_over()) return {};
    const Batch& batch = batches_[next_.batch];
    if (next_.slot == nullptr) {
      // The one that was freed last is still in the cache.
      next_.slot = free_.back();
      free_.pop_back();
      next_.slot->batch = &batch;
      next_.slot->num_read = 0;
    }
    const Piece piece{next_.slot, &batch.units[next_.unit], next_.place};
    next_.place += PlaceBytes(*piece.unit);
    if (++next_.unit == batch.units.size()) next_ = {.batch = next_.batch + 1};
    if (next_.batch == batches_.size()) can_take_.notify_all();
    return piece;
  }

  Status Read(const Piece& piece) {
    std::byte* const to = piece.slot->pinned + piece.place;
    for (const WeightUnit::Read& read : piece.unit->reads) {
      RETURN_IF_ERROR(ReadTensor(source_, *read.tensor, read.offset, num_experts_,
                                 {to + read.place, static_cast<size_t>(read.bytes)}));
    }
    return OkStatus();
  }

  bool IsLastRead(Slot& slot) {
    const std::lock_guard lock(mutex_);
    return ++slot.num_read == slot.batch->units.size();
  }

  // Streams take turns, so that one batch's tiles are made while the next one is on the link.
  Status Send(Slot& slot) {
    const std::lock_guard sending(sending_);
    std::swap(streams_[0], streams_[1]);
    device::Stream& stream = *streams_[0];
    RETURN_IF_ERROR(stream.Copy(slot.staging, slot.pinned, slot.batch->bytes));
    const std::byte* at = slot.staging;
    for (const WeightUnit& unit : slot.batch->units) {
      if (unit.destination == nullptr) {
        MakeTiles(unit, at, stream);
      } else {
        RETURN_IF_ERROR(stream.Copy(unit.destination, at, unit.bytes));
      }
      at += PlaceBytes(unit);
    }
    RETURN_IF_ERROR(slot.event->Record(stream));
    const std::lock_guard lock(mutex_);
    sent_.push_back(&slot);
    can_free_.notify_one();
    return OkStatus();
  }

  void FreeSlots() {
    for (size_t i = 0; i < batches_.size(); ++i) {
      Slot* slot = nullptr;
      {
        std::unique_lock lock(mutex_);
        can_free_.wait(lock, [&] { return !error_.ok() || !sent_.empty(); });
        if (!error_.ok()) return;
        slot = sent_.front();
        sent_.pop_front();
      }
      Keep(slot->event->Wait());
      const std::lock_guard lock(mutex_);
      free_.push_back(slot);
      can_take_.notify_all();
    }
  }

  void Keep(const Status& status) {
    if (status.ok()) return;
    const std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = status;
    can_take_.notify_all();
    can_free_.notify_all();
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

  std::mutex mutex_;  // guards what follows
  std::condition_variable can_take_, can_free_;
  // What is taken next.
  struct {
    size_t batch = 0, unit = 0;
    Slot* slot = nullptr;  // of the batch; null: it has none yet
    int64_t place = 0;
  } next_;
  std::vector<Slot*> free_;
  std::deque<Slot*> sent_;
  Status error_;  // the first
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
