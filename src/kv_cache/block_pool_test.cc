#include "kv_cache/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace fathom::kv_cache {
namespace {

constexpr int kWindow = 128;

BlockPool MakePool(int blocks, int pages, int slots) {
  return BlockPool({.num_blocks = blocks, .num_window_pages = pages, .num_state_slots = slots},
                   kWindow);
}

TEST(IdPool, GivesEveryIdOnceAndTheLastFreedFirst) {
  IdPool pool(3);
  EXPECT_EQ(pool.Allocate(), 0);
  EXPECT_EQ(pool.Allocate(), 1);
  EXPECT_EQ(pool.Allocate(), 2);
  EXPECT_EQ(pool.num_free(), 0);
  pool.Release(1);
  pool.Release(0);
  EXPECT_EQ(pool.Allocate(), 0);
  EXPECT_EQ(pool.Allocate(), 1);
  EXPECT_TRUE(pool.IsIntact());
}

TEST(IdPool, KeepsAnIdUntilItsLastReferenceIsGone) {
  IdPool pool(1);
  const int32_t id = pool.Allocate();
  pool.AddReference(id);
  pool.Release(id);
  EXPECT_EQ(pool.num_used(), 1);
  pool.Release(id);
  EXPECT_EQ(pool.num_used(), 0);
  EXPECT_TRUE(pool.IsIntact());
}

TEST(IdPool, WhatTheCacheAloneHoldsIsAvailable) {
  IdPool pool(2);
  const int32_t id = pool.Allocate();
  pool.AddCacheReference(id);
  EXPECT_EQ(pool.num_available(), 1);
  pool.Release(id);
  EXPECT_TRUE(pool.is_reclaimable(id));
  EXPECT_EQ(pool.num_available(), 2);
  EXPECT_EQ(pool.num_free(), 1);
  pool.AddReference(id);
  EXPECT_EQ(pool.num_available(), 1);
  pool.ReleaseCacheReference(id);
  EXPECT_EQ(pool.num_used(), 1);
  pool.Release(id);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_TRUE(pool.IsIntact());
}

TEST(IdPoolDeathTest, ReleasingAFreeIdIsOurBug) {
  IdPool pool(2);
  EXPECT_DEATH(pool.Release(0), "none");
  EXPECT_DEATH(pool.Release(2), "capacity");
}

TEST(BlockPool, AdmitsAWholePromptOrTakesNothing) {
  BlockPool pool = MakePool(4, 8, 2);
  request::BlockTable a, b;
  EXPECT_TRUE(pool.Admit(3 * kBlockTokens, a));
  EXPECT_EQ(a.blocks.size(), 3u);
  EXPECT_FALSE(pool.Admit(kBlockTokens + 1, b));
  EXPECT_EQ(b.state_slot, -1);
  EXPECT_TRUE(b.blocks.empty());
  EXPECT_TRUE(pool.Admit(kBlockTokens, b));
  EXPECT_NE(a.state_slot, b.state_slot);
}

TEST(BlockPool, RefusesWhenNoStateSlotIsFree) {
  BlockPool pool = MakePool(8, 8, 1);
  request::BlockTable a, b;
  EXPECT_TRUE(pool.Admit(1, a));
  EXPECT_FALSE(pool.Admit(1, b));
  pool.Release(a);
  EXPECT_TRUE(pool.Admit(1, b));
}

TEST(BlockPool, RunsAsManyTokensAsWindowPagesAllow) {
  BlockPool pool = MakePool(16, 5, 1);
  request::BlockTable table;
  ASSERT_TRUE(pool.Admit(1000, table));
  EXPECT_EQ(pool.NumRunnable(table, 0, 1000), 5 * kWindowPageTokens);
  EXPECT_EQ(pool.NumRunnable(table, 0, 7), 7);
}

TEST(BlockPool, HoldsOnlyTheWindowThatTheNextTokenOrARollbackReaches) {
  BlockPool pool = MakePool(16, 16, 1);
  request::BlockTable table;
  ASSERT_TRUE(pool.Admit(1, table));
  for (int64_t computed = 0; computed < 2000; ++computed) {
    ASSERT_EQ(pool.NumRunnable(table, computed, 1), 1);
    pool.Extend(table, computed, 1);
    const int64_t oldest = std::max<int64_t>(0, computed - kMaxRollbackTokens - (kWindow - 1));
    EXPECT_EQ(table.first_window_page, oldest / kWindowPageTokens);
    const int64_t end =
        (table.first_window_page + static_cast<int64_t>(table.window_pages.size())) *
        kWindowPageTokens;
    EXPECT_GT(end, computed);
    EXPECT_LE(end - computed, kWindowPageTokens);
    EXPECT_LE(static_cast<int64_t>(table.window_pages.size()), MaxWindowPages(kWindow, 1));
    EXPECT_EQ(static_cast<int64_t>(table.blocks.size()), NumBlocksFor(computed + 1));
    pool.ReleaseUnreachable(table, computed + 1);
  }
  pool.Release(table);
  EXPECT_TRUE(pool.IsEmpty());
  EXPECT_TRUE(pool.IsIntact());
}

TEST(BlockPool, ChunksNeverHoldMoreWindowPagesThanTheBound) {
  for (const int64_t chunk : {1, 3, 63, 64, 65, 127, 128, 257, 1000}) {
    BlockPool pool = MakePool(64, 64, 1);
    request::BlockTable table;
    ASSERT_TRUE(pool.Admit(1, table));
    for (int64_t computed = 0; computed + chunk < 4000; computed += chunk) {
      pool.Extend(table, computed, chunk);
      EXPECT_LE(static_cast<int64_t>(table.window_pages.size()), MaxWindowPages(kWindow, chunk));
      pool.ReleaseUnreachable(table, computed + chunk);
    }
  }
}

TEST(BlockPool, NeverGivesOneIdToTwoSequences) {
  std::mt19937 random(7);
  BlockPool pool = MakePool(20, 40, 6);
  struct Held {
    request::BlockTable table;
    int64_t num_computed = 0;
  };
  std::vector<Held> held;
  for (int event = 0; event < 5000; ++event) {
    if (random() % 4 == 0) {
      Held h;
      if (pool.Admit(1 + random() % 600, h.table)) held.push_back(h);
    } else if (!held.empty()) {
      Held& h = held[random() % held.size()];
      const int64_t n = pool.NumRunnable(h.table, h.num_computed, 1 + random() % 300);
      pool.Extend(h.table, h.num_computed, n);
      h.num_computed += n;
      pool.ReleaseUnreachable(h.table, h.num_computed);
      if (n == 0 || random() % 6 == 0) {
        pool.Release(h.table);
        std::swap(h, held.back());
        held.pop_back();
      }
    }
    std::vector<int32_t> blocks, pages;
    for (const Held& h : held) {
      blocks.insert(blocks.end(), h.table.blocks.begin(), h.table.blocks.end());
      pages.insert(pages.end(), h.table.window_pages.begin(), h.table.window_pages.end());
    }
    for (std::vector<int32_t>* ids : {&blocks, &pages}) {
      std::sort(ids->begin(), ids->end());
      ASSERT_EQ(std::adjacent_find(ids->begin(), ids->end()), ids->end());
    }
    ASSERT_EQ(pool.blocks().num_used(), static_cast<int32_t>(blocks.size()));
    ASSERT_EQ(pool.window_pages().num_used(), static_cast<int32_t>(pages.size()));
  }
  for (Held& h : held) pool.Release(h.table);
  EXPECT_TRUE(pool.IsEmpty());
  EXPECT_TRUE(pool.IsIntact());
}

}  // namespace
}  // namespace fathom::kv_cache
