// Plausible random values for benchmarks on dummy weights, made on the GPU: matrices of deviation
// near 1 / 64, norms of 1, no NaN. Device memory; in stream order.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace fathom::model {

enum class DummyKind { kFp8, kFp4, kBf16, kF32, kFp8Scale, kFp4Scale, kOnesBf16, kExpertIds };

// `bytes` of values, at any place; for kExpertIds, int32 below `limit`.
void FillDummy(DummyKind kind, std::byte* data, int64_t bytes, uint32_t seed, int limit,
               device::Stream& stream);

}  // namespace fathom::model
