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

// What the experts of each warp have of groups of rows and of tiles.
struct PlacesOfWarps {
  static constexpr int kWarps = kMaxExperts / 32;
  int groups[kWarps], wide[kWarps], narrow[kWarps];
};
// By a block of kMaxExperts threads or more, all of which call: the rows of each expert's pairs,
// whole groups of eight from `first_group` on, and the plan's tiles; returns how many. count,
// first_row: [num_experts], in shared or device memory.
__device__ __forceinline__ int PlaceExperts(const ExpertPlan& plan, int num_experts,
                                            const int* count, int* first_row, int first_group,
                                            ExpertTileSplit split, PlacesOfWarps& shared) {
  const int e = static_cast<int>(threadIdx.x), warp = e / 32;
  const int n = e < num_experts ? count[e] : 0;
  const int wide = split.NumWide(n), narrow = split.NumNarrow(n);
  int all_groups, all_wide, all_narrow;
  int group = first_group + WarpExclusiveSum((n + 7) / 8, all_groups);
  int first_wide = WarpExclusiveSum(wide, all_wide);
  int first_narrow = WarpExclusiveSum(narrow, all_narrow);
  if (e % 32 == 0 && warp < PlacesOfWarps::kWarps) {
    shared.groups[warp] = all_groups, shared.wide[warp] = all_wide;
    shared.narrow[warp] = all_narrow;
  }
  __syncthreads();
  int num_wide = 0, num_narrow = 0;
#pragma unroll
  for (int w = 0; w < PlacesOfWarps::kWarps; ++w) {
    if (w == warp) first_wide += num_wide, first_narrow += num_narrow;
    if (w < warp) group += shared.groups[w];
    num_wide += shared.wide[w], num_narrow += shared.narrow[w];
  }
  if (e == 0) plan.num_tiles[0] = num_wide + num_narrow, plan.num_tiles[1] = num_wide;
  if (e < num_experts) first_row[e] = group * 8;
  for (int i = 0; i < wide + narrow; ++i) {
    const bool is_wide = i < wide;
    const int row = is_wide ? i * split.rows : wide * split.rows + (i - wide) * kNarrowTileRows;
    const int place = is_wide ? first_wide + i : num_wide + first_narrow + i - wide;
    plan.tiles[place] = {e, group + row / 8, group + row / 8,
                         min(is_wide ? split.rows : kNarrowTileRows, n - row)};
  }
  return num_wide + num_narrow;
}

}  // namespace fathom::kernels
