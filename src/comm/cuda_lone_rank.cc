#include <cuda_runtime.h>

#include <utility>

#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_staging.h"
#include "kernels/grouped_gemm/expert_plan.h"

namespace fathom::comm {
namespace {

// Small finite numbers, whatever they are read as: 1 in FP8, 4e-5 in BF16 and FP32. As a flag it is
// beyond the number of any exchange: raised.
constexpr int kMadeUpByte = 0x38;

bool AreEqual(const kernels::RankParts& parts, int size) {
  return parts.least(size) > 0 && parts.least(size) == parts.most(size);
}

// Runs the launches of a rank that writes to the others' memory, and never waits for them. Packets
// that it sends come back as theirs: the memory of another rank is this one's, so far away that
// the same packet is in that rank's place. What is awaited by flags goes to memory that nobody
// reads, and the others' flags have always been raised; so have its own until it raises them first,
// so that a first step may read what is not there yet.
class LoneRank final : public CudaCollectives {
 public:
  // `own`: its memory, and another such range for the others', of made-up values.
  LoneRank(const kernels::PeerView& own, std::shared_ptr<std::byte> own_memory,
           std::shared_ptr<std::byte> sink, int64_t max_boundary_tokens)
      : CudaCollectives(own.rank, own.size, own_memory.get() + own.layout.shared_offset),
        own_(std::move(own_memory)),
        sink_(std::move(sink)),
        max_boundary_tokens_(max_boundary_tokens),
        view_(own) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) view_.memory[r] = sink_.get();
    }
    // Nobody is waited for in vain: where to say so is never looked at.
    view_.timed_out = view_.failed;
    view_.timeout_ns = ~uint64_t{0};
  }

  bool has_others() const override { return false; }
  bool is_captured() const override { return true; }
  Status Gather(std::span<const kernels::GatheredMatrix>, device::Stream&) override {
    return OkStatus();
  }

  int64_t max_boundary_tokens() const override { return max_boundary_tokens_; }
  kernels::OutputExchange GatherInBoundary(const kernels::RankParts& columns,
                                           kernels::OutputExchange::Sent sent) override {
    if (!AreEqual(columns, size())) return {};
    const bool is_of_all = sent == kernels::OutputExchange::Sent::kSums;  // a rank's packets
    const int64_t packets = kernels::kMaxPackets + (is_of_all ? 0 : columns.count(0) / 4);
    return {.exchange = Echoed(packets * kernels::kPacketBytes), .columns = columns, .sent = sent};
  }

  kernels::PeerExchange GatherInExperts(int64_t num_tokens, const kernels::RankParts& blocks,
                                        const kernels::RankParts& outputs) override {
    if (!AreEqual(blocks, size()) || !AreEqual(outputs, size())) return {};
    if (num_tokens > 1) return {view_, num_exchanges_++};
    return Echoed(blocks.count(0) * kernels::kPacketsOfBlock * kernels::kPacketBytes);
  }

  void EndStep(device::Stream& stream) override {
    kernels::Launch(kernels::CudaEndExchangesParams{view_, std::exchange(num_exchanges_, 0u)},
                    stream);
  }

  Status Check() override { return OkStatus(); }

 private:
  // From a rank's packet to the next one's.
  kernels::PeerExchange Echoed(int64_t bytes_apart) {
    kernels::PeerExchange exchange{view_, num_exchanges_++};
    for (int r = 0; r < size(); ++r) {
      exchange.peers.memory[r] = own_.get() + (r - rank()) * bytes_apart;
    }
    return exchange;
  }

  const std::shared_ptr<std::byte> own_, sink_;
  const int64_t max_boundary_tokens_;
  kernels::PeerView view_;
  uint32_t num_exchanges_ = 0;  // of the step that is being enqueued
};

}  // namespace

Result<std::shared_ptr<CudaCollectives>> MakeLoneRank(int rank, int size, int gpu,
                                                      const CudaGroupOptions& options) {
  RETURN_IF_ERROR(CheckGroupSize(size));
  if (cudaSetDevice(gpu) != cudaSuccess) return DeviceError("cudaSetDevice failed");
  const kernels::PeerLayout layout = kernels::MakePeerLayout(size, options.shared_bytes);
  const int64_t bytes = PeerMemoryBytes(layout);
  auto own = AllocateOnGpu(bytes), sink = AllocateOnGpu(layout.bytes);
  if (own == nullptr || sink == nullptr) return NoRoomOnGpu(gpu, bytes + layout.bytes);
  const kernels::PeerView view = OwnView(rank, size, layout, own.get());
  const auto fill = [](std::byte* from, int value, int64_t count) {
    return cudaMemset(from, value, static_cast<size_t>(count)) == cudaSuccess;
  };
  if (!fill(own.get(), kMadeUpByte, layout.bytes) ||
      !fill(own.get() + layout.bytes, 0, bytes - layout.bytes) || !StartExchanges(view) ||
      !fill(sink.get(), kMadeUpByte, layout.bytes) || cudaDeviceSynchronize() != cudaSuccess) {
    return DeviceError("cudaMemset failed");
  }
  return std::shared_ptr<CudaCollectives>(std::make_shared<LoneRank>(
      view, std::move(own), std::move(sink), kernels::MaxExchangeTokens(options.hidden)));
}

}  // namespace fathom::comm
