// How a lane moves words of 16 bytes: several on their way at once, which a loop of loads and
// stores does not bring about, as a store waits for its load and no load may be moved over a store.
// Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace fathom::kernels {

inline constexpr int kWordsAhead = 8;

// `count` words, so many bytes from each to the next. Past the first-level cache, so that another
// GPU may have written them.
__device__ inline void CopyWords(const void* from, int64_t from_step, void* to, int64_t to_step,
                                 int count) {
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  for (; count > 0; count -= kWordsAhead) {
    uint4 words[kWordsAhead];
#pragma unroll
    for (int i = 0; i < kWordsAhead; ++i) {
      if (i < count) words[i] = __ldcg(reinterpret_cast<const uint4*>(source + i * from_step));
    }
#pragma unroll
    for (int i = 0; i < kWordsAhead; ++i) {
      if (i < count) *reinterpret_cast<uint4*>(target + i * to_step) = words[i];
    }
    source += kWordsAhead * from_step, target += kWordsAhead * to_step;
  }
}

// A row of `num_words`, by a warp.
__device__ inline void CopyRowOfWords(const void* from, void* to, int num_words) {
  constexpr int kWarpBytes = 32 * sizeof(uint4);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  CopyWords(static_cast<const uint4*>(from) + lane, kWarpBytes, static_cast<uint4*>(to) + lane,
            kWarpBytes, (num_words - lane + 31) / 32);
}

}  // namespace fathom::kernels
