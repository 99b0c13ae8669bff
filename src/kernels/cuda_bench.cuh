// What the benchmarks of CUDA kernels share: a GPU, memory filled with hashes, and the time of
// launches that follow each other in a graph. Benchmarks only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/check.h"
#include "device/device.h"

namespace fathom::kernels {

inline constexpr double kBytesPerUs = 4.55e6;  // of an H200's memory

// What is made of a hash.
struct MaskedWord {
  uint32_t mask, base = 0;
  __device__ uint32_t operator()(uint32_t hash) const { return (hash & mask) + base; }
};
struct UniformValue {  // between -scale and scale
  float scale = 1;
  __device__ float operator()(uint32_t hash) const {
    return (static_cast<float>(hash >> 8) * 0x1p-23f - 1.0f) * scale;
  }
};

template <typename T, typename Make>
__global__ void FillKernel(T* out, int64_t count, uint32_t seed, Make make) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    out[i] = static_cast<T>(make(x));
  }
}

class CudaBench {
 public:
  CudaBench() : device_(std::move(device::MakeCudaDevice(0).value())) {
    stream_ = std::move(device_->MakeStream().value());
  }

  device::Stream& stream() { return *stream_; }

  // Not initialized. Memory lives until Free.
  template <typename T>
  T* Allocate(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    buffers_.push_back(std::move(device_->Allocate((bytes + 15) / 16 * 16).value()));
    return reinterpret_cast<T*>(buffers_.back().data());
  }
  template <typename T>
  T* Zeros(int64_t count) {
    T* const out = Allocate<T>(count);
    CHECK_EQ(cudaMemset(out, 0, static_cast<size_t>(count) * sizeof(T)), cudaSuccess);
    return out;
  }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    const auto count = static_cast<int64_t>(values.size());
    T* const out = Allocate<T>(count);
    CHECK(stream_->Copy(out, values.data(), count * static_cast<int64_t>(sizeof(T))).ok());
    CHECK(stream_->Synchronize().ok());
    return out;
  }
  template <typename T, typename Make>
  void Fill(T* out, int64_t count, uint32_t seed, Make make) {
    FillKernel<<<1024, 256, 0, native()>>>(out, count, seed, make);
  }
  // All but the first `keep` pieces.
  void Free(size_t keep = 0) { buffers_.resize(keep); }

  // Microseconds of one of launch(0), …, launch(count - 1), which are a graph: the median of some
  // replays, the first left out.
  double Time(int count, const std::function<void(int)>& launch) {
    CHECK(stream_->Synchronize().ok());
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_EQ(cudaStreamBeginCapture(native(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (int i = 0; i < count; ++i) launch(i);
    CHECK_EQ(cudaStreamEndCapture(native(), &graph), cudaSuccess);
    CHECK_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    cudaEvent_t events[2];
    for (auto& event : events) cudaEventCreate(&event);
    std::vector<float> times;
    for (int i = 0; i < 9; ++i) {
      cudaEventRecord(events[0], native());
      cudaGraphLaunch(exec, native());
      cudaEventRecord(events[1], native());
      CHECK_EQ(cudaEventSynchronize(events[1]), cudaSuccess);
      float ms = 0;
      cudaEventElapsedTime(&ms, events[0], events[1]);
      times.push_back(ms * 1e3f / static_cast<float>(count));
    }
    for (auto& event : events) cudaEventDestroy(event);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    std::sort(times.begin() + 1, times.end());
    return times[times.size() / 2];
  }

 private:
  cudaStream_t native() { return static_cast<cudaStream_t>(stream_->native_handle()); }

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::vector<device::Buffer> buffers_;
};

}  // namespace fathom::kernels
