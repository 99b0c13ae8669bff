#include "comm/cuda_collectives.h"

namespace fathom::comm {

Status CudaCollectives::GatherTiles(const kernels::CudaGatherTilesParams& params,
                                    device::Stream& stream) {
  kernels::GatheredMatrix matrices[2];
  kernels::MatricesOf(params, size(), matrices);
  return Gather(matrices, stream);
}

Status CudaCollectives::GatherOutput(const kernels::CudaGatherOutputParams& params,
                                     device::Stream& stream) {
  const int64_t hidden = params.columns.begin[size()];
  if (params.output.y != params.y || params.output.pair_of != nullptr) {
    kernels::Launch(kernels::CudaCombineParams{.output = params.output,
                                               .num_tokens = params.num_tokens,
                                               .hidden = hidden,
                                               .first_column = params.columns.begin[rank()],
                                               .num_columns = params.columns.count(rank()),
                                               .y = params.y},
                    stream);
  }
  const auto matrix = kernels::GatheredColumns(params.y, params.num_tokens, sizeof(__nv_bfloat16),
                                               params.columns, size());
  return Gather({&matrix, 1}, stream);
}

Status CudaCollectives::GatherLogits(const kernels::CudaGatherColumnsParams& params,
                                     device::Stream& stream) {
  const auto matrix = kernels::GatheredColumns(params.values, params.num_rows, sizeof(float),
                                               params.columns, size());
  return Gather({&matrix, 1}, stream);
}

}  // namespace fathom::comm
