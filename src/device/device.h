// Device, Stream, Buffer: where memory is and in which order work runs on it. cpu/ and cuda/
// implement them. A Stream belongs to one thread at a time; a CPU stream runs work inline on its
// thread pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/thread_pool.h"

namespace fathom::device {

enum class DeviceKind { kCpu, kCuda };

// Owns device memory; movable. Freed when destroyed, after all work on it has ended (the owner's
// duty).
class Buffer {
 public:
  class Deleter {
   public:
    virtual ~Deleter() = default;
    virtual void Free(std::byte* data, int64_t bytes) = 0;
  };

  Buffer() = default;
  Buffer(std::byte* data, int64_t bytes, Deleter* deleter)
      : data_(data), bytes_(bytes), deleter_(deleter) {}
  ~Buffer() { Reset(); }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Reset();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    deleter_ = other.deleter_;
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void Reset() {
    if (data_ != nullptr) deleter_->Free(data_, bytes_);
    data_ = nullptr;
  }
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  Deleter* deleter_ = nullptr;  // the device; outlives its buffers
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual DeviceKind kind() const = 0;
  // CPU streams only.
  virtual ThreadPool& thread_pool() = 0;
  // The native handle (cudaStream_t); null on the CPU.
  virtual void* native_handle() const = 0;
  // Copies in stream order; for a GPU, host memory should be pinned.
  virtual Status Copy(void* destination, const void* source, int64_t bytes) = 0;
  virtual Status Synchronize() = 0;
};

// A point in a stream's work that the host can wait for. One thread at a time.
class Event {
 public:
  virtual ~Event() = default;
  // Behind all work that the stream has so far.
  virtual Status Record(Stream& stream) = 0;
  // Until that work has ended.
  virtual Status Wait() = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  virtual std::string name() const = 0;
  // Memory that is zero. kOutOfMemory says how much was asked for and how much is free.
  virtual Result<Buffer> Allocate(int64_t bytes) = 0;
  // Host memory that is zero and that streams copy from and to at full speed (pinned for a GPU).
  virtual Result<Buffer> AllocateHost(int64_t bytes) = 0;
  virtual Result<std::unique_ptr<Stream>> MakeStream() = 0;
  virtual Result<std::unique_ptr<Event>> MakeEvent() = 0;
  virtual int64_t total_memory_bytes() const = 0;
  virtual int64_t free_memory_bytes() const = 0;
};

std::unique_ptr<Device> MakeCpuDevice(int num_threads);
// kDevice says what was found and what is needed (no GPU, old driver, architecture without code, or
// a binary built without CUDA).
Result<std::unique_ptr<Device>> MakeCudaDevice(int index);

}  // namespace fathom::device
