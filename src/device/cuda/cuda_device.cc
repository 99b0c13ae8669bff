// The CUDA runtime as a device (cudart is linked statically; the driver is found at run time).
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "device/cuda/fault_keeper.h"
#include "device/device.h"

namespace fathom::device {
namespace {

Status CudaError(const char* what, cudaError_t error) {
  (void)cudaGetLastError();  // a non-sticky error must not be reported again by the next call
  return DeviceError(
      fmt::format("{} failed: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

#define RETURN_IF_CUDA_ERROR(what, expr)                            \
  do {                                                              \
    if (const cudaError_t error_ = (expr); error_ != cudaSuccess) { \
      return CudaError(what, error_);                               \
    }                                                               \
  } while (false)

// What a wait said, or the fault that it was too early for.
cudaError_t OrFault(cudaError_t error, cudaStream_t stream) {
  constexpr int kLooks = 200;
  constexpr std::chrono::milliseconds kPause{1};
  for (int i = 0; error == cudaSuccess && i < kLooks && HasFaultDump(); ++i) {
    std::this_thread::sleep_for(kPause);
    error = cudaStreamQuery(stream);
    if (error == cudaErrorNotReady) error = cudaSuccess;
  }
  return error;  // none: the fault is another GPU's
}

class CudaStream final : public Stream {
 public:
  explicit CudaStream(cudaStream_t stream) : stream_(stream) {}
  ~CudaStream() override { cudaStreamDestroy(stream_); }

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  ThreadPool& thread_pool() override {
    CheckFailed(__FILE__, __LINE__, "a CUDA stream has no pool");
  }
  void* native_handle() const override { return stream_; }
  Status Copy(void* destination, const void* source, int64_t bytes) override {
    RETURN_IF_CUDA_ERROR("cudaMemcpyAsync",
                         cudaMemcpyAsync(destination, source, static_cast<size_t>(bytes),
                                         cudaMemcpyDefault, stream_));
    return OkStatus();
  }
  Status Synchronize() override {
    RETURN_IF_CUDA_ERROR("cudaStreamSynchronize", OrFault(cudaStreamSynchronize(stream_), stream_));
    return OkStatus();
  }

 private:
  cudaStream_t stream_;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  ~CudaEvent() override { cudaEventDestroy(event_); }

  Status Record(Stream& stream) override {
    stream_ = static_cast<cudaStream_t>(stream.native_handle());
    RETURN_IF_CUDA_ERROR("cudaEventRecord", cudaEventRecord(event_, stream_));
    return OkStatus();
  }
  Status Wait() override {
    RETURN_IF_CUDA_ERROR("cudaEventSynchronize", OrFault(cudaEventSynchronize(event_), stream_));
    return OkStatus();
  }

 private:
  cudaEvent_t event_;
  cudaStream_t stream_ = nullptr;  // that it was recorded in last
};

class CudaDevice final : public Device, private Buffer::Deleter {
 public:
  CudaDevice(int index, std::string name) : index_(index), name_(std::move(name)) {}

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string name() const override { return name_; }

  Result<Buffer> Allocate(int64_t bytes) override {
    CHECK_GE(bytes, 0);
    if (bytes == 0) return Buffer();
    RETURN_IF_CUDA_ERROR("cudaSetDevice", cudaSetDevice(index_));
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes));
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return OutOfMemory(fmt::format("cannot allocate {} bytes on GPU {} ({}): {} bytes are free",
                                     bytes, index_, name_, free_memory_bytes()));
    }
    RETURN_IF_CUDA_ERROR("cudaMalloc", error);
    Buffer buffer(static_cast<std::byte*>(data), bytes, this);
    RETURN_IF_CUDA_ERROR("cudaMemset", cudaMemset(data, 0, static_cast<size_t>(bytes)));
    // The zeros go through another stream than what will be written: no stream of ours waits for
    // it.
    RETURN_IF_CUDA_ERROR("cudaMemset", cudaStreamSynchronize(cudaStreamLegacy));
    return buffer;
  }

  Result<Buffer> AllocateHost(int64_t bytes) override {
    CHECK_GE(bytes, 0);
    if (bytes == 0) return Buffer();
    RETURN_IF_CUDA_ERROR("cudaSetDevice", cudaSetDevice(index_));
    void* data = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return OutOfMemory(
          fmt::format("cannot pin {} bytes of host memory: {}", bytes, cudaGetErrorString(error)));
    }
    std::memset(data, 0, static_cast<size_t>(bytes));
    return Buffer(static_cast<std::byte*>(data), bytes, &pinned_);
  }

  Result<std::unique_ptr<Stream>> MakeStream() override {
    RETURN_IF_CUDA_ERROR("cudaSetDevice", cudaSetDevice(index_));
    cudaStream_t stream = nullptr;
    RETURN_IF_CUDA_ERROR("cudaStreamCreate",
                         cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return std::unique_ptr<Stream>(std::make_unique<CudaStream>(stream));
  }

  Result<std::unique_ptr<Event>> MakeEvent() override {
    RETURN_IF_CUDA_ERROR("cudaSetDevice", cudaSetDevice(index_));
    cudaEvent_t event = nullptr;
    RETURN_IF_CUDA_ERROR("cudaEventCreate",
                         cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return std::unique_ptr<Event>(std::make_unique<CudaEvent>(event));
  }

  int64_t total_memory_bytes() const override { return MemoryInfo().second; }
  int64_t free_memory_bytes() const override { return MemoryInfo().first; }

 private:
  void Free(std::byte* data, int64_t) override {
    cudaSetDevice(index_);
    cudaFree(data);
  }

  std::pair<int64_t, int64_t> MemoryInfo() const {
    size_t free = 0, total = 0;
    if (cudaSetDevice(index_) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess)
      return {0, 0};
    return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
  }

  class PinnedDeleter final : public Buffer::Deleter {
    void Free(std::byte* data, int64_t) override { cudaFreeHost(data); }
  };

  int index_;
  std::string name_;
  PinnedDeleter pinned_;
};

std::string VersionText(int version) {
  return fmt::format("CUDA {}.{}", version / 1000, version % 1000 / 10);
}

Status NoGpu(int driver_version, cudaError_t error) {
  std::string found = "no NVIDIA driver was found";
  if (error == cudaErrorNoDevice) {
    found = "the NVIDIA driver shows no GPU to this process (see nvidia-smi, CUDA_VISIBLE_DEVICES)";
  } else if (driver_version != 0) {
    found = "the NVIDIA driver is one for " + VersionText(driver_version);
  }
  return DeviceError(
      fmt::format("no usable GPU: {}; needed is a Hopper GPU and a driver for {} or newer, or "
                  "--device cpu",
                  found, VersionText(CUDART_VERSION)));
}

}  // namespace

Result<std::unique_ptr<Device>> MakeCudaDevice(int index) {
  int count = 0, driver = 0;
  RETURN_IF_CUDA_ERROR("cudaDriverGetVersion", cudaDriverGetVersion(&driver));
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    return NoGpu(driver, error);
  }
  RETURN_IF_CUDA_ERROR("cudaGetDeviceCount", error);
  if (index < 0 || index >= count) {
    return DeviceError(
        fmt::format("GPU {} does not exist: {} found, numbered from 0", index, count));
  }
  cudaDeviceProp properties{};
  RETURN_IF_CUDA_ERROR("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, index));
  if (properties.major != 9 || properties.minor != 0) {
    return DeviceError(
        fmt::format("GPU {} ({}) is compute capability {}.{}: this binary has code for 9.0 only",
                    index, properties.name, properties.major, properties.minor));
  }
  RETURN_IF_CUDA_ERROR("cudaSetDevice", cudaSetDevice(index));
  return std::unique_ptr<Device>(std::make_unique<CudaDevice>(index, properties.name));
}

}  // namespace fathom::device
