#include "base/check.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/gemm_large.h"
#include "kernels/gemm/gemm_stream_cuda.h"
#include "kernels/gemm/input_alone_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int64_t kMaxCols = 65536;
constexpr int64_t kMaxEarlyCols = 1024;  // one part of the columns, whole stages

void Check(const CudaGemmParams& params) {
  CHECK_LE(params.num_problems, kMaxGemmProblems);
  for (int i = 0; i < params.num_problems; ++i) {
    const GemmProblem& p = params.problems[i];
    CHECK(p.w.kind != TileKind::kFp4);
    CHECK_EQ(p.w.cols % TileMatrixCols(p.w.kind), 0);
    CHECK_LE(p.w.cols, kMaxCols);
    CHECK_EQ(p.w.rows % (2 * p.groups), 0);
    CHECK(params.mirrors.count == 0 || (params.prefill && p.w.rows % 128 == 0 &&
                                        p.output != GemmOutput::kF32 && p.y_stride % 8 == 0));
    CHECK(p.groups == 1 || p.w.rows / p.groups % 128 == 0);
    CHECK(p.output != GemmOutput::kFp8Tiles ||
          (p.w.rows % 128 == 0 && p.w.kind == TileKind::kFp8AsBf16));
    CHECK_EQ(p.output == GemmOutput::kNumbered, i == 0 && params.number.of_step != nullptr);
    CHECK_EQ(p.w.kind == TileKind::kFp8AsBf16, params.problems[0].w.kind == TileKind::kFp8AsBf16);
  }
  const TiledMatrix& first = params.problems[0].w;
  CHECK(!params.x_is_early ||
        (params.num_problems == 1 && params.num_tokens <= 8 && !params.prefill &&
         first.kind == TileKind::kFp8 && first.cols <= kMaxEarlyCols && first.cols % 256 == 0));
  CHECK(params.number.of_step == nullptr ||
        (params.num_tokens <= kMaxNumberedTokens && !params.prefill &&
         (params.x_is_early || params.num_problems > 1) &&
         params.problems[0].w.kind != TileKind::kFp8AsBf16));
}

}  // namespace

void Launch(const CudaGemmParams& params, device::Stream& stream) {
  if (params.num_tokens == 0) return;
  Check(params);
  for (int i = 0; i < params.num_problems; ++i) CHECK(params.problems[i].w.is_whole());
  if (IsLarge(params)) return LaunchLarge(params, stream);
  if (AreInputAlone(params)) return LaunchInputAlone(params, stream);
  LaunchGemmStream(params, stream);
}

void Launch(const CudaColumnSumsParams& params, device::Stream& stream) {
  const GemmProblem& p = params.product.problems[0];
  Check(params.product);
  CHECK(p.w.kind == TileKind::kFp8 && p.output == GemmOutput::kF32);
  CHECK(params.product.num_problems == 1 && params.product.num_tokens <= 16);
  CHECK(!params.product.prefill);
  CHECK_LE(params.product.num_tokens * p.w.rows / 2, kMaxPackets);
  LaunchColumnSums(params, stream);
}

}  // namespace fathom::kernels
