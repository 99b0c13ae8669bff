// The inner loops of the CPU kernels, one table of them per instruction set. Every table gives the
// same bits.
//
// Canonical dot product of length k: 16 FP32 accumulators start at 0; for k ascending, accumulator
// k mod 16 becomes fma(x[k], w[k], accumulator); then a[i] + a[i + 8] for i < 8, again with 4, 2
// and 1. An output depends on its row and column only, so results are the same for any batch, chunk
// or thread count. A weight value is code * scale in FP32 (exact; a scale is a power of two).
#pragma once

#include <cstdint>
#include <span>

#include "base/float_types.h"
#include "kernels/weight_matrix.h"

namespace fathom::kernels {

// y[i][j] = dot(x row i, w row first_row + j) for i < m, j < n.
struct DotBlock {
  const float* x = nullptr;  // [m, w.cols], rows x_stride apart
  int64_t x_stride = 0;
  int m = 0;
  WeightMatrix w;
  int64_t first_row = 0;
  int n = 0;
  float* panel =
      nullptr;  // scratch for n rows of w in FP32, or null: then weights are widened on each use
  float* y = nullptr;  // [m, n], rows y_stride apart
  int64_t y_stride = 0;
};

// o[i][c] = fma(p[i][j], v[j][c], o[i][c]) for j = 0, 1, ... v.rows - 1 in this order; i < m.
struct WeightedSum {
  const float* p = nullptr;  // [m, v.rows], rows p_stride apart
  int64_t p_stride = 0;
  int m = 0;
  WeightMatrix v;      // FP32 or BF16; v.cols is a multiple of 16
  float* o = nullptr;  // [m, v.cols], rows o_stride apart
  int64_t o_stride = 0;
};

struct SimdOps {
  const char* name;
  void (*dot_block)(const DotBlock&);
  void (*weighted_sum)(const WeightedSum&);
  float (*dot)(const float* a, const float* b, int64_t size);
  void (*bf16_to_float)(const BFloat16* in, float* out, int64_t size);
  // out = code * scale; size is a multiple of 16.
  void (*fp8_to_float)(const uint8_t* codes, float scale, float* out, int64_t size);
  // size is a multiple of 16; two codes a byte.
  void (*fp4_to_float)(const uint8_t* codes, float scale, float* out, int64_t size);
  // out = e^in (exp_constants.h); in place or apart.
  void (*exp)(const float* in, float* out, int64_t size);
  // Nearest even, as BFloat16; the second keeps FP32, in place or apart.
  void (*float_to_bf16)(const float* in, BFloat16* out, int64_t size);
  void (*round_to_bf16)(const float* in, float* out, int64_t size);
  float (*max_magnitude)(const float* x, int64_t size);
  // x / scale to the nearest code, clamped; scale is a power of two. Values (code * scale), FP8
  // codes, or FP4 codes, two a byte (size is even).
  void (*round_to_fp8)(const float* x, float scale, float* values, int64_t size);
  void (*fp8_codes)(const float* x, float scale, uint8_t* codes, int64_t size);
  void (*fp4_codes)(const float* x, float scale, uint8_t* codes, int64_t size);
};

// The fastest table that this processor runs.
const SimdOps& Simd();
// Plain C++: the reference, and what other processors run.
const SimdOps& ScalarOps();
// Every table that this processor runs, the reference first.
std::span<const SimdOps* const> UsableSimdOps();

}  // namespace fathom::kernels
