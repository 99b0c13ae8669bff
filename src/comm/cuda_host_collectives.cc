#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/float_types.h"
#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_staging.h"
#include "comm/group.h"

namespace fathom::comm {
namespace {

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Between two uses of the host memory the stream has ended what the first enqueued.
class HostCollectives final : public CudaCollectives {
 public:
  HostCollectives(std::shared_ptr<Transport> transport, std::shared_ptr<std::byte> host,
                  int64_t host_bytes)
      : CudaCollectives(transport->rank(), transport->size()),
        transport_(std::move(transport)),
        group_(*transport_, AllRanks(transport_->size())),
        host_(std::move(host)),
        host_bytes_(host_bytes) {}

  bool is_captured() const override { return false; }

  Result<kernels::SublayerOutput> Sum(const kernels::CudaCombineParams& combine,
                                      device::Stream& stream) override {
    if (combine.output.y != combine.y) kernels::Launch(combine, stream);
    const int64_t count = combine.num_tokens * combine.hidden;
    CHECK_LE(count * 2, host_bytes_);
    auto* const values = reinterpret_cast<BFloat16*>(host_.get());
    RETURN_IF_ERROR(stream.Copy(values, combine.y, count * 2));
    RETURN_IF_ERROR(stream.Synchronize());
    RETURN_IF_ERROR(group_.AllReduce(std::span(values, static_cast<size_t>(count))));
    RETURN_IF_ERROR(stream.Copy(combine.y, values, count * 2));
    return kernels::SublayerOutput{.y = combine.y};
  }

  // Every rank's columns one after the other in host memory.
  Status GatherColumns(float* values, int64_t num_rows, const kernels::GatheredColumns& columns,
                       device::Stream& stream) override {
    const int64_t stride = columns.begin[size()], rows_at_once = host_bytes_ / 4 / stride;
    CHECK_GT(rows_at_once, 0);
    for (int64_t row = 0; row < num_rows; row += rows_at_once) {
      const int64_t rows = std::min(rows_at_once, num_rows - row);
      float* const to = values + row * stride;
      const auto part = [&](int r) {
        return reinterpret_cast<float*>(host_.get()) + columns.begin[r] * rows;
      };
      std::vector<Group::Range> ranges;
      for (int r = 0; r < size(); ++r) {
        ranges.push_back({columns.begin[r] * rows * 4, columns.begin[r + 1] * rows * 4});
      }
      RETURN_IF_ERROR(stream.Synchronize());
      CopyColumns(part(rank()), columns.count(rank()), to + columns.begin[rank()], stride, rows,
                  columns.count(rank()), stream);
      RETURN_IF_ERROR(stream.Synchronize());
      RETURN_IF_ERROR(
          group_.AllGather(std::span(host_.get(), static_cast<size_t>(rows * stride * 4)), ranges));
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        CopyColumns(to + columns.begin[r], stride, part(r), columns.count(r), rows,
                    columns.count(r), stream);
      }
    }
    return OkStatus();
  }

  Status Check() override { return OkStatus(); }  // an exchange says so itself

 private:
  const std::shared_ptr<Transport> transport_;
  Group group_;
  const std::shared_ptr<std::byte> host_;
  const int64_t host_bytes_;
};

}  // namespace

Result<std::shared_ptr<CudaCollectives>> MakeHostCollectives(std::shared_ptr<Transport> transport,
                                                             const CudaGroupOptions& options) {
  const int64_t bytes = std::max(options.max_tokens * options.hidden * int64_t{2},
                                 kStagedRows * options.max_row_values * 4);
  void* host = nullptr;
  if (cudaHostAlloc(&host, static_cast<size_t>(bytes), cudaHostAllocPortable) != cudaSuccess) {
    (void)cudaGetLastError();
    return OutOfMemory(
        fmt::format("cannot pin {} bytes of host memory for what ranks exchange", bytes));
  }
  const auto free_host = [](std::byte* memory) { cudaFreeHost(memory); };
  return std::shared_ptr<CudaCollectives>(std::make_shared<HostCollectives>(
      std::move(transport), std::shared_ptr<std::byte>(static_cast<std::byte*>(host), free_host),
      bytes));
}

}  // namespace fathom::comm
