#include <cuda_runtime.h>

#include <cstddef>

#include "base/check.h"
#include "model/dummy_values.h"

namespace fathom::model {
namespace {

__device__ uint32_t Hash(uint64_t i, uint32_t seed) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
  x ^= x >> 31;
  x *= 0xbf58476d1ce4e5b9ull;
  return static_cast<uint32_t>(x >> 32);
}

__device__ uint32_t Word(DummyKind kind, uint32_t random, int limit) {
  switch (kind) {
    case DummyKind::kFp8:
      return random & 0xb7b7b7b7u;  // magnitudes below 1
    case DummyKind::kFp4:
      return random;
    case DummyKind::kBf16:
      return (random & 0x807f807fu) | 0x3c003c00u;
    case DummyKind::kF32:
      return (random & 0x807fffffu) | 0x3c000000u;
    case DummyKind::kFp8Scale:
      return 0x7a7a7a7au;  // 2^-5
    case DummyKind::kFp4Scale:
      return 0x77777777u;  // 2^-8
    case DummyKind::kOnesBf16:
      return 0x3f803f80u;
    case DummyKind::kExpertIds:
      return random % static_cast<uint32_t>(limit);
  }
  return 0;
}

__global__ void FillKernel(DummyKind kind, std::byte* data, int64_t bytes, uint32_t seed,
                           int limit) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % 4 == 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i * 4 < bytes;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t word = Word(kind, Hash(static_cast<uint64_t>(i), seed), limit);
    if (is_aligned && i * 4 + 4 <= bytes) {
      reinterpret_cast<uint32_t*>(data)[i] = word;
      continue;
    }
    for (int64_t b = 0; b < 4 && i * 4 + b < bytes; ++b) {
      data[i * 4 + b] = static_cast<std::byte>(word >> 8 * b);
    }
  }
}

}  // namespace

void FillDummy(DummyKind kind, std::byte* data, int64_t bytes, uint32_t seed, int limit,
               device::Stream& stream) {
  if (bytes == 0) return;
  FillKernel<<<2048, 256, 0, static_cast<cudaStream_t>(stream.native_handle())>>>(kind, data, bytes,
                                                                                  seed, limit);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace fathom::model
