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
constexpr int64_t kCounterBytes = 1024;
constexpr uint64_t kFirstExchange = 1;

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
  // Of the current GPU, two such ranges of made-up values.
  LoneRank(int rank, int size, const kernels::PeerLayout& layout, std::shared_ptr<std::byte> own,
           std::shared_ptr<std::byte> sink, int64_t max_boundary_tokens)
      : CudaCollectives(rank, size, own.get() + layout.shared_offset),
        own_(std::move(own)),
        sink_(std::move(sink)),
        max_boundary_tokens_(max_boundary_tokens) {
    auto* const counters = reinterpret_cast<uint64_t*>(own_.get() + layout.bytes);
    view_ = {.rank = rank,
             .size = size,
             .layout = layout,
             .exchanges = counters,
             .failed = reinterpret_cast<uint32_t*>(counters + 16),
             .timed_out = reinterpret_cast<uint32_t*>(counters + 32),
             .timeout_ns = ~uint64_t{0}};
    for (auto& memory : view_.memory) memory = sink_.get();
    view_.memory[rank] = own_.get();
  }

  bool has_others() const override { return false; }
  bool is_captured() const override { return true; }
  Status Gather(std::span<const kernels::GatheredMatrix>, device::Stream&) override {
    return OkStatus();
  }

  int64_t max_boundary_tokens() const override { return max_boundary_tokens_; }
  kernels::OutputExchange GatherInBoundary(int64_t num_tokens, const kernels::RankParts& columns,
                                           kernels::OutputExchange::Sent sent) override {
    if (num_tokens > max_boundary_tokens_ || !AreEqual(columns, size())) return {};
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
  std::shared_ptr<std::byte> ranges[2];
  for (auto& range : ranges) {
    range = AllocateOnGpu(layout.bytes + kCounterBytes);
    if (range == nullptr) return NoRoomOnGpu(gpu, layout.bytes + kCounterBytes);
    std::byte* const counters = range.get() + layout.bytes;
    if (cudaMemset(range.get(), kMadeUpByte, static_cast<size_t>(layout.bytes)) != cudaSuccess ||
        cudaMemset(counters, 0, kCounterBytes) != cudaSuccess ||
        cudaMemcpy(counters, &kFirstExchange, sizeof(kFirstExchange), cudaMemcpyDefault) !=
            cudaSuccess) {
      return DeviceError("cudaMemset failed");
    }
  }
  if (cudaDeviceSynchronize() != cudaSuccess) return DeviceError("cudaMemset failed");
  return std::shared_ptr<CudaCollectives>(
      std::make_shared<LoneRank>(rank, size, layout, std::move(ranges[0]), std::move(ranges[1]),
                                 kernels::MaxExchangeTokens(options.hidden)));
}

}  // namespace fathom::comm
