#include "device/cpu/cpu_device.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>
#include <fstream>
#include <string>

namespace fathom::device {
namespace {

// A CPU stream's work has ended when it was given.
class CpuEvent final : public Event {
 public:
  Status Record(Stream&) override { return OkStatus(); }
  Status Wait() override { return OkStatus(); }
};

class CpuStream final : public Stream {
 public:
  explicit CpuStream(ThreadPool& pool) : pool_(pool) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  ThreadPool& thread_pool() override { return pool_; }
  void* native_handle() const override { return nullptr; }
  Status Copy(void* destination, const void* source, int64_t bytes) override {
    if (bytes > 0) std::memmove(destination, source, static_cast<size_t>(bytes));
    return OkStatus();
  }
  Status Synchronize() override { return OkStatus(); }

 private:
  ThreadPool& pool_;
};

// A field of /proc/meminfo in bytes; 0 where there is none.
int64_t MemInfoBytes(const std::string& field) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  int64_t kilobytes = 0;
  while (file >> name >> kilobytes) {
    std::getline(file, unit);
    if (name == field + ":") return kilobytes * 1024;
  }
  return 0;
}

// "model name" of the first processor.
std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

}  // namespace

std::string CpuDevice::name() const {
  return fmt::format("{} ({} threads)", ProcessorName(), pool_.num_threads());
}

Result<Buffer> CpuDevice::Allocate(int64_t bytes) {
  CHECK_GE(bytes, 0);
  if (bytes == 0) return Buffer();
  // Anonymous pages are zero and become resident when touched.
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return OutOfMemory(fmt::format("cannot allocate {} bytes of host memory: {} bytes are free",
                                   bytes, free_memory_bytes()));
  }
  if (bytes >= int64_t{4} << 20) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return Buffer(static_cast<std::byte*>(data), bytes, this);
}

void CpuDevice::Free(std::byte* data, int64_t bytes) {
  CHECK_EQ(munmap(data, static_cast<size_t>(bytes)), 0);
}

Result<std::unique_ptr<Stream>> CpuDevice::MakeStream() {
  return std::unique_ptr<Stream>(std::make_unique<CpuStream>(pool_));
}

Result<std::unique_ptr<Event>> CpuDevice::MakeEvent() {
  return std::unique_ptr<Event>(std::make_unique<CpuEvent>());
}

int64_t CpuDevice::total_memory_bytes() const { return MemInfoBytes("MemTotal"); }
int64_t CpuDevice::free_memory_bytes() const { return MemInfoBytes("MemAvailable"); }

std::unique_ptr<Device> MakeCpuDevice(int num_threads) {
  return std::make_unique<CpuDevice>(num_threads);
}

}  // namespace fathom::device
