#include "kv_cache/joined_stores.h"

#include <gtest/gtest.h>

namespace fathom::kv_cache {
namespace {

using request::KvRecord;
using request::KvStoreEvent;
using Kind = KvStoreEvent::Kind;

KvRecord Record(uint64_t n) {
  return {.hash = {n, n}, .num_tokens = 256, .token_ids = std::vector<int32_t>(256, 7)};
}

KvStoreEvent Found(uint64_t n, int num_ranks = 1) {
  return {.kind = Kind::kFound,
          .record = Record(n),
          .file_bytes = 10,
          .ok = false,
          .num_ranks = num_ranks};
}

KvStoreEvent Answer(Kind kind, int32_t slot, bool ok, int num_ranks = 1) {
  return {.kind = kind,
          .record = Record(static_cast<uint64_t>(slot)),
          .host_slot = slot,
          .file_bytes = 10,
          .ok = ok,
          .num_ranks = num_ranks};
}

TEST(JoinedStores, ARecordIsThereWhenAllRanksHaveIt) {
  JoinedStores stores(4);
  EXPECT_TRUE(stores.Join({{Found(1, 2), Found(2, 2), Found(2, 1)}}).empty());
  const auto joined = stores.Join({{Found(3, 2), Found(2, 1), Found(3, 2)}});
  ASSERT_EQ(joined.size(), 2u);
  EXPECT_EQ(joined[0].record, Record(2));
  EXPECT_EQ(joined[0].file_bytes, 30);
  EXPECT_EQ(joined[1].record, Record(3));
  EXPECT_EQ(joined[1].file_bytes, 20);
}

TEST(JoinedStores, WhatSomeRankLacksIsKnownWhenAllAreIndexed) {
  JoinedStores stores(2);
  KvStoreEvent other = Found(2);
  other.record.token_ids[5] = 8;  // under one name
  const KvStoreEvent indexed{.kind = Kind::kIndexed};
  EXPECT_TRUE(stores.Join({{Found(1), indexed, Found(2), other}}).empty());
  ASSERT_EQ(stores.Join({{indexed}}).size(), 1u);
  EXPECT_EQ(stores.TakeIncomplete().size(), 2u);
  EXPECT_TRUE(stores.TakeIncomplete().empty());
}

TEST(JoinedStores, AnAnswerIsYesWhenAllSayYes) {
  JoinedStores stores(3);
  for (const bool ok : {true, false}) {
    EXPECT_TRUE(stores
                    .Join({{Answer(Kind::kRead, 4, true), Answer(Kind::kWrite, 5, ok, 2),
                            Answer(Kind::kRead, 4, ok)}})
                    .empty());
    const auto joined =
        stores.Join({{Answer(Kind::kWrite, 5, true), Answer(Kind::kRead, 4, true)}});
    ASSERT_EQ(joined.size(), 2u);
    EXPECT_EQ(joined[0].kind, Kind::kWrite);
    EXPECT_EQ(joined[0].file_bytes, 20);
    EXPECT_EQ(joined[1].kind, Kind::kRead);
    EXPECT_EQ(joined[0].ok && joined[1].ok, ok);
    EXPECT_EQ(joined[0].ok, ok);
  }
}

TEST(JoinedStores, TheFirstThatIsOffTurnsAllOff) {
  JoinedStores stores(2);
  const KvStoreEvent off{.kind = Kind::kOff};
  EXPECT_EQ(stores.Join({{off}}).size(), 1u);
  EXPECT_TRUE(stores.Join({{off}}).empty());
}

}  // namespace
}  // namespace fathom::kv_cache
