// What hyper_connection_cuda.h does between two sub-layers, for many tokens, in two launches. The
// first ends the sub-layer (post) and multiplies the new streams with the mixers on tensor cores:
// the streams are BF16, and a mixer's FP32 value is the sum of three BF16 values, so the products
// are those of FP32. The second makes the gates, and of them the next sub-layer's input; C, which
// the next boundary needs, in blocks of its own. Of a decode's few tiles the first is
// post_mix_decode.cuh.
#pragma once

#include "kernels/hyper_connection/hyper_connection_cuda.h"

namespace fathom::kernels {

// Decodes: from here on, as far as clusters of two tokens run at once.
constexpr int64_t LargeBoundaryTokens(int64_t hidden) { return hidden > 4096 ? 15 : 17; }
inline constexpr int64_t kMaxBoundaryPairs = 8;

// The columns are ranges, whose sums are added in order at the end: the same bits however many
// blocks share them.
inline constexpr int kBoundaryRangeColumns = 256;
inline constexpr int kDecodeRangeColumns = 128;    // of a decode
inline constexpr int64_t kMostDecodeTokens = 128;  // in such ranges
inline constexpr int kMaxBoundaryRanges = 64;
constexpr int BoundaryRanges(int64_t hidden) {
  return static_cast<int>((hidden + kBoundaryRangeColumns - 1) / kBoundaryRangeColumns);
}

// The scratch of a step: the sums of each range.
constexpr int64_t BoundaryScratchFloats(int64_t num_tokens, int64_t hidden) {
  const int64_t few = num_tokens < kMostDecodeTokens ? num_tokens : kMostDecodeTokens;
  const int64_t rows = num_tokens * BoundaryRanges(hidden);
  const int64_t rows_of_few = few * (hidden / kDecodeRangeColumns);
  return (rows > rows_of_few ? rows : rows_of_few) * 32;
}

// Of a decode: whether it takes this boundary, and can complete an output of which each rank has
// some columns, added up of so many rows of pairs.
bool LargeBoundaryExchanges(int64_t num_tokens, int64_t hidden, int num_chosen);

bool IsLargeBoundary(const CudaHyperConnectionParams& params);
void LaunchLargeBoundary(const CudaHyperConnectionParams& params, device::Stream& stream);

}  // namespace fathom::kernels
