#include "model/cuda_stages.h"

#include <algorithm>

#include "comm/transport.h"
#include "device/cuda/cuda_check.h"

namespace fathom::model {
namespace {

constexpr int64_t kPieceBytes = int64_t{8} << 20;

void Check(cudaError_t error) { device::CheckCuda(error, __FILE__, __LINE__); }

cudaStream_t StreamOf(device::Stream& stream) {
  return static_cast<cudaStream_t>(stream.native_handle());
}

// What neighbours of one process tell each other about a step. The receiver: where the streams
// belong, and when its GPU reads no older ones there. The sender: when they are there. An event is
// recorded again only after the other side has enqueued its wait for it: its next message says so.
struct Offer {
  std::byte* to;
  int gpu;
  cudaEvent_t ready;
};

}  // namespace

Result<std::unique_ptr<CudaStages>> CudaStages::Make(const ModelRank& rank) {
  std::unique_ptr<CudaStages> stages(new CudaStages(rank));
  Check(cudaGetDevice(&stages->gpu_));
  Check(cudaEventCreateWithFlags(&stages->ready_, cudaEventDisableTiming));
  Check(cudaEventCreateWithFlags(&stages->sent_, cudaEventDisableTiming));
  const auto needs_host = [&](int stages_on) {
    return !rank.transport->SharesMemoryWith(stages->Neighbour(stages_on));
  };
  if ((!stages->is_first() && needs_host(-1)) || (!stages->is_last() && needs_host(1))) {
    void* host = nullptr;
    if (cudaMallocHost(&host, kPieceBytes) != cudaSuccess) {
      return OutOfMemory("cannot pin host memory for what pipeline stages exchange");
    }
    stages->host_ = static_cast<std::byte*>(host);
  }
  return stages;
}

CudaStages::~CudaStages() {
  if (ready_ != nullptr) cudaEventDestroy(ready_);
  if (sent_ != nullptr) cudaEventDestroy(sent_);
  cudaFreeHost(host_);
}

int CudaStages::Neighbour(int stages_on) const {
  config::RankPlace place = rank_.place;
  place.pipeline += stages_on;
  return RankOf(rank_.parallel, place);
}

template <typename Value>
Status CudaStages::Tell(int to, const Value& value) {
  const comm::Outgoing message{to, std::as_bytes(std::span(&value, 1))};
  return rank_.transport->Exchange({&message, 1}, {});
}

template <typename Value>
Status CudaStages::Hear(int from, Value& value) {
  const comm::Incoming message{from, std::as_writable_bytes(std::span(&value, 1))};
  return rank_.transport->Exchange({}, {&message, 1});
}

Status CudaStages::Receive(std::byte* streams, int64_t bytes, device::Stream& stream) {
  const int from = Neighbour(-1);
  if (rank_.transport->SharesMemoryWith(from)) {
    Check(cudaEventRecord(ready_, StreamOf(stream)));
    RETURN_IF_ERROR(Tell(from, Offer{streams, gpu_, ready_}));
    cudaEvent_t sent = nullptr;
    RETURN_IF_ERROR(Hear(from, sent));
    Check(cudaStreamWaitEvent(StreamOf(stream), sent));
    return OkStatus();
  }
  for (int64_t at = 0; at < bytes; at += kPieceBytes) {
    const int64_t piece = std::min(kPieceBytes, bytes - at);
    const comm::Incoming message{from, {host_, static_cast<size_t>(piece)}};
    RETURN_IF_ERROR(rank_.transport->Exchange({}, {&message, 1}));
    RETURN_IF_ERROR(stream.Copy(streams + at, host_, piece));
    RETURN_IF_ERROR(stream.Synchronize());
  }
  return OkStatus();
}

Status CudaStages::Send(const std::byte* streams, int64_t bytes, device::Stream& stream) {
  const int to = Neighbour(1);
  if (rank_.transport->SharesMemoryWith(to)) {
    Offer offer{};
    RETURN_IF_ERROR(Hear(to, offer));
    Check(cudaStreamWaitEvent(StreamOf(stream), offer.ready));
    Check(cudaMemcpyPeerAsync(offer.to, offer.gpu, streams, gpu_, static_cast<size_t>(bytes),
                              StreamOf(stream)));
    Check(cudaEventRecord(sent_, StreamOf(stream)));
    return Tell(to, sent_);
  }
  for (int64_t at = 0; at < bytes; at += kPieceBytes) {
    const int64_t piece = std::min(kPieceBytes, bytes - at);
    RETURN_IF_ERROR(stream.Copy(host_, streams + at, piece));
    RETURN_IF_ERROR(stream.Synchronize());
    const comm::Outgoing message{to, {host_, static_cast<size_t>(piece)}};
    RETURN_IF_ERROR(rank_.transport->Exchange({&message, 1}, {}));
  }
  return OkStatus();
}

}  // namespace fathom::model
