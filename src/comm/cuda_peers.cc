#include "comm/cuda_peers.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "comm/cuda_collective_kinds.h"
#include "comm/group.h"
#include "device/cuda/multi_gpu.h"

namespace fathom::comm {
namespace {

constexpr size_t kReportStride = 32;    // of 4 bytes: a cache line or two apart
constexpr uint64_t kFirstExchange = 1;  // 0 is what memory holds that nobody wrote

Status CudaError(const char* what, int gpu, cudaError_t error) {
  (void)cudaGetLastError();
  return DeviceError(fmt::format("{} on GPU {} failed: {}", what, gpu, cudaGetErrorString(error)));
}

#define RETURN_IF_CUDA_ERROR(what, gpu, expr)                       \
  do {                                                              \
    if (const cudaError_t error_ = (expr); error_ != cudaSuccess) { \
      return CudaError(what, gpu, error_);                          \
    }                                                               \
  } while (false)

Status CheckGroup(size_t size) {
  if (size > kernels::kMaxPeers) {
    return DeviceError(fmt::format("{} GPUs are to write to each other's memory: at most {} can",
                                   size, kernels::kMaxPeers));
  }
  if (device::KernelsAreLoadedEagerly()) return OkStatus();
  return DeviceError(
      "CUDA loads kernels when they are first used, which several ranks cannot have: set "
      "CUDA_MODULE_LOADING=EAGER");
}

}  // namespace

kernels::PeerView OwnView(int rank, int size, const kernels::PeerLayout& layout,
                          std::byte* memory) {
  auto* const counters = reinterpret_cast<uint64_t*>(memory + layout.bytes);
  kernels::PeerView view{.rank = rank,
                         .size = size,
                         .layout = layout,
                         .exchanges = counters,
                         .failed = reinterpret_cast<uint32_t*>(counters + 16)};
  view.memory[rank] = memory;
  return view;
}

bool StartExchanges(const kernels::PeerView& view) {
  return cudaMemcpy(view.exchanges, &kFirstExchange, sizeof(kFirstExchange),
                    cudaMemcpyHostToDevice) == cudaSuccess;
}

bool AllReachAll(std::span<const int> gpus) {
  for (const int from : gpus) {
    for (const int to : gpus) {
      if (from != to && device::ProbePeerLink(from, to) == device::PeerLink::kNone) return false;
    }
  }
  return true;
}

CudaPeers::CudaPeers(std::vector<int> gpus, int64_t shared_bytes, Duration timeout)
    : gpus_(std::move(gpus)),
      layout_(kernels::MakePeerLayout(static_cast<int>(gpus_.size()), shared_bytes)),
      timeout_(timeout),
      views_(gpus_.size()) {}

Result<std::unique_ptr<CudaPeers>> CudaPeers::Make(std::span<const int> gpus, int64_t shared_bytes,
                                                   Duration timeout) {
  RETURN_IF_ERROR(CheckGroup(gpus.size()));
  std::unique_ptr<CudaPeers> peers(
      new CudaPeers({gpus.begin(), gpus.end()}, shared_bytes, timeout));
  RETURN_IF_ERROR(peers->EnableAccess());
  RETURN_IF_ERROR(peers->AllocateReports());
  const int size = static_cast<int>(gpus.size());
  for (int rank = 0; rank < size; ++rank) RETURN_IF_ERROR(peers->Allocate(rank));
  std::vector<int> multiprocessors;
  for (const int gpu : gpus) {
    RETURN_IF_CUDA_ERROR("cudaDeviceGetAttribute", gpu,
                         cudaDeviceGetAttribute(&multiprocessors.emplace_back(),
                                                cudaDevAttrMultiProcessorCount, gpu));
  }
  peers->Compare(multiprocessors);
  for (kernels::PeerView& view : peers->views_) {
    for (int rank = 0; rank < size; ++rank) {
      view.memory[rank] = peers->views_[static_cast<size_t>(rank)].memory[rank];
    }
  }
  return peers;
}

Result<std::unique_ptr<CudaPeers>> CudaPeers::Join(Transport& transport,
                                                   std::span<const int> members, int gpu,
                                                   int64_t shared_bytes, Duration timeout) {
  RETURN_IF_ERROR(CheckGroup(members.size()));
  std::unique_ptr<CudaPeers> peers(
      new CudaPeers(std::vector<int>(members.size(), gpu), shared_bytes, timeout));
  const auto own = std::find(members.begin(), members.end(), transport.rank());
  CHECK(own != members.end());
  peers->only_rank_ = static_cast<int>(own - members.begin());
  RETURN_IF_ERROR(peers->AllocateReports());
  RETURN_IF_ERROR(peers->Allocate(peers->only_rank_));
  RETURN_IF_ERROR(peers->Exchange(transport, members, peers->only_rank_));
  LogInfo("{} ranks, a process each, write to each other's memory", members.size());
  return peers;
}

// Every rank's memory becomes reachable from this one's.
Status CudaPeers::Exchange(Transport& transport, std::span<const int> members, int rank) {
  struct Card {
    cudaIpcMemHandle_t memory;
    cudaUUID_t uuid;
    int32_t gpu;
    int32_t multiprocessors;
  };
  std::vector<Card> cards(members.size());
  std::vector<Group::Range> places;
  for (size_t i = 0; i < members.size(); ++i) {
    places.push_back(
        {static_cast<int64_t>(i * sizeof(Card)), static_cast<int64_t>((i + 1) * sizeof(Card))});
  }
  kernels::PeerView& view = views_[static_cast<size_t>(rank)];
  const int gpu = gpus_[static_cast<size_t>(rank)];
  Card& own = cards[static_cast<size_t>(rank)];
  own.gpu = gpu;
  cudaDeviceProp properties{};
  RETURN_IF_CUDA_ERROR("cudaGetDeviceProperties", gpu, cudaGetDeviceProperties(&properties, gpu));
  own.uuid = properties.uuid;
  own.multiprocessors = properties.multiProcessorCount;
  RETURN_IF_CUDA_ERROR("sharing memory with other processes", gpu,
                       cudaIpcGetMemHandle(&own.memory, view.memory[rank]));
  RETURN_IF_ERROR(Group(transport, {members.begin(), members.end()})
                      .AllGather(std::as_writable_bytes(std::span(cards)), places));
  std::vector<int> multiprocessors;
  for (const Card& card : cards) multiprocessors.push_back(card.multiprocessors);
  Compare(multiprocessors);
  for (size_t i = 0; i < cards.size(); ++i) {
    if (static_cast<int>(i) == rank) continue;
    if (std::memcmp(&cards[i].uuid, &own.uuid, sizeof(own.uuid)) == 0) {
      return DeviceError(
          fmt::format("ranks {} and {} are on the same GPU: each needs one of its own (start fewer "
                      "processes, or see CUDA_VISIBLE_DEVICES)",
                      std::min(members[i], members[static_cast<size_t>(rank)]),
                      std::max(members[i], members[static_cast<size_t>(rank)])));
    }
    gpus_[i] = cards[i].gpu;
    void* memory = nullptr;
    const cudaError_t error =
        cudaIpcOpenMemHandle(&memory, cards[i].memory, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return DeviceError(fmt::format(
          "the GPU of rank {} cannot be reached from rank {}'s process ({}): tensor and data ranks "
          "are of one host; if it sees its own GPU only, show it all (CUDA_VISIBLE_DEVICES)",
          members[i], members[static_cast<size_t>(rank)], cudaGetErrorString(error)));
    }
    view.memory[i] = static_cast<std::byte*>(memory);
  }
  return OkStatus();
}

// Of each rank's GPU.
void CudaPeers::Compare(std::span<const int> multiprocessors) {
  for (const int count : multiprocessors) {
    if (count != multiprocessors.front()) return;
  }
  for (kernels::PeerView& view : views_) view.num_multiprocessors = multiprocessors.front();
}

Status CudaPeers::EnableAccess() const {
  for (const int from : gpus_) {
    RETURN_IF_CUDA_ERROR("cudaSetDevice", from, cudaSetDevice(from));
    for (const int to : gpus_) {
      if (from == to) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else if (error != cudaSuccess) {
        return CudaError(fmt::format("reaching the memory of GPU {}", to).c_str(), from, error);
      }
    }
  }
  return OkStatus();
}

Status CudaPeers::AllocateReports() {
  const size_t count = gpus_.size() * kReportStride;
  void* reports = nullptr;
  RETURN_IF_CUDA_ERROR("pinning host memory", gpus_.front(),
                       cudaHostAlloc(&reports, count * sizeof(uint32_t), cudaHostAllocPortable));
  timed_out_ = static_cast<uint32_t*>(reports);
  std::fill_n(timed_out_, count, 0u);
  return OkStatus();
}

// The rank's view, with its own memory.
Status CudaPeers::Allocate(int rank) {
  const auto bytes = static_cast<size_t>(PeerMemoryBytes(layout_));
  const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout_);
  const int gpu = gpus_[static_cast<size_t>(rank)];
  RETURN_IF_CUDA_ERROR("cudaSetDevice", gpu, cudaSetDevice(gpu));
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    return NoRoomOnGpu(gpu, static_cast<int64_t>(bytes));
  }
  kernels::PeerView& view = views_[static_cast<size_t>(rank)];
  view = OwnView(rank, static_cast<int>(gpus_.size()), layout_, static_cast<std::byte*>(memory));
  view.timed_out = timed_out_ + static_cast<size_t>(rank) * kReportStride;
  view.timeout_ns = static_cast<uint64_t>(timeout.count());
  RETURN_IF_CUDA_ERROR("cudaMemset", gpu, cudaMemset(memory, 0, bytes));
  if (!StartExchanges(view)) return CudaError("cudaMemcpy", gpu, cudaGetLastError());
  RETURN_IF_CUDA_ERROR("cudaDeviceSynchronize", gpu, cudaDeviceSynchronize());
  return OkStatus();
}

CudaPeers::~CudaPeers() {
  for (size_t rank = 0; rank < views_.size(); ++rank) {
    kernels::PeerView& view = views_[rank];
    if (view.memory[rank] == nullptr) continue;
    cudaSetDevice(gpus_[rank]);
    for (size_t other = 0; only_rank_ >= 0 && other < views_.size(); ++other) {
      if (other != rank && view.memory[other] != nullptr) cudaIpcCloseMemHandle(view.memory[other]);
    }
    cudaFree(view.memory[rank]);
  }
  cudaFreeHost(timed_out_);
}

Status CudaPeers::Check(int rank) const {
  const uint32_t missing = *view(rank).timed_out;
  if (missing == 0) return OkStatus();
  return PeerError(fmt::format("rank {} waited {:.3g} s for rank {} (GPU {}): it hangs, or is gone",
                               rank, Seconds(timeout_), missing - 1, gpus_[missing - 1]));
}

}  // namespace fathom::comm
