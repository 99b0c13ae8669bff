#include "kernels/kv_entry/kv_entry.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;

// Two pages of three entries with guards around each part.
TEST(KvEntry, NeighboursAreNotTouched) {
  const int data_bytes = KvDataBytes<BFloat16>(512, 64);
  EXPECT_EQ(data_bytes, 576);
  std::vector<std::byte> pool(2 * 4096, std::byte{0xee});
  const PagedEntries entries{pool.data(), 4096, 256, 3, data_bytes, 8};
  const auto values = RandomFloats(512, 1);
  StoreKvEntry<BFloat16>(values.data(), 512, 64, entries.At(1, 1));
  for (size_t i = 0; i < pool.size(); ++i) {
    const size_t data = 4096 + 256 + 576, scales = 4096 + 256 + 3 * 576 + 8;
    const bool inside = (i >= data && i < data + 576) || (i >= scales && i < scales + 8);
    if (inside) continue;
    ASSERT_EQ(pool[i], std::byte{0xee}) << i;
  }
  EXPECT_EQ(pool[4096 + 256 + 3 * 576 + 8 + 7], std::byte{0}) << "the eighth scale byte is padding";
}

TEST(KvEntry, OfficialEntriesRoundAndReadBackTheSame) {
  std::vector<float> values;
  for (const float x : RandomFloats(512, 2)) values.push_back(RoundToBFloat16(x * 3));
  std::vector<std::byte> data(576), scales(8), data2(576), scales2(8);
  StoreKvEntry<BFloat16>(values.data(), 512, 64, {data.data(), scales.data()});
  std::vector<float> stored(512), again(512);
  LoadKvEntry<BFloat16>({data.data(), scales.data()}, 512, 64, stored.data());
  for (size_t i = 0; i < 448; ++i)
    EXPECT_NEAR(stored[i], values[i], std::fabs(values[i]) / 16 + 0.02);
  for (size_t i = 448; i < 512; ++i) EXPECT_EQ(stored[i], values[i]);
  // What was read is what would be stored again.
  StoreKvEntry<BFloat16>(stored.data(), 512, 64, {data2.data(), scales2.data()});
  LoadKvEntry<BFloat16>({data2.data(), scales2.data()}, 512, 64, again.data());
  EXPECT_EQ(again, stored);
}

TEST(KvEntry, Fp32EntriesAndKeysAreExact) {
  const auto values = RandomFloats(512, 3);
  std::vector<std::byte> data(2048);
  std::vector<float> stored(512);
  StoreKvEntry<float>(values.data(), 512, 64, {data.data(), nullptr});
  LoadKvEntry<float>({data.data(), nullptr}, 512, 64, stored.data());
  EXPECT_EQ(stored, values);
  StoreIndexKey(values.data(), 128, IndexKeyDType::kFp32, {data.data(), nullptr});
  LoadIndexKey({data.data(), nullptr}, 128, IndexKeyDType::kFp32, stored.data());
  for (size_t i = 0; i < 128; ++i) EXPECT_EQ(stored[i], values[i]);
}

TEST(KvEntry, IndexKeysKeepWhatTheirTypeCan) {
  const auto values = RandomFloats(128, 4);
  for (const auto& [dtype, error] :
       {std::pair{IndexKeyDType::kFp4, 0.5f}, {IndexKeyDType::kFp8, 0.125f}}) {
    std::vector<std::byte> data(128), scales(4);
    std::vector<float> stored(128), again(128);
    StoreIndexKey(values.data(), 128, dtype, {data.data(), scales.data()});
    LoadIndexKey({data.data(), scales.data()}, 128, dtype, stored.data());
    for (size_t i = 0; i < 128; ++i) EXPECT_NEAR(stored[i], values[i], error);
    StoreIndexKey(stored.data(), 128, dtype, {data.data(), scales.data()});
    LoadIndexKey({data.data(), scales.data()}, 128, dtype, again.data());
    EXPECT_EQ(again, stored);
  }
}

}  // namespace
}  // namespace fathom::kernels
