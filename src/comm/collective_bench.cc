// How long gathers between GPUs take, each as one of many in a graph: as packets, as plain values,
// and NCCL's. What Flash gathers: wo_a's output and the experts' intermediates in FP8, a
// sub-layer's output in BF16, and logits.
//   collective_bench [GPUS]
// `KB` is what all ranks have together; `GB/s` what each sends to each other one in the best time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <vector>

#include "comm/cuda_testing.h"

namespace fathom::comm {
namespace {

constexpr int64_t kHidden = 4096, kGrouped = 8192, kIntermediate = 2048, kVocabulary = 129'280;
constexpr int64_t kMaxTokens = 8192, kPairs = 7;
constexpr int64_t kLogitsBytes = 256 * kVocabulary * 4, kSharedBytes = int64_t{384} << 20;

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
  std::unique_ptr<TestRanks> own;
  std::unique_ptr<TestRanks> nccl;  // null: there is none

  static kernels::RankParts Parts(const TestRank& rank, int64_t total, int64_t unit) {
    kernels::RankParts parts;
    const int64_t size = rank.collectives->size();
    for (int64_t r = 0; r < size; ++r) parts.begin[r + 1] = total / unit * (r + 1) / size * unit;
    return parts;
  }

  // Rows of FP8 tiles with `columns` columns; with `plain` as plain values.
  static Status GatherTiles(const TestRank& rank, int64_t rows, int64_t columns, bool plain) {
    std::byte* const shared = rank.collectives->shared_memory();
    const int64_t groups = (rows + 7) / 8;
    const kernels::CudaGatherTilesParams params{
        .exchange = {},
        .tiles = {reinterpret_cast<uint8_t*>(shared),
                  reinterpret_cast<float*>(shared + groups * 8 * columns), groups},
        .blocks = Parts(rank, columns / 128, 1),
        .num_tokens = rows,
        .num_rows = rows};
    return plain ? rank.collectives->CudaCollectives::GatherTiles(params, *rank.stream)
                 : rank.collectives->GatherTiles(params, *rank.stream);
  }
  static Status GatherOutput(const TestRank& rank, int64_t tokens, bool plain) {
    auto* const y = reinterpret_cast<__nv_bfloat16*>(rank.collectives->shared_memory());
    const kernels::CudaGatherOutputParams params{.exchange = {},
                                                 .output = {.y = y},
                                                 .columns = Parts(rank, kHidden, 128),
                                                 .num_tokens = tokens,
                                                 .y = y};
    return plain ? rank.collectives->CudaCollectives::GatherOutput(params, *rank.stream)
                 : rank.collectives->GatherOutput(params, *rank.stream);
  }
  static Status GatherLogits(const TestRank& rank, int64_t rows, bool plain) {
    const kernels::CudaGatherColumnsParams params{
        .exchange = {},
        .values = reinterpret_cast<float*>(rank.collectives->shared_memory()),
        .num_rows = rows,
        .columns = Parts(rank, kVocabulary, 64)};
    return plain ? rank.collectives->CudaCollectives::GatherLogits(params, *rank.stream)
                 : rank.collectives->GatherLogits(params, *rank.stream);
  }

  // gather(rank, rows, plain)
  using Gather = std::function<Status(const TestRank&, int64_t, bool)>;
  double Time(TestRanks& ranks, const Gather& gather, int64_t rows, int count, bool plain) const {
    return Measure(ranks, count, [&](TestRank& rank) {
      for (int i = 0; i < count; ++i) CHECK(gather(rank, rows, plain).ok());
      rank.collectives->EndStep(*rank.stream);
    });
  }

  void Print(const char* what, int64_t row_bytes, const Gather& gather,
             std::initializer_list<int64_t> all_rows) const {
    std::printf("%s\n%8s %10s %12s %12s %12s %8s\n", what, "rows", "KB", "as chosen us", "plain us",
                "NCCL us", "GB/s");
    for (const int64_t rows : all_rows) {
      const int count = rows * row_bytes < (1 << 20) ? 100 : 20;
      const double chosen = Time(*own, gather, rows, count, false);
      const double plain = Time(*own, gather, rows, count, true);
      const double bytes = static_cast<double>(rows * row_bytes);
      std::printf("%8lld %10.1f %12.2f %12.2f", static_cast<long long>(rows), bytes / 1024, chosen,
                  plain);
      if (nccl != nullptr) {
        std::printf(" %12.2f", Time(*nccl, gather, rows, std::min(count, 20), false));
      } else {
        std::printf(" %12s", "-");
      }
      std::printf(" %8.0f\n", bytes / own->size() / std::min(chosen, plain) / 1e3);
    }
  }

  void PrintAll() const {
    Print("wo_a's output, FP8", kGrouped,
          [](const TestRank& rank, int64_t rows, bool plain) {
            return GatherTiles(rank, rows, kGrouped, plain);
          },
          {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, kMaxTokens});
    Print("intermediates of a token's seven experts, FP8", kIntermediate * kPairs,
          [](const TestRank& rank, int64_t rows, bool plain) {
            return GatherTiles(rank, rows * kPairs, kIntermediate, plain);
          },
          {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, kMaxTokens});
    Print("a sub-layer's output, BF16", kHidden * 2, GatherOutput,
          {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, kMaxTokens});
    Print("logits, FP32", kVocabulary * 4, GatherLogits, {1, 8, 16, 64, 256});
  }
};

Status Run(int num_gpus) {
  const CudaGroupOptions options{.hidden = kHidden,
                                 .shared_bytes = kSharedBytes,
                                 .max_row_bytes = kMaxTokens * kPairs * 128 * num_gpus};
  static_assert(kLogitsBytes < kSharedBytes);
  const std::vector<int> gpus = FirstGpus(num_gpus);
  std::printf("%s\n", device::DescribeTopology(gpus, device::ProbePeerLink).c_str());
  Bench bench;
  ASSIGN_OR_RETURN(auto group, MakePeerGroup(gpus, options));
  bench.own = std::make_unique<TestRanks>(std::move(group));
  if (const auto library = LoadNccl(); library.ok()) {
    ASSIGN_OR_RETURN(auto nccl, MakeNcclGroup(*library, gpus, options));
    bench.nccl = std::make_unique<TestRanks>(std::move(nccl));
  } else {
    std::printf("%s\n", library.status().message().c_str());
  }
  bench.PrintAll();
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
