// With a GPU: memory and copies work. Without one: the reason is one clear line.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "device/device.h"
#include "device/timeline.h"

namespace fathom::device {
namespace {

TEST(CudaDevice, CopiesThereAndBackOrSaysWhyItCannot) {
  auto device = MakeCudaDevice(0);
  if (!device.ok()) {
    EXPECT_EQ(device.status().code(), StatusCode::kDevice);
    EXPECT_EQ(device.status().message().find('\n'), std::string::npos);
    GTEST_SKIP() << device.status().message();
  }
  auto buffer = (*device)->Allocate(1024);
  auto stream = (*device)->MakeStream();
  ASSERT_TRUE(buffer.ok());
  ASSERT_TRUE(stream.ok());
  std::vector<char> host(1024, 'x');
  ASSERT_TRUE((*stream)->Copy(host.data(), buffer->data(), 1024).ok());
  ASSERT_TRUE((*stream)->Synchronize().ok());
  EXPECT_EQ(host, std::vector<char>(1024, 0));
}

TEST(CudaDevice, ZerosDoNotOvertakeTheFirstCopy) {
  auto device = MakeCudaDevice(0);
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  auto stream = (*device)->MakeStream();
  auto pinned = (*device)->AllocateHost(1024);
  ASSERT_TRUE(stream.ok() && pinned.ok());
  std::fill_n(pinned->data(), 1024, std::byte{'x'});
  constexpr int64_t kBytes = int64_t{4} << 30;  // a millisecond of zeros
  auto buffer = (*device)->Allocate(kBytes);
  ASSERT_TRUE(buffer.ok()) << buffer.status().message();
  std::byte* const end = buffer->data() + kBytes - 1024;
  ASSERT_TRUE((*stream)->Copy(end, pinned->data(), 1024).ok());
  ASSERT_TRUE((*stream)->Synchronize().ok());
  std::vector<char> later(1024);
  ASSERT_TRUE((*device)->Allocate(1024).ok());  // the zeros before it have been written
  ASSERT_TRUE((*stream)->Copy(later.data(), end, 1024).ok());
  ASSERT_TRUE((*stream)->Synchronize().ok());
  EXPECT_EQ(later, std::vector<char>(1024, 'x'));
}

TEST(CudaDevice, ATimelineSeesWhatTheStreamDoes) {
  auto device = MakeCudaDevice(0);
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  auto stream = (*device)->MakeStream();
  ASSERT_TRUE(stream.ok());
  const auto timeline = MakeTimeline(DeviceKind::kCuda);
  for (int round = 0; round < 2; ++round) {  // events are used again
    timeline->Mark(**stream);
    timeline->Delay(**stream, 2000);
    timeline->Mark(**stream);
    timeline->Mark(**stream);
    const auto times = timeline->Take();
    ASSERT_TRUE(times.ok()) << times.status().message();
    ASSERT_EQ(times->size(), 2u);
    EXPECT_GE((*times)[0], 2000);
    EXPECT_LT((*times)[1], 1000);
  }
}

TEST(CudaDevice, ARefusalIsADeviceError) {
  auto device = MakeCudaDevice(1 << 20);
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.status().code(), StatusCode::kDevice);
}

}  // namespace
}  // namespace fathom::device
