// Ranks that are GPUs of this machine, each with a thread, for tests and benchmarks: kernels of a
// group run on all of them at once. Tests only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/cuda_collective_kinds.h"
#include "device/cuda/multi_gpu.h"
#include "device/device.h"

namespace fathom::comm {

// Before anything of CUDA in a program that includes this.
inline const bool kKernelsAreEager = (device::LoadKernelsEagerly(), true);

inline std::vector<int> FirstGpus(int count) {
  std::vector<int> gpus;
  for (int i = 0; i < count; ++i) gpus.push_back(i);
  return gpus;
}

// The same with fewer GPUs than ranks, for those that need not be on different ones.
inline std::vector<int> GpusInTurn(int num_ranks) {
  std::vector<int> gpus = FirstGpus(num_ranks);
  for (int& gpu : gpus) gpu %= device::CountGpus();
  return gpus;
}

struct TestRank {
  int gpu = 0;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<device::Stream> stream;
  std::shared_ptr<CudaCollectives> collectives;

  cudaStream_t cuda_stream() const { return static_cast<cudaStream_t>(stream->native_handle()); }

  template <typename U>
  device::Buffer Upload(const std::vector<U>& values) const {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(U));
    device::Buffer buffer = std::move(device->Allocate(bytes).value());
    CHECK(stream->Copy(buffer.data(), values.data(), bytes).ok());
    CHECK(stream->Synchronize().ok());
    return buffer;
  }
  device::Buffer Poisoned(int64_t bytes) const {
    return Upload(std::vector<uint8_t>(static_cast<size_t>(bytes), 0xff));
  }
  template <typename U>
  std::vector<U> Download(const void* from, size_t count) const {
    std::vector<U> values(count);
    CHECK(stream->Copy(values.data(), from, static_cast<int64_t>(count * sizeof(U))).ok());
    CHECK(stream->Synchronize().ok());
    return values;
  }
};

class TestRanks {
 public:
  explicit TestRanks(const CudaGroup& group)
      : TestRanks(group, FirstGpus(static_cast<int>(group.size()))) {}
  TestRanks(const CudaGroup& group, const std::vector<int>& gpus) {
    for (size_t i = 0; i < group.size(); ++i) {
      TestRank rank;
      rank.gpu = gpus[i];
      rank.device = std::move(device::MakeCudaDevice(rank.gpu).value());
      rank.stream = std::move(rank.device->MakeStream().value());
      rank.collectives = group[i];
      ranks_.push_back(std::move(rank));
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  TestRank& operator[](size_t i) { return ranks_[i]; }

  // run(rank) on a thread of each rank's own, its GPU current.
  void OnAll(const std::function<void(TestRank&)>& run) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([&run, this, i] {
        CHECK_EQ(cudaSetDevice(ranks_[i].gpu), cudaSuccess);
        run(ranks_[i]);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<TestRank> ranks_;
};

// What run() enqueues, as a graph.
inline cudaGraphExec_t Capture(const TestRank& rank, const std::function<void()>& run) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CHECK_EQ(cudaStreamBeginCapture(rank.cuda_stream(), cudaStreamCaptureModeThreadLocal),
           cudaSuccess);
  run();
  CHECK_EQ(cudaStreamEndCapture(rank.cuda_stream(), &graph), cudaSuccess);
  CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return executable;
}

}  // namespace fathom::comm
