// How long sums and gathers between GPUs take, each as one of many in a graph: as packets, in two
// phases, and NCCL's.
//   collective_bench [GPUS]
// `bytes` are a rank's BF16 values, 8 KiB a token of Flash; `GB/s` is what NCCL's tests call bus
// bandwidth: bytes a rank has to send at least, over the time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <vector>

#include "comm/cuda_testing.h"

namespace fathom::comm {
namespace {

constexpr int64_t kHidden = 4096, kMaxTokens = 8192, kVocabulary = 129'280;

// Microseconds of one of the `count` things that enqueue() enqueues, the slowest rank's.
double Measure(TestRanks& ranks, int count, const std::function<void(TestRank&)>& enqueue) {
  std::vector<float> milliseconds(static_cast<size_t>(ranks.size()));
  constexpr int kReplays = 5;
  ranks.OnAll([&](TestRank& rank) {
    const cudaGraphExec_t graph = Capture(rank, [&] { enqueue(rank); });
    cudaEvent_t begin = nullptr, end = nullptr;
    CHECK_EQ(cudaEventCreate(&begin), cudaSuccess);
    CHECK_EQ(cudaEventCreate(&end), cudaSuccess);
    for (int i = -2; i < kReplays; ++i) {
      if (i == 0) CHECK_EQ(cudaEventRecord(begin, rank.cuda_stream()), cudaSuccess);
      CHECK_EQ(cudaGraphLaunch(graph, rank.cuda_stream()), cudaSuccess);
    }
    CHECK_EQ(cudaEventRecord(end, rank.cuda_stream()), cudaSuccess);
    CHECK_EQ(cudaEventSynchronize(end), cudaSuccess);
    CHECK(rank.collectives->Check().ok());
    const auto r = static_cast<size_t>(rank.collectives->rank());
    CHECK_EQ(cudaEventElapsedTime(&milliseconds[r], begin, end), cudaSuccess);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(graph);
  });
  const float slowest = *std::max_element(milliseconds.begin(), milliseconds.end());
  return slowest * 1e3 / (kReplays * count);
}

struct Bench {
  std::vector<int> gpus;
  std::unique_ptr<CudaPeers> peers;
  std::unique_ptr<TestRanks> own;
  std::unique_ptr<TestRanks> nccl;  // null: there is none
  std::vector<device::Buffer> x, y;

  __nv_bfloat16* X(const TestRank& rank) const {
    return reinterpret_cast<__nv_bfloat16*>(
        x[static_cast<size_t>(rank.collectives->rank())].data());
  }
  __nv_bfloat16* Y(const TestRank& rank) const {
    return reinterpret_cast<__nv_bfloat16*>(
        y[static_cast<size_t>(rank.collectives->rank())].data());
  }

  // Params: of the kernel that sums.
  template <typename Params>
  double MeasureKernel(int64_t tokens, int count) {
    return Measure(*own, count, [&](TestRank& rank) {
      const kernels::PeerView& view = peers->view(rank.collectives->rank());
      for (int i = 0; i < count; ++i) {
        kernels::Launch(Params{.exchange = {view, static_cast<uint32_t>(i)},
                               .combine = {.output = {.y = X(rank)},
                                           .num_tokens = tokens,
                                           .hidden = kHidden,
                                           .y = Y(rank)}},
                        *rank.stream);
      }
      kernels::Launch(kernels::CudaEndExchangesParams{view, static_cast<uint32_t>(count)},
                      *rank.stream);
    });
  }

  double MeasureNccl(int64_t tokens, int count) {
    return Measure(*nccl, count, [&](TestRank& rank) {
      for (int i = 0; i < count; ++i) {
        CHECK(rank.collectives
                  ->Sum({.output = {.y = Y(rank)},
                         .num_tokens = tokens,
                         .hidden = kHidden,
                         .y = Y(rank)},
                        *rank.stream)
                  .ok());
      }
    });
  }

  double MeasureGather(TestRanks& ranks, int64_t rows, int count) {
    kernels::GatheredColumns columns;
    const int64_t size = ranks.size();
    for (int64_t r = 0; r < size; ++r)
      columns.begin[r + 1] = kVocabulary / 64 * (r + 1) / size * 64;
    return Measure(ranks, count, [&](TestRank& rank) {
      for (int i = 0; i < count; ++i) {
        CHECK(rank.collectives
                  ->GatherColumns(reinterpret_cast<float*>(Y(rank)), rows, columns, *rank.stream)
                  .ok());
      }
      rank.collectives->EndStep(*rank.stream);
    });
  }

  void PrintSums() {
    const double share =
        2.0 * (static_cast<double>(gpus.size()) - 1) / static_cast<double>(gpus.size());
    std::printf("%10s %12s %12s %12s   best GB/s\n", "bytes", "packets us", "2 phases us",
                "NCCL us");
    for (const int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 128, 255, 256, 512, 2048, 8192}) {
      const int count = tokens <= 64 ? 200 : 20;
      std::vector<double> times;
      std::printf("%10lld", static_cast<long long>(tokens * kHidden * 2));
      const auto print = [&](std::optional<double> us) {
        if (us) times.push_back(*us);
        us ? std::printf(" %12.2f", *us) : std::printf(" %12s", "-");
      };
      using Packets = kernels::CudaPacketSumParams;
      using TwoPhases = kernels::CudaTwoPhaseSumParams;
      print(tokens <= kernels::kMaxPacketTokens
                ? std::optional(MeasureKernel<Packets>(tokens, count))
                : std::nullopt);
      print(MeasureKernel<TwoPhases>(tokens, count));
      print(nccl != nullptr ? std::optional(MeasureNccl(tokens, count)) : std::nullopt);
      const double best = *std::min_element(times.begin(), times.end());
      std::printf("   %.0f\n", share * static_cast<double>(tokens * kHidden * 2) / best / 1e3);
    }
  }

  void PrintGathers() {
    std::printf("%10s %12s %12s\n", "rows", "packets us", "NCCL us");
    for (const int64_t rows : {1, 8, 64, 256}) {
      std::printf("%10lld %12.2f", static_cast<long long>(rows), MeasureGather(*own, rows, 10));
      nccl != nullptr ? std::printf(" %12.2f\n", MeasureGather(*nccl, rows, 10))
                      : std::printf(" %12s\n", "-");
    }
  }
};

Status Run(int num_gpus) {
  const CudaGroupOptions options{
      .hidden = kHidden, .max_tokens = kMaxTokens, .max_row_values = kVocabulary};
  Bench bench;
  bench.gpus = FirstGpus(num_gpus);
  std::printf("%s\n", device::DescribeTopology(bench.gpus, device::ProbePeerLink).c_str());
  ASSIGN_OR_RETURN(bench.peers, CudaPeers::Make(bench.gpus, kHidden, kMaxTokens, options.timeout));
  ASSIGN_OR_RETURN(auto group, MakePeerGroup(bench.gpus, options));
  bench.own = std::make_unique<TestRanks>(std::move(group));
  if (const auto library = LoadNccl(); library.ok()) {
    ASSIGN_OR_RETURN(auto nccl, MakeNcclGroup(*library, bench.gpus, options));
    bench.nccl = std::make_unique<TestRanks>(std::move(nccl));
  } else {
    std::printf("%s\n", library.status().message().c_str());
  }
  const int64_t bytes = std::max(kMaxTokens * kHidden * 2, 256 * kVocabulary * 4);
  for (size_t r = 0; r < bench.gpus.size(); ++r) {
    for (auto* buffers : {&bench.x, &bench.y}) {
      ASSIGN_OR_RETURN(auto buffer, (*bench.own)[r].device->Allocate(bytes));
      buffers->push_back(std::move(buffer));
    }
  }
  bench.PrintSums();
  bench.PrintGathers();
  return OkStatus();
}

}  // namespace
}  // namespace fathom::comm

int main(int argc, char** argv) {
  const int found = fathom::device::CountGpus();
  const int asked = argc > 1 ? std::atoi(argv[1]) : found;
  if (asked < 2 || asked > found) {
    std::fprintf(stderr, "collective_bench needs 2 to %d GPUs of this machine, %d were asked for\n",
                 found, asked);
    return 2;
  }
  const fathom::Status status = fathom::comm::Run(asked);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return fathom::ExitCode(status);
}
