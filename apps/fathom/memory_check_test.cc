#include "apps/fathom/memory_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/synthetic_checkpoint.h"

namespace fathom::app {
namespace {

using testing::HasSubstr;

class Gpu final : public device::Device {
 public:
  explicit Gpu(device::DeviceKind kind) : kind_(kind) {}
  device::DeviceKind kind() const override { return kind_; }
  std::string name() const override { return "a GPU"; }
  Result<device::Buffer> Allocate(int64_t) override { return InternalError("not here"); }
  Result<device::Buffer> AllocateHost(int64_t) override { return InternalError("not here"); }
  Result<std::unique_ptr<device::Stream>> MakeStream() override {
    return InternalError("not here");
  }
  Result<std::unique_ptr<device::Event>> MakeEvent() override { return InternalError("not here"); }
  int64_t total_memory_bytes() const override { return int64_t{143156} << 20; }  // an H200's
  int64_t free_memory_bytes() const override { return total_memory_bytes(); }

 private:
  const device::DeviceKind kind_;
};

class CheckKvRoomTest : public testing::Test {
 protected:
  CheckKvRoomTest() {
    options_.parallel.tensor_parallel_size = 2;
    session_.config =
        checkpoint::ParseModelConfig(checkpoint::PresetConfigText("flash").value(), "flash")
            .value();
    SetDevice(device::DeviceKind::kCuda);
  }
  void SetDevice(device::DeviceKind kind) {
    session_.ranks.clear();
    session_.ranks.emplace_back().device = std::make_unique<Gpu>(kind);
  }
  Status CheckAt(double utilization) {
    options_.gpu_memory_utilization = utilization;
    return CheckKvRoom(options_, session_);
  }

  ModelOptions options_;
  ModelSession session_;
};

TEST_F(CheckKvRoomTest, SaysWhatTakesTheMemory) {
  EXPECT_TRUE(CheckAt(0.9).ok());
  const Status status = CheckAt(0.5);
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_THAT(status.message(),
              testing::AllOf(HasSubstr("143156 MiB"), HasSubstr("0.50 allows 71578;"),
                             HasSubstr("weights take 77"), HasSubstr("for a context of 256 ")));
}

TEST_F(CheckKvRoomTest, AContextThatWasAskedForNeedsRoom) {
  EXPECT_TRUE(CheckAt(0.61).ok());  // a shorter one has it
  options_.max_model_len = 1 << 20;
  EXPECT_EQ(CheckAt(0.57).code(), StatusCode::kOutOfMemory);
  EXPECT_TRUE(CheckAt(0.9).ok());
}

TEST_F(CheckKvRoomTest, WhatIsNotSureIsLeftToTheStart) {
  options_.kv_cache_bytes = int64_t{1} << 30;
  EXPECT_TRUE(CheckAt(0.5).ok());
  options_.kv_cache_bytes = 0;
  SetDevice(device::DeviceKind::kCpu);
  EXPECT_TRUE(CheckAt(0.5).ok());
}

}  // namespace
}  // namespace fathom::app
