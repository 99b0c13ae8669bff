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

// Between two calls that copy the link rests for some 3 us, so one is worth 150 us of it, or 80
// where several GPUs keep it waiting.
constexpr size_t kBatchUnits = 8;
// Of a reader: one that it fills, one that it has filled before, the others on their way.
constexpr int kReaderPlaces = 4;
// So many read faster than the link takes it; more take cores and memory from it.
constexpr int kMaxReaders = 12;

// The unit's matrix, which lies at `at` in device memory, and its tiles.
kernels::MatrixToTile MatrixAt(const std::byte* at, const WeightUnit& unit) {
  kernels::WeightMatrix matrix = unit.matrix;
  matrix.data = at;
  matrix.scales =
      unit.scales_place == 0 ? nullptr : reinterpret_cast<const uint8_t*>(at + unit.scales_place);
  return {matrix, unit.kind, unit.tiles, unit.interleave};
}

int64_t LargestUnit(const std::vector<WeightUnit>& units) {
  int64_t bytes = 0;
  for (const WeightUnit& unit : units) bytes = std::max(bytes, unit.bytes);
  return bytes;
}

// Readers take the units one by one. A reader's places in pinned memory are written by nobody else,
// so that their lines are not fetched from other cores, and few are in use at a time, so that they
// stay in the processor's cache until they are on the link. Lines that are still dirty in a core's
// own cache the link reads at half its speed: a unit is handed over when its reader has read
// another, which pushed most of it out to the cache that cores share. Who hands over the last unit
// of a batch enqueues it. The thread that began all this waits until a batch is on the GPU, which
// frees its places.
class Transfer {
 public:
  Transfer(const std::vector<WeightUnit>& units, const TensorSource& source, int num_experts,
           device::Device& device)
      : units_(units),
        num_readers_(std::clamp(NumUsableCores() - 1, 1, kMaxReaders)),
        // What readers that wait for a place have handed over is at least a batch.
        batch_units_(
            std::min(kBatchUnits, static_cast<size_t>(num_readers_ * (kReaderPlaces - 1)))),
        source_(source),
        num_experts_(num_experts),
        device_(device),
        num_reading_(num_readers_) {}

  Status Run() {
    RETURN_IF_ERROR(Open());
    std::vector<std::thread> readers;
    for (int i = 0; i < num_readers_; ++i) readers.emplace_back([this, i] { ReadAndSend(i); });
    FreePlaces();
    for (std::thread& reader : readers) reader.join();
    // Before the places' memory goes, whatever happened.
    for (const Lane& lane : lanes_) Keep(lane.stream->Synchronize());
    return error_;
  }

 private:
  struct Place {
    std::byte* pinned = nullptr;
    const WeightUnit* unit = nullptr;  // that it holds; null: none. Guarded by mutex_
  };
  // Units that go to the GPU in one call.
  struct Batch {
    std::vector<Place*> places;
    std::unique_ptr<device::Event> copied;
  };
  // A stream and where its batch lies on the GPU until tiles are made of it.
  struct Lane {
    std::unique_ptr<device::Stream> stream;
    device::Buffer staging;
  };

  Status Open() {
    place_bytes_ = (LargestUnit(units_) + 4095) / 4096 * 4096;
    const int num_places = num_readers_ * kReaderPlaces;
    ASSIGN_OR_RETURN(pinned_, device_.AllocateHost(num_places * place_bytes_));
    for (Lane& lane : lanes_) {
      ASSIGN_OR_RETURN(lane.stream, device_.MakeStream());
      ASSIGN_OR_RETURN(lane.staging,
                       device_.Allocate(static_cast<int64_t>(batch_units_) * place_bytes_));
    }
    for (int i = 0; i < num_places; ++i) {
      ASSIGN_OR_RETURN(events_.emplace_back(), device_.MakeEvent());  // as many as batches at most
      places_.push_back({pinned_.data() + i * place_bytes_});
    }
    device::CheckCuda(cudaGetDevice(&gpu_), __FILE__, __LINE__);  // the device's own, by now
    return OkStatus();
  }

  void ReadAndSend(int reader) {
    device::CheckCuda(cudaSetDevice(gpu_), __FILE__, __LINE__);
    const auto places =
        std::span(places_).subspan(static_cast<size_t>(reader) * kReaderPlaces, kReaderPlaces);
    Place* read = nullptr;  // and not handed over
    while (Place* const place = Take(places)) {
      Keep(Read(*place));
      if (read != nullptr) Keep(HandOver(*read));
      read = place;
    }
    if (read != nullptr) Keep(HandOver(*read));
    Keep(LeaveReading());
  }

  // The next unit is for the first of the reader's places that is free, so that few are in use
  // while the link waits for readers. Null: all are taken, or it came to an error.
  Place* Take(std::span<Place> places) {
    std::unique_lock lock(mutex_);
    auto free = places.end();
    const auto is_over = [&] { return !error_.ok() || next_unit_ == units_.size(); };
    can_take_.wait(lock, [&] {
      free = std::find_if(places.begin(), places.end(),
                          [](const Place& place) { return place.unit == nullptr; });
      return is_over() || free != places.end();
    });
    if (is_over()) return nullptr;
    free->unit = &units_[next_unit_];
    if (++next_unit_ == units_.size()) can_take_.notify_all();
    return &*free;
  }

  Status Read(const Place& place) {
    for (const WeightUnit::Read& read : place.unit->reads) {
      RETURN_IF_ERROR(ReadTensor(source_, *read.tensor, read.offset, num_experts_,
                                 {place.pinned + read.place, static_cast<size_t>(read.bytes)}));
    }
    return OkStatus();
  }

  // Who finds that nobody sends does it, batch by batch while there is one: the others read on.
  Status HandOver(Place& place) {
    std::unique_lock lock(mutex_);
    handed_over_.push_back(&place);
    if (is_sending_) return OkStatus();
    is_sending_ = true;
    Status status;
    while (status.ok() && handed_over_.size() >= batch_units_) {
      Batch batch = TakeBatch();
      lock.unlock();
      status = Send(std::move(batch));
      lock.lock();
    }
    is_sending_ = false;
    return status;
  }

  // The last reader sends what is less than a batch.
  Status LeaveReading() {
    std::unique_lock lock(mutex_);
    if (--num_reading_ > 0 || !error_.ok() || handed_over_.empty()) return OkStatus();
    Batch batch = TakeBatch();
    lock.unlock();
    return Send(std::move(batch));
  }

  // The units that were handed over first; under mutex_.
  Batch TakeBatch() {
    const auto begin = handed_over_.begin();
    const auto end = begin + static_cast<int64_t>(std::min(batch_units_, handed_over_.size()));
    Batch batch{{begin, end}, std::move(events_.back())};
    handed_over_.erase(begin, end);
    events_.pop_back();
    return batch;
  }

  // Lanes take turns, so that one batch's tiles are made while the next one is on the link.
  Status Send(Batch batch) {
    std::swap(lanes_[0], lanes_[1]);
    const Lane& lane = lanes_[0];
    std::vector<kernels::MatrixToTile> matrices;
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<size_t> bytes;
    for (const Place* place : batch.places) {
      const WeightUnit& unit = *place->unit;
      std::byte* const staging =
          lane.staging.data() + static_cast<int64_t>(to.size()) * place_bytes_;
      if (unit.destination == nullptr) matrices.push_back(MatrixAt(staging, unit));
      to.push_back(unit.destination == nullptr ? staging : unit.destination);
      from.push_back(place->pinned);
      bytes.push_back(static_cast<size_t>(unit.bytes));
    }
    CopyAll(to, from, bytes, *lane.stream);
    RETURN_IF_ERROR(batch.copied->Record(*lane.stream));
    kernels::LaunchTileWeights(matrices, *lane.stream);
    const std::lock_guard lock(mutex_);
    sent_.push_back(std::move(batch));
    can_free_.notify_one();
    return OkStatus();
  }

  static void CopyAll(std::span<void*> to, std::span<const void*> from, std::span<size_t> bytes,
                      const device::Stream& stream) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;  // that the attributes are of
    device::CheckCuda(
        cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first,
                             1, static_cast<cudaStream_t>(stream.native_handle())),
        __FILE__, __LINE__);
  }

  void FreePlaces() {
    for (size_t num_done = 0; num_done < units_.size();) {
      Batch batch;
      {
        std::unique_lock lock(mutex_);
        can_free_.wait(lock, [&] { return !error_.ok() || !sent_.empty(); });
        if (!error_.ok()) return;
        batch = std::move(sent_.front());
        sent_.pop_front();
      }
      Keep(batch.copied->Wait());
      const std::lock_guard lock(mutex_);
      for (Place* place : batch.places) place->unit = nullptr;
      num_done += batch.places.size();
      events_.push_back(std::move(batch.copied));
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

  const std::vector<WeightUnit>& units_;
  const int num_readers_;
  const size_t batch_units_;
  const TensorSource& source_;
  const int num_experts_;
  device::Device& device_;
  int gpu_ = 0;  // the device's number
  int64_t place_bytes_ = 0;
  device::Buffer pinned_;
  std::vector<Place> places_;  // of each reader
  std::array<Lane, 2> lanes_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable can_take_, can_free_;
  size_t next_unit_ = 0;
  int num_reading_;                  // readers
  std::vector<Place*> handed_over_;  // and not sent
  bool is_sending_ = false;          // who does it uses the lanes
  std::deque<Batch> sent_;
  std::vector<std::unique_ptr<device::Event>> events_;  // of no batch
  Status error_;                                        // the first
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
    if (unit.destination == nullptr) {
      const kernels::MatrixToTile matrix = MatrixAt(staging.data(), unit);
      kernels::LaunchTileWeights({&matrix, 1}, *stream);
    }
  }
  return stream->Synchronize();
}

}  // namespace fathom::model
