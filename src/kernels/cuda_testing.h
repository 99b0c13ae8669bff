// What the tests of CUDA kernels share: a GPU or a skip, memory that starts as NaN, copies, and
// activations in tiles. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "device/device.h"
#include "kernels/quantize/quantize.h"
#include "kernels/testing.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    auto gpu = device::MakeCudaDevice(0);
    if (!gpu.ok()) GTEST_SKIP() << gpu.status().message();
    gpu_ = std::move(*gpu);
    gpu_stream_ = std::move(gpu_->MakeStream().value());
  }

  // Every byte 0xff: NaN in every floating-point format, -1 as an integer.
  device::Buffer Poisoned(int64_t bytes) {
    return Upload(std::vector<uint8_t>(static_cast<size_t>(bytes), 0xff));
  }

  template <typename U>
  device::Buffer Upload(const std::vector<U>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(U));
    device::Buffer buffer = std::move(gpu_->Allocate(bytes).value());
    EXPECT_TRUE(gpu_stream_->Copy(buffer.data(), values.data(), bytes).ok());
    EXPECT_TRUE(gpu_stream_->Synchronize().ok());
    return buffer;
  }

  template <typename U>
  std::vector<U> Download(const device::Buffer& buffer) {
    std::vector<U> values(static_cast<size_t>(buffer.bytes()) / sizeof(U));
    EXPECT_TRUE(gpu_stream_->Copy(values.data(), buffer.data(), buffer.bytes()).ok());
    EXPECT_TRUE(gpu_stream_->Synchronize().ok());
    return values;
  }

  // To the test's end, or until it drops them.
  std::byte* Keep(device::Buffer buffer) {
    kept_.push_back(std::move(buffer));
    return kept_.back().data();
  }
  template <typename U>
  U* KeepAs(device::Buffer buffer) {
    return reinterpret_cast<U*>(Keep(std::move(buffer)));
  }

  std::unique_ptr<device::Device> cpu_ = device::MakeCpuDevice(4);
  std::unique_ptr<device::Stream> cpu_stream_ = std::move(cpu_->MakeStream().value());
  std::unique_ptr<device::Device> gpu_;
  std::unique_ptr<device::Stream> gpu_stream_;
  std::vector<device::Buffer> kept_;
};

// Under racecheck, in whose build alone this holds, a launch takes seconds: tests run the same
// instances of kernels, and less of each.
#ifdef FATHOM_RACECHECK
inline constexpr bool kIsRacecheck = true;
#else
inline constexpr bool kIsRacecheck = false;
#endif
template <typename T = int>
std::vector<T> Sweep(const std::vector<T>& all, const std::vector<T>& under_racecheck) {
  return kIsRacecheck ? under_racecheck : all;
}

// Steps of these sizes, from token first on, are compared with one step of kWholeStep tokens.
struct TestStep {
  int first, num_tokens;
};
inline constexpr int kWholeStep = kIsRacecheck ? 150 : 2048;
inline std::vector<TestStep> TestSteps() {
  return Sweep<TestStep>({{5, 1},
                          {200, 2},
                          {37, 12},
                          {1000, 31},
                          {64, 33},
                          {1984, 64},
                          {255, 255},
                          {256, 256},
                          {300, 300},
                          {700, 512},
                          {513, 513},
                          {1348, 700}},
                         {{5, 1}, {37, 12}, {100, 31}, {64, 33}, {12, 130}});
}

template <typename U>
U* As(const device::Buffer& buffer) {
  return reinterpret_cast<U*>(buffer.data());
}

// Host images of tiles for `rows` (a multiple of 8) token rows.
struct HostFp8Tiles {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  std::vector<float> values;  // [tokens, cols], what the codes mean
};
inline HostFp8Tiles MakeFp8Tiles(const std::vector<BFloat16>& x, int64_t tokens, int64_t cols,
                                 int64_t rows) {
  HostFp8Tiles tiles;
  tiles.codes.assign(static_cast<size_t>(rows * cols), 0);
  tiles.scales.assign(static_cast<size_t>(rows * cols / 128), 1.0f);
  tiles.values.resize(static_cast<size_t>(tokens * cols));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < cols; k += 128) {
      float block[128];
      uint8_t codes[128];
      for (int64_t i = 0; i < 128; ++i)
        block[i] = ToFloat(x[static_cast<size_t>(t * cols + k + i)]);
      const float scale = Ue8m0ToFloat(QuantizeFp8(block, 128, codes));
      tiles.scales[static_cast<size_t>(k / 128 * rows + t)] = scale;
      for (int64_t i = 0; i < 128; ++i) {
        tiles.codes[static_cast<size_t>(Fp8TileOffset(t, k + i, rows / 8))] = codes[i];
        tiles.values[static_cast<size_t>(t * cols + k + i)] = Float8ToFloat(codes[i]) * scale;
      }
    }
  }
  return tiles;
}

inline std::vector<BFloat16> MakeBf16Tiles(const std::vector<BFloat16>& x, int64_t tokens,
                                           int64_t cols, int64_t rows) {
  std::vector<BFloat16> tiles(static_cast<size_t>(rows * cols));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < cols; ++k) {
      tiles[static_cast<size_t>(Bf16TileOffset(t, k, rows / 8) / 2)] =
          x[static_cast<size_t>(t * cols + k)];
    }
  }
  return tiles;
}

}  // namespace fathom::kernels
