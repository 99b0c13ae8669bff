// Weight products on a GPU: y[t, n] = sum over k of x[t, k] w[n, k] for weights in tiles
// (weight_tiles.h; FP4 ones are the experts', grouped_gemm/) and activations in tiles (tiles.cuh).
// Several products that read the same or different activations go in one launch. Sums are FP32:
// within a block of 128 columns the tensor core's own for FP8, across blocks FP32; the result is
// rounded once. With few tokens a cluster of blocks shares the columns and adds its parts in one
// order, so results repeat bit for bit. Up to 32 tokens: gemm_stream_cuda.h; from 512 on, and for
// prefill whatever the number: gemm_large.h, where a token's bits depend on neither the number of
// tokens nor its place among them.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/collective/peer_view.h"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/launch_number.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

enum class GemmOutput : int32_t {
  kBf16,      // row-major BF16
  kF32,       // row-major FP32
  kNumbered,  // kBf16's pairs as numbered words (numbered_words.cuh)
  kFp8Tiles,  // rounded to BF16, then FP8 per 128 columns of y; w.rows is a multiple of 128
};

struct GemmProblem {
  TiledMatrix w;
  Fp8Tiles x_fp8;    // for kFp8
  Bf16Tiles x_bf16;  // for kBf16 and kFp8AsBf16
  // Rows of w are split evenly into groups; group g reads columns [g * cols, (g + 1) * cols) of x.
  int groups = 1;
  GemmOutput output = GemmOutput::kBf16;
  void* y = nullptr;     // kBf16, kF32
  int64_t y_stride = 0;  // values from token to token
  Fp8Tiles y_fp8;
};

inline constexpr int kMaxGemmProblems = 7;
inline constexpr int kMaxNumberedTokens = 8;

struct CudaGemmParams {
  GemmProblem problems[kMaxGemmProblems] = {};
  int num_problems = 0;
  int64_t num_tokens = 0;  // x tiles hold at least this many, rounded up to PaddedTokens
  bool prefill = false;    // the same bits for any number of tokens
  Mirrors mirrors = {};    // of y, FP8 or BF16 in whole 128 columns; prefill of many tokens
  bool many_rows = false;  // even of a rank: enough for all multiprocessors without split columns
  // Of kNumbered, of few tokens. The first of several problems may be that: its rows come before
  // the others', so that who awaits its words need not wait for the launch's end. Or the only one
  // of early x.
  LaunchNumber number = {};
  // Of one problem, up to 8 tokens: x was there before the launch just before began, beside which
  // this one runs, and which it awaits last.
  bool x_is_early = false;
  int max_blocks = 0;     // then: that one has the other multiprocessors; 0: shares all of them
  bool few_rows = false;  // of a rank, or of all: columns are split as far as pays
};

// The rows that x tiles must hold for a number of tokens: what a block may read. Rows past
// num_tokens hold any finite values.
inline int64_t PaddedTokens(int64_t num_tokens, bool prefill = false) {
  if (prefill && num_tokens <= 64) return 64;
  if (num_tokens <= 8) return 8;
  if (num_tokens <= 16) return 16;
  if (num_tokens <= 32) return 32;
  if (num_tokens <= 64) return 64;
  return (num_tokens + 127) / 128 * 128;
}

void Launch(const CudaGemmParams& params, device::Stream& stream);

// Of few tokens the columns are parts of the same size, whose sums are added as a tree: the first
// two, the next two, then these. So a matrix of the first half of the columns, or of another range
// that is one of the tree's (TiledMatrix::matrix_cols), gives FP32 sums of which the whole matrix's
// are the sum, bit for bit. How many parts; 1 where the columns are not split.
int NumColumnParts(const CudaGemmParams& params);

// Such a range of up to 16 tokens. The sums go to y, and as packets (SumPacket) to all ranks, where
// a boundary adds up those of all (hyper_connection_cuda.h).
struct CudaColumnSumsParams {
  CudaGemmParams product;  // one, kF32 of FP8
  PeerExchange exchange;   // size 1: to y alone
};
void Launch(const CudaColumnSumsParams& params, device::Stream& stream);

}  // namespace fathom::kernels
