#include "comm/nccl_watch.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace fathom::comm {
namespace {

constexpr size_t kWordsOfRank = 2;  // begun, ended
constexpr int kLooksOfTimeout = 20;

uint32_t Load(const uint32_t* word) { return *static_cast<const volatile uint32_t*>(word); }

}  // namespace

Result<std::shared_ptr<NcclWatch>> NcclWatch::Make(const NcclLibrary& nccl,
                                                   std::span<const int> gpus, Duration timeout) {
  std::shared_ptr<NcclWatch> watch(new NcclWatch(nccl, gpus, timeout));
  RETURN_IF_ERROR(watch->AllocateCounts());
  std::vector<NcclCommunicator> communicators(gpus.size());
  const auto size = static_cast<int>(gpus.size());
  if (const int result = nccl.CommInitAll(communicators.data(), size, gpus.data());
      result != kNcclSuccess) {
    return DeviceError(
        fmt::format("NCCL cannot connect {} GPUs: {}", size, nccl.GetErrorString(result)));
  }
  watch->communicators_ = std::move(communicators);
  watch->thread_ = std::thread([watch = watch.get()] { watch->Watch(); });
  return watch;
}

NcclWatch::NcclWatch(const NcclLibrary& nccl, std::span<const int> gpus, Duration timeout)
    : nccl_(nccl), gpus_(gpus.begin(), gpus.end()), timeout_(timeout) {}

Status NcclWatch::AllocateCounts() {
  const size_t count = gpus_.size() * kWordsOfRank;
  void* words = nullptr;
  if (cudaHostAlloc(&words, count * sizeof(uint32_t), cudaHostAllocPortable) != cudaSuccess) {
    return OutOfMemory("no pinned memory for the counters of a group's exchanges");
  }
  words_ = static_cast<uint32_t*>(words);
  std::fill_n(words_, count, 0u);
  for (size_t rank = 0; rank < gpus_.size(); ++rank) {
    void* counter = nullptr;
    if (cudaSetDevice(gpus_[rank]) != cudaSuccess ||
        cudaMalloc(&counter, sizeof(uint32_t)) != cudaSuccess) {
      return OutOfMemory(fmt::format("no memory for a counter on GPU {}", gpus_[rank]));
    }
    uint32_t* const of_rank = words_ + rank * kWordsOfRank;
    counts_.push_back({static_cast<uint32_t*>(counter), of_rank, of_rank + 1});
    if (cudaMemset(counter, 0, sizeof(uint32_t)) != cudaSuccess) {
      return DeviceError("cudaMemset failed");
    }
  }
  return OkStatus();
}

NcclWatch::~NcclWatch() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (missing_ < 0) Abort();
  for (size_t rank = 0; rank < counts_.size(); ++rank) {
    cudaSetDevice(gpus_[rank]);
    cudaFree(counts_[rank].count);
  }
  cudaFreeHost(words_);
}

void NcclWatch::Begin(int rank, device::Stream& stream) const {
  LaunchBegin(counts_[static_cast<size_t>(rank)], stream);
}

void NcclWatch::EndStep(int rank, device::Stream& stream) const {
  LaunchEndStep(counts_[static_cast<size_t>(rank)], stream);
}

Status NcclWatch::Check() const {
  const int missing = missing_;
  if (missing < 0) return OkStatus();
  return PeerError(
      fmt::format("the group waited {:.3g} s for rank {} (GPU {}): it hangs, or is gone",
                  Seconds(timeout_), missing, gpus_[static_cast<size_t>(missing)]));
}

void NcclWatch::Watch() {
  using Clock = std::chrono::steady_clock;
  std::vector<uint32_t> last = Read();
  Clock::time_point moved = Clock::now();
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, timeout_ / kLooksOfTimeout, [this] { return stops_; })) {
    std::vector<uint32_t> words = Read();
    const Clock::time_point now = Clock::now();
    if (words != last || !IsWaiting()) {
      last = std::move(words);
      moved = now;
    } else if (now - moved >= timeout_) {
      return EndGroup();
    }
  }
}

std::vector<uint32_t> NcclWatch::Read() const {
  std::vector<uint32_t> words;
  for (size_t i = 0; i < gpus_.size() * kWordsOfRank; ++i) words.push_back(Load(words_ + i));
  return words;
}

bool NcclWatch::IsWaiting() const {
  return std::any_of(counts_.begin(), counts_.end(), [](const kernels::ExchangeCount& count) {
    return Load(count.begun) != Load(count.ended);
  });
}

// Counters run over; differences of them are small.
void NcclWatch::EndGroup() {
  const auto is_behind = [](const kernels::ExchangeCount& a, const kernels::ExchangeCount& b) {
    return static_cast<int32_t>(Load(a.begun) - Load(b.begun)) < 0;
  };
  const auto least = std::min_element(counts_.begin(), counts_.end(), is_behind);
  missing_ = static_cast<int>(least - counts_.begin());
  Abort();
}

void NcclWatch::Abort() {
  for (NcclCommunicator communicator : communicators_) nccl_.CommAbort(communicator);
}

}  // namespace fathom::comm
