#include "base/check.h"
#include "kernels/collective/copy_words.cuh"
#include "kernels/collective/expert_pieces_cuda.h"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// By one warp.
__device__ void CopyRow(const __nv_bfloat16* from, __nv_bfloat16* to, int64_t hidden) {
  CopyRowOfWords(from, to, static_cast<int>(hidden / 8));
}

__device__ __nv_bfloat16* PartOf(const ExpertPiece& piece, int rank, int64_t pair) {
  return piece.parts + (rank * piece.count + pair - piece.first) * piece.hidden;
}

// One warp a pair of the piece.
__device__ int64_t OwnPair(const ExpertPiece& piece) {
  return piece.first + int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
}

__global__ void __launch_bounds__(kThreads)
    PutPieceKernel(const __grid_constant__ CudaPutPieceParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t pair = OwnPair(p.piece);
  if (pair >= p.piece.first + p.piece.count || p.pair_of[pair] < 0) return;
  CopyRow(p.y + p.pair_of[pair] * p.piece.hidden, PartOf(p.piece, p.rank, pair), p.piece.hidden);
}

__global__ void __launch_bounds__(kThreads)
    TakePieceKernel(const __grid_constant__ CudaTakePieceParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t pair = OwnPair(p.piece), own = pair - p.first_own;
  if (pair >= p.piece.first + p.piece.count || own < 0 || own >= p.num_own) return;
  const int32_t expert = p.expert_ids[pair];
  if (expert < 0) return;
  int rank = 0;
  while (rank + 1 < p.num_ranks && expert >= p.experts.begin[rank + 1]) ++rank;
  CopyRow(PartOf(p.piece, rank, pair), p.y + own * p.piece.hidden, p.piece.hidden);
}

unsigned NumBlocks(const ExpertPiece& piece) {
  CHECK_EQ(piece.hidden % 8, 0);
  CHECK_GT(piece.count, 0);
  return static_cast<unsigned>((piece.count + kWarps - 1) / kWarps);
}

}  // namespace

void Launch(const CudaPutPieceParams& p, device::Stream& stream) {
  LaunchKernel(PutPieceKernel, NumBlocks(p.piece), kThreads, 0, stream, p);
}

void Launch(const CudaTakePieceParams& p, device::Stream& stream) {
  LaunchKernel(TakePieceKernel, NumBlocks(p.piece), kThreads, 0, stream, p);
}

}  // namespace fathom::kernels
