#include "device/cpu/cpu_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "device/timeline.h"

namespace fathom::device {
namespace {

TEST(CpuDevice, MemoryIsZeroAndAligned) {
  auto device = MakeCpuDevice(1);
  auto buffer = device->Allocate(10000);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->bytes(), 10000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
  EXPECT_TRUE(std::all_of(buffer->data(), buffer->data() + 10000,
                          [](std::byte b) { return b == std::byte{0}; }));
}

TEST(Timeline, TellsTheTimeFromMarkToMarkOnce) {
  auto device = MakeCpuDevice(1);
  auto stream = device->MakeStream();
  ASSERT_TRUE(stream.ok());
  const auto timeline = MakeTimeline(DeviceKind::kCpu);
  timeline->Mark(**stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  timeline->Mark(**stream);
  timeline->Mark(**stream);
  const auto times = timeline->Take();
  ASSERT_TRUE(times.ok());
  ASSERT_EQ(times->size(), 2u);
  EXPECT_GE((*times)[0], 3000);
  EXPECT_GE((*times)[1], 0);
  EXPECT_TRUE(timeline->Take()->empty());
}

TEST(CpuDevice, AnEmptyBufferIsNoMemory) {
  auto device = MakeCpuDevice(1);
  auto buffer = device->Allocate(0);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->data(), nullptr);
}

TEST(CpuDevice, TooMuchMemorySaysHowMuchWasAskedForAndIsFree) {
  auto device = MakeCpuDevice(1);
  auto buffer = device->Allocate(int64_t{1} << 60);
  ASSERT_FALSE(buffer.ok());
  EXPECT_EQ(buffer.status().code(), StatusCode::kOutOfMemory);
  EXPECT_NE(buffer.status().message().find("1152921504606846976 bytes"), std::string::npos)
      << buffer.status().message();
}

TEST(CpuDevice, StreamsShareThePoolAndCopyAtOnce) {
  auto device = MakeCpuDevice(3);
  auto stream = device->MakeStream();
  ASSERT_TRUE(stream.ok());
  EXPECT_EQ((*stream)->thread_pool().num_threads(), 3);
  EXPECT_EQ((*stream)->native_handle(), nullptr);
  const char source[] = "entries";
  char destination[sizeof(source)] = {};
  ASSERT_TRUE((*stream)->Copy(destination, source, sizeof(source)).ok());
  EXPECT_STREQ(destination, source);
  EXPECT_TRUE((*stream)->Synchronize().ok());
}

TEST(CpuDevice, KnowsItsMemory) {
  auto device = MakeCpuDevice(1);
  EXPECT_GT(device->total_memory_bytes(), 0);
  EXPECT_GT(device->free_memory_bytes(), 0);
  EXPECT_LE(device->free_memory_bytes(), device->total_memory_bytes());
}

}  // namespace
}  // namespace fathom::device
