// With a GPU: memory and copies work. Without one: the reason is one clear line.
#include <gtest/gtest.h>

#include <vector>

#include "device/device.h"

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

TEST(CudaDevice, ARefusalIsADeviceError) {
  auto device = MakeCudaDevice(1 << 20);
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.status().code(), StatusCode::kDevice);
}

}  // namespace
}  // namespace fathom::device
