// What the kernels that make an ExpertPlan share. Device code only.
#pragma once

#include <cstdint>

#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/sm90.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {

__device__ inline void SendWord(PlanBoard::Word* to, uint32_t value, uint32_t launch) {
  StoreTogether(to, value, launch);
}
// Once the activations are there.
__device__ inline void TellInput(PlanBoard& board, uint32_t launch) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(&board.input), "r"(launch) : "memory");
}
__device__ inline void AwaitInput(const PlanBoard& board, uint32_t launch) {
  uint32_t there;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(there)
                 : "l"(&board.input)
                 : "memory");
  } while (there != launch);
}
// The number of the launch whose plan is there or comes next.
__device__ inline uint32_t PlanLaunch(const PlanBoard& board) {
  return *static_cast<volatile const uint32_t*>(&board.launch);
}
__device__ inline PlanBoard::Word LoadWord(const PlanBoard::Word* from) {
  const uint2 word = LoadTogether(reinterpret_cast<const uint2*>(from));
  return {word.x, word.y};
}

// The values of a PlanBoard::Tile.
struct NamedTile {
  uint32_t first = 0, second = 0;

  __device__ void Begin(int expert, int count) {
    first = static_cast<uint32_t>(expert | (count - 1) << kCountBit), second = 0;
  }
  __device__ void Set(int i, int token) {
    const auto bits = static_cast<uint32_t>(token);
    if (i < kOfFirst) {
      first |= bits << (kTokensBit + i * kBits);
    } else {
      second |= bits << (i - kOfFirst) * kBits;
    }
  }
  __device__ int expert() const { return static_cast<int>(first & ((1u << kCountBit) - 1)); }
  __device__ int count() const { return static_cast<int>(first >> kCountBit & 7) + 1; }
  __device__ int operator[](int i) const {
    const uint32_t from =
        i < kOfFirst ? first >> (kTokensBit + i * kBits) : second >> (i - kOfFirst) * kBits;
    return static_cast<int>(from & ((1u << kBits) - 1));
  }

 private:
  static constexpr int kCountBit = 9, kTokensBit = 12, kBits = 6, kOfFirst = 3;
  static_assert(kMaxExperts <= 1 << kCountBit && kWordTokens <= 1 << kBits);
};
__device__ inline void SendTile(PlanBoard::Tile* to, NamedTile tile, uint32_t launch) {
  StoreTogether(reinterpret_cast<uint4*>(to), uint4{tile.first, launch, tile.second, launch});
}
__device__ inline PlanBoard::Tile LoadTile(const PlanBoard::Tile* from) {
  const uint4 words = LoadTogether(reinterpret_cast<const uint4*>(from));
  return {{words.x, words.y}, {words.z, words.w}};
}

// By one warp: the rows of each expert's pairs, whole groups of eight from `first_group` on, and
// the plan's tiles of up to `tile_rows` rows; returns how many. count, first_row: [num_experts], in
// shared or device memory.
__device__ __forceinline__ int PlaceExperts(const ExpertPlan& plan, int num_experts,
                                            const int* count, int* first_row, int first_group,
                                            int tile_rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int groups = first_group, tiles = 0;
  for (int base = 0; base < num_experts; base += 32) {
    const int e = base + lane, n = e < num_experts ? count[e] : 0;
    int all_groups, all_tiles;
    const int group = groups + WarpExclusiveSum((n + 7) / 8, all_groups);
    const int first = tiles + WarpExclusiveSum((n + tile_rows - 1) / tile_rows, all_tiles);
    groups += all_groups;
    tiles += all_tiles;
    if (e >= num_experts) continue;
    first_row[e] = group * 8;
    for (int i = 0; i * tile_rows < n; ++i) {
      const int at = group + i * tile_rows / 8;
      plan.tiles[first + i] = {e, at, at, min(tile_rows, n - i * tile_rows)};
    }
  }
  if (lane == 0) *plan.num_tiles = tiles;
  return tiles;
}

}  // namespace fathom::kernels
