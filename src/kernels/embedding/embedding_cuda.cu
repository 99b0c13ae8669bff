#include "kernels/embedding/embedding_cuda.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

__global__ void __launch_bounds__(256)
    EmbeddingKernel(const __grid_constant__ CudaEmbeddingParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t t = blockIdx.x, chunks = p.hidden / 8;
  const int source = p.token_sources[t];
  const int64_t id = source < 0 ? p.token_ids[t] : p.sampled[source];
  if (threadIdx.x == 0) p.resolved[t] = static_cast<int32_t>(id);
  const auto* row = reinterpret_cast<const uint4*>(p.table + id * p.hidden);
  auto* out = reinterpret_cast<uint4*>(p.streams + t * kNumStreams * p.hidden);
  for (int64_t i = threadIdx.x; i < chunks; i += 256) {
    const uint4 chunk = row[i];
    for (int s = 0; s < kNumStreams; ++s) out[s * chunks + i] = chunk;
  }
}

}  // namespace

void Launch(const CudaEmbeddingParams& params, device::Stream& stream) {
  if (params.num_tokens == 0) return;
  LaunchKernel(EmbeddingKernel, static_cast<unsigned>(params.num_tokens), 256, 0, stream, params);
}

}  // namespace fathom::kernels
