// The two kinds of CudaExpertRanks, one object a rank. cuda_group.h makes them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_expert_ranks.h"
#include "comm/cuda_group.h"

namespace fathom::comm {

using CudaExpertGroup = std::vector<std::shared_ptr<CudaExpertRanks>>;

// Memory that kernels of the others write to. Errors as CudaPeers::Make.
Result<CudaExpertGroup> MakePeerExpertRanks(std::span<const int> gpus,
                                            const CudaExpertOptions& options);

// Gathers by NCCL or over host memory: what `all` does, made for these GPUs with
// ExpertGroupOptions. kDevice.
Result<CudaExpertGroup> MakeGatheredExpertRanks(const CudaGroup& all, std::span<const int> gpus,
                                                const CudaExpertOptions& options);
CudaGroupOptions ExpertGroupOptions(size_t num_ranks, const CudaExpertOptions& options);

// Of a stage of so many ranks.
kernels::ExpertExchangeLayout ExpertLayout(size_t num_ranks, const CudaExpertOptions& options);

// The rows of pairs, which never change, into `memory` of this layout on the GPU. kDevice.
Status WritePairRows(int gpu, const kernels::ExpertExchangeLayout& layout, std::byte* memory);

}  // namespace fathom::comm
