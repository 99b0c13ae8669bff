// The CPU as a device: memory from the system, work inline on one thread pool that all its streams
// share.
#pragma once

#include <memory>

#include "device/device.h"

namespace fathom::device {

class CpuDevice final : public Device, private Buffer::Deleter {
 public:
  explicit CpuDevice(int num_threads) : pool_(num_threads) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string name() const override;
  Result<Buffer> Allocate(int64_t bytes) override;
  Result<Buffer> AllocateHost(int64_t bytes) override { return Allocate(bytes); }
  Result<std::unique_ptr<Stream>> MakeStream() override;
  Result<std::unique_ptr<Event>> MakeEvent() override;
  int64_t total_memory_bytes() const override;
  int64_t free_memory_bytes() const override;

 private:
  void Free(std::byte* data, int64_t bytes) override;

  ThreadPool pool_;
};

}  // namespace fathom::device
