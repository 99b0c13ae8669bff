// Blocks split by role, all of 256 threads: first one a sequence and compressor (the long ones:
// they read and write state), then groups of tokens whose entries need this step's rows only, then
// one a token for its KV row and one a token for its query row, or of many tokens one for eight, a
// warp a row. The query products, which read only weights before they wait, may start at once,
// beside the input products.
#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "kernels/attention_prologue/prologue_rows.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = kPrologueThreads;
constexpr int kMaxQueryRank = 8 * kThreads;
constexpr int kManyTokens = 256;  // whose rows are warps'

// Blocks of each role.
struct Roles {
  int sequences = 0;  // of each compressor
  int groups = 0;     // likewise
  int compressors = 0;
  int tokens = 0;   // KV rows
  int queries = 0;  // query rows
};

__device__ void RowsOfWarps(const CudaAttentionPrologueParams& p, const Roles& roles, int block) {
  AllowSuccessor();
  WaitForPredecessor();
  const int kv_blocks = (roles.tokens + kRowWarps - 1) / kRowWarps;
  const int row = (block < kv_blocks ? block : block - kv_blocks) * kRowWarps +
                  static_cast<int>(threadIdx.x) / 32;
  if (block < kv_blocks) {
    if (row < roles.tokens) KvRowOfWarp(p, row);
  } else if (row < roles.queries) {
    QueryRowOfWarp(p, row);
  }
}

// Registers for a block beside two blocks of products.
template <int kRatio, bool kByWarps>
__global__ void __maxnreg__(kByWarps ? 80 : 72)
    AttentionPrologueKernel(const __grid_constant__ CudaAttentionPrologueParams p, Roles roles) {
  __shared__ CompressorShared shared;
  int block = blockIdx.x;
  if constexpr (kRatio != 0) {
    const int per_compressor = roles.sequences + roles.groups;
    const bool index = block >= per_compressor;
    if (block < per_compressor * roles.compressors) {
      block -= index ? per_compressor : 0;
      if constexpr (kRatio == 128) {
        if (block < roles.sequences) return CompressSequenceC128(p, block, shared);
        return CompressFresh<128, kHeadDim>(p, p.main, block - roles.sequences, shared);
      } else if (index) {
        if (block < roles.sequences) {
          return CompressSequenceC4<kIndexDim>(p, p.index, block, shared);
        }
        return CompressFresh<4, kIndexDim>(p, p.index, block - roles.sequences, shared);
      } else {
        if (block < roles.sequences) return CompressSequenceC4<kHeadDim>(p, p.main, block, shared);
        return CompressFresh<4, kHeadDim>(p, p.main, block - roles.sequences, shared);
      }
    }
    block -= per_compressor * roles.compressors;
  }
  if constexpr (kByWarps) return RowsOfWarps(p, roles, block);
  if (block < roles.tokens) return KvRow(p, block, shared.sums);
  QueryRow(p, block - roles.tokens, shared.sums);
}

template <int kRatio>
void Launch(const CudaAttentionPrologueParams& p, const Roles& roles, device::Stream& stream) {
  const bool by_warps = p.batch.num_tokens >= kManyTokens;
  const auto blocks = [&](int rows) {
    return by_warps ? (rows + kRowWarps - 1) / kRowWarps : rows;
  };
  const int all = (roles.sequences + roles.groups) * roles.compressors + blocks(roles.tokens) +
                  blocks(roles.queries);
  const auto kernel =
      by_warps ? AttentionPrologueKernel<kRatio, true> : AttentionPrologueKernel<kRatio, false>;
  LaunchKernel(kernel, static_cast<unsigned>(all), kThreads, 0, stream, p, roles);
}

}  // namespace

void Launch(const CudaAttentionPrologueParams& p, device::Stream& stream) {
  if (p.batch.num_tokens == 0) return;
  CHECK_LE(p.q_lora_rank, kMaxQueryRank);
  CHECK_EQ(p.q_lora_rank % 128, 0);
  CHECK(p.index_dtype != config::IndexKeyDType::kFp32);
  Roles roles{.tokens = p.has_entries ? p.batch.num_tokens : 0,
              .queries = p.num_queries < 0 ? p.batch.num_tokens : p.num_queries};
  if (p.has_entries && p.ratio != 0) {
    roles.sequences = p.batch.num_seqs;
    roles.groups = (p.batch.num_tokens + p.ratio - 1) / p.ratio;
    roles.compressors = p.ratio == 4 ? 2 : 1;
  }
  p.ratio == 0   ? Launch<0>(p, roles, stream)
  : p.ratio == 4 ? Launch<4>(p, roles, stream)
                 : Launch<128>(p, roles, stream);
}

}  // namespace fathom::kernels
