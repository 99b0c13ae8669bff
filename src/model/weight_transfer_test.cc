// Weights reach their places on a GPU, more of them than are on their way at a time; what goes
// wrong with one ends it all.
#include "model/weight_transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace fathom::model {
namespace {

// One tensor of bytes that differ; the read that covers `broken_byte` fails.
class BytesSource final : public checkpoint::TensorSource {
 public:
  explicit BytesSource(int64_t bytes, int64_t broken_byte = -1)
      : tensors_{{.name = "bytes",
                  .dtype = checkpoint::FileDType::kU8,
                  .shape = {bytes},
                  .bytes = bytes}},
        broken_byte_(broken_byte) {}

  static std::byte At(int64_t offset) {
    return static_cast<std::byte>(static_cast<uint64_t>(offset) * 0x9e3779b97f4a7c15u >> 56);
  }

  const std::vector<checkpoint::TensorInfo>& tensors() const override { return tensors_; }
  const checkpoint::TensorInfo* Find(std::string_view) const override { return tensors_.data(); }
  Status Read(const checkpoint::TensorInfo&, int64_t offset,
              std::span<std::byte> out) const override {
    const auto bytes = static_cast<int64_t>(out.size());
    if (offset <= broken_byte_ && broken_byte_ < offset + bytes) return BadModel("a broken byte");
    for (int64_t i = 0; i < bytes; ++i) out[static_cast<size_t>(i)] = At(offset + i);
    return OkStatus();
  }

 private:
  const std::vector<checkpoint::TensorInfo> tensors_;
  const int64_t broken_byte_;
};

class WeightTransferTest : public testing::Test {
 protected:
  void SetUp() override {
    auto device = device::MakeCudaDevice(0);
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = std::move(*device);
    auto memory = device_->Allocate(kBytes);
    ASSERT_TRUE(memory.ok()) << memory.status().message();
    memory_ = std::move(*memory);
  }

  // Units of sizes from one byte to far more than most have, which fill the memory.
  std::vector<WeightUnit> Units(const BytesSource& source) const {
    constexpr int64_t kMost = ReadUnitBytes(4);
    constexpr int64_t kSizes[] = {1, kMost, 300, kMost + 4096, 8 * kMost, 77777};
    std::vector<WeightUnit> units;
    for (int64_t at = 0; at < kBytes; at += units.back().bytes) {
      const int64_t bytes = std::min(kSizes[units.size() % std::size(kSizes)], kBytes - at);
      const int64_t first = bytes / 2;  // two reads each
      const checkpoint::TensorInfo* const tensor = source.tensors().data();
      units.push_back(
          {.reads =
               {{.tensor = tensor, .offset = at, .bytes = first},
                {.tensor = tensor, .offset = at + first, .bytes = bytes - first, .place = first}},
           .bytes = bytes,
           .destination = memory_.data() + at});
    }
    return units;
  }

  // A third of the units are bytes, the others FP8 matrices of different sizes that become tiles.
  std::vector<WeightUnit> MatricesAndBytes(const BytesSource& source) const {
    constexpr int64_t kRows = 128;
    constexpr int64_t kSizes[] = {ReadUnitBytes(4), ReadUnitBytes(4) / 4, kRows * 128};
    std::vector<WeightUnit> units;
    for (int64_t at = 0; at < kBytes; at += units.back().bytes) {
      const int64_t bytes = std::min(kSizes[units.size() % std::size(kSizes)], kBytes - at);
      WeightUnit unit{.reads = {{.tensor = source.tensors().data(), .offset = at, .bytes = bytes}},
                      .bytes = bytes};
      if (units.size() % 3 == 1) {
        unit.destination = memory_.data() + at;
      } else {
        unit.matrix = {kernels::WeightDType::kFp8, kRows, bytes / kRows};
        unit.tiles = memory_.data() + at;
      }
      units.push_back(std::move(unit));
    }
    return units;
  }

  std::vector<std::byte> Download() const {
    std::vector<std::byte> found(kBytes);
    auto stream = device_->MakeStream();
    EXPECT_TRUE(stream.ok());
    EXPECT_TRUE((*stream)->Copy(found.data(), memory_.data(), kBytes).ok());
    EXPECT_TRUE((*stream)->Synchronize().ok());
    return found;
  }

  Status Transfer(const BytesSource& source) {
    return TransferWeights(Units(source), source, /*num_experts=*/1, *device_);
  }

  static constexpr int64_t kBytes = int64_t{200} << 20;
  std::unique_ptr<device::Device> device_;
  device::Buffer memory_;
};

TEST_F(WeightTransferTest, EveryByteComesToItsPlace) {
  ASSERT_TRUE(Transfer(BytesSource(kBytes)).ok());
  const std::vector<std::byte> found = Download();
  int64_t wrong = 0;
  for (int64_t i = 0; i < kBytes; ++i) {
    if (found[static_cast<size_t>(i)] != BytesSource::At(i)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(WeightTransferTest, MatricesBecomeTiles) {
  const BytesSource source(kBytes);
  const std::vector<WeightUnit> units = MatricesAndBytes(source);
  ASSERT_TRUE(TransferWeights(units, source, /*num_experts=*/1, *device_).ok());
  const std::vector<std::byte> found = Download();
  // A row tile's 128 bytes of a row lie together, 16 of them in an order that the row gives.
  int64_t wrong = 0;
  for (const WeightUnit& unit : units) {
    const int64_t begin = unit.reads[0].offset;
    const int64_t cols = unit.destination != nullptr ? unit.bytes : unit.matrix.cols;
    for (int64_t i = 0; i < unit.bytes; ++i) {
      const int64_t row = i / cols, col = i % cols;
      const int64_t tile = row / 64 * (cols / 128) + col / 128;
      const int64_t place =
          tile * 8192 + row % 64 * 128 + ((col % 128 / 16) ^ row % 8) * 16 + col % 16;
      const int64_t to = unit.destination != nullptr ? i : place;
      if (found[static_cast<size_t>(begin + to)] != BytesSource::At(begin + i)) ++wrong;
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(WeightTransferTest, AReadThatFailsEndsIt) {
  for (const int64_t broken : {int64_t{0}, kBytes / 2, kBytes - 1}) {
    const Status status = Transfer(BytesSource(kBytes, broken));
    EXPECT_EQ(status.code(), StatusCode::kBadModel);
    EXPECT_EQ(status.message(), "a broken byte");
  }
}

}  // namespace
}  // namespace fathom::model
