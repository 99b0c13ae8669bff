#include "runtime/kv_cache.h"

#include <gtest/gtest.h>

namespace fathom::runtime {
namespace {

constexpr int64_t kGib = int64_t{1} << 30;

// 100 GiB, of which 60 are free.
class HalfUsedDevice final : public device::Device {
 public:
  explicit HalfUsedDevice(device::DeviceKind kind) : kind_(kind) {}

  device::DeviceKind kind() const override { return kind_; }
  std::string name() const override { return "half used"; }
  Result<device::Buffer> Allocate(int64_t) override { return InternalError("not here"); }
  Result<device::Buffer> AllocateHost(int64_t) override { return InternalError("not here"); }
  Result<std::unique_ptr<device::Stream>> MakeStream() override {
    return InternalError("not here");
  }
  Result<std::unique_ptr<device::Event>> MakeEvent() override { return InternalError("not here"); }
  int64_t total_memory_bytes() const override { return 100 * kGib; }
  int64_t free_memory_bytes() const override { return 60 * kGib; }

 private:
  const device::DeviceKind kind_;
};

int64_t AutomaticGib(device::DeviceKind kind, double share, int64_t useful = 1000) {
  return AutomaticKvCacheBytes(useful * kGib, HalfUsedDevice(kind), share) / kGib;
}

TEST(AutomaticKvCacheBytes, IsAShareOfAGpusMemoryLessWhatIsInUse) {
  EXPECT_EQ(AutomaticGib(device::DeviceKind::kCuda, 0.75), 35);
  EXPECT_EQ(AutomaticGib(device::DeviceKind::kCuda, 0.25), 0);
  EXPECT_EQ(AutomaticGib(device::DeviceKind::kCuda, 0.75, 7), 7);
}

TEST(AutomaticKvCacheBytes, LeavesAGpuWhatIsAllocatedLater) {
  EXPECT_EQ(AutomaticGib(device::DeviceKind::kCuda, 1), 59);
  EXPECT_EQ(AutomaticGib(device::DeviceKind::kCuda, 0.999), 59);
}

TEST(AutomaticKvCacheBytes, IsAShareOfWhatIsFreeOnACpu) {
  EXPECT_EQ(AutomaticGib(device::DeviceKind::kCpu, 0.5), 30);
  EXPECT_EQ(AutomaticGib(device::DeviceKind::kCpu, 0.5, 7), 7);
}

}  // namespace
}  // namespace fathom::runtime
