// Marks are CUDA events, made when first needed and used again.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "device/cpu/cpu_timeline.h"
#include "device/timeline.h"

namespace fathom::device {
namespace {

class CudaTimeline final : public Timeline {
 public:
  ~CudaTimeline() override {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  void Mark(Stream& stream) override {
    if (num_marks_ == events_.size()) {
      cudaEvent_t event = nullptr;
      Keep(cudaEventCreate(&event));
      events_.push_back(event);
    }
    Keep(cudaEventRecord(events_[num_marks_++], static_cast<cudaStream_t>(stream.native_handle())));
  }

  void Delay(Stream& stream, int microseconds) override {
    const auto sleep = [](void* us) {
      std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<intptr_t>(us)));
    };
    Keep(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream.native_handle()), sleep,
                            reinterpret_cast<void*>(intptr_t{microseconds})));
  }

  Result<std::vector<double>> Take() override {
    std::vector<double> times;
    if (num_marks_ > 0) Keep(cudaEventSynchronize(events_[num_marks_ - 1]));
    for (size_t i = 1; i < num_marks_; ++i) {
      float milliseconds = 0;
      Keep(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]));
      times.push_back(milliseconds * 1e3);
    }
    num_marks_ = 0;
    if (error_ == cudaSuccess) return times;
    return DeviceError(fmt::format("the GPU's work failed: {} ({})", cudaGetErrorString(error_),
                                   cudaGetErrorName(error_)));
  }

 private:
  void Keep(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  std::vector<cudaEvent_t> events_;
  size_t num_marks_ = 0;
  cudaError_t error_ = cudaSuccess;  // the first
};

}  // namespace

std::unique_ptr<Timeline> MakeTimeline(DeviceKind kind) {
  if (kind == DeviceKind::kCpu) return MakeCpuTimeline();
  return std::make_unique<CudaTimeline>();
}

}  // namespace fathom::device
