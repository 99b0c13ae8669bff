#include "kv_store/segment.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace fathom::kv_store {
namespace {

using request::KvRecord;

KvRecord BlockRecord() {
  KvRecord record{.kind = KvRecord::Kind::kBlock,
                  .hash = {0x1234, 0xabcdef},
                  .parent = {5, 6},
                  .num_tokens = 512,
                  .token_ids = std::vector<int32_t>(256)};
  std::iota(record.token_ids.begin(), record.token_ids.end(), 100);
  return record;
}

std::vector<std::byte> Payload(size_t bytes) {
  std::mt19937 random(1);
  std::vector<std::byte> payload(bytes);
  for (std::byte& b : payload) b = static_cast<std::byte>(random());
  return payload;
}

TEST(Segment, ComesBackAsItWas) {
  const StoreKey key{1, 2, 3};
  const auto payload = Payload(1000);
  KvRecord snapshot{.kind = KvRecord::Kind::kSnapshot, .hash = {7, 8}, .num_tokens = 256};
  for (const KvRecord& record : {BlockRecord(), snapshot}) {
    const auto head = MakeSegmentHead(record, payload, key);
    ASSERT_EQ(head.size(), SegmentHeadBytes(record.kind));
    const auto parsed = ParseSegmentHead(head, static_cast<int64_t>(head.size() + 1000), key);
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    EXPECT_EQ(*parsed, record);
    EXPECT_TRUE(IsPayloadIntact(head, payload, key));
  }
  EXPECT_EQ(SegmentPath(snapshot), "00/00000000000000070000000000000008.snapshot");
}

TEST(Segment, EveryFlippedBitOfTheHeadIsSeen) {
  const StoreKey key{1};
  const auto payload = Payload(100);
  const auto head = MakeSegmentHead(BlockRecord(), payload, key);
  const auto size = static_cast<int64_t>(head.size() + payload.size());
  for (size_t i = 0; i < head.size() * 8; ++i) {
    auto damaged = head;
    damaged[i / 8] ^= static_cast<std::byte>(1 << i % 8);
    EXPECT_FALSE(ParseSegmentHead(damaged, size, key).ok()) << i;
  }
}

TEST(Segment, ADamagedPayloadATruncatedFileAndAForeignKeyAreSeen) {
  const StoreKey key{1};
  auto payload = Payload(100);
  const auto head = MakeSegmentHead(BlockRecord(), payload, key);
  const auto size = static_cast<int64_t>(head.size() + payload.size());
  EXPECT_FALSE(ParseSegmentHead(head, size - 1, key).ok());
  EXPECT_FALSE(ParseSegmentHead(head, size + 1, key).ok());
  for (size_t length = 0; length < head.size(); ++length) {
    EXPECT_FALSE(ParseSegmentHead(std::span(head).first(length), size, key).ok()) << length;
  }
  EXPECT_FALSE(ParseSegmentHead(head, size, StoreKey{2}).ok());
  payload[50] ^= std::byte{1};
  EXPECT_FALSE(IsPayloadIntact(head, payload, key));
}

}  // namespace
}  // namespace fathom::kv_store
