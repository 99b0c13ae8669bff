// What a plan takes as the workspace against what is allocated. Needs no GPU.
#include <gtest/gtest.h>

#include <utility>

#include "checkpoint/synthetic_checkpoint.h"
#include "kernels/collective/expert_exchange_cuda.h"
#include "kernels/collective/peer_view.h"
#include "model/cuda_workspace.h"
#include "model/memory_plan.h"

namespace fathom::model {
namespace {

TEST(CudaMemoryPlan, TheWorkspaceOfAStepIsWhatIsAllocated) {
  for (const char* preset : {"flash", "pro"}) {
    const auto config =
        checkpoint::ParseModelConfig(checkpoint::PresetConfigText(preset).value(), preset);
    for (const int tensor : {1, 2, 8}) {
      const config::ParallelConfig parallel{.tensor_parallel_size = tensor};
      const checkpoint::Shard shard =
          checkpoint::MakeShard(*config, parallel, {.tensor = tensor - 1}).value();
      for (const int tokens : {2048, 8192}) {
        for (const int64_t context : {int64_t{32768}, int64_t{1} << 20}) {
          const ModelLimits limits{tokens, 64, context};
          const int64_t head_rows =
              MostHeadRows(limits, shard.config.num_heads, config->num_heads, tensor);
          const int64_t shared = SharedWorkspaceBytes(
              *config, limits, int64_t{config->o_groups} * config->o_lora_rank);
          const int64_t allocated =
              CudaWorkspaceBytes(shard.config, limits, head_rows) +
              (tensor > 1 ? kernels::MakePeerLayout(tensor, shared).bytes : shared);
          const int64_t planned = StepWorkspaceBytes(shard, parallel, limits);
          EXPECT_GT(planned, allocated - allocated / 100) << preset << " " << tensor;
          EXPECT_LT(planned, allocated + allocated / 20) << preset << " " << tensor;
        }
      }
    }
  }
}

TEST(CudaMemoryPlan, RanksWithWholeExpertsTakeWhatIsPlanned) {
  const auto config =
      checkpoint::ParseModelConfig(checkpoint::PresetConfigText("flash").value(), "flash");
  const int64_t grouped = int64_t{config->o_groups} * config->o_lora_rank;
  for (const auto& [tensor, data] : {std::pair(1, 2), {1, 8}, {2, 1}, {8, 1}, {2, 2}, {4, 2}}) {
    const config::ParallelConfig parallel{
        .tensor_parallel_size = tensor, .data_parallel_size = data, .enable_expert_parallel = true};
    const auto shard = checkpoint::MakeGpuShard(*config, parallel, {}).value();
    for (const int tokens : {2048, 8192}) {
      const ModelLimits limits{tokens, 64, 32768};
      const int64_t shared = SharedWorkspaceBytes(*config, limits, grouped, data);
      const auto exchange = kernels::MakeExpertExchangeLayout(
          data, tensor, tokens, config->hidden_size, config->num_experts_per_token);
      const int64_t allocated =
          CudaWorkspaceBytes(shard.config, limits, MostHeadRows(limits, shard.config.num_heads),
                             data) +
          (tensor > 1 ? kernels::MakePeerLayout(tensor, shared).bytes : shared) +
          kernels::MakePeerLayout(parallel.stage_size(), exchange.bytes).bytes;
      const int64_t planned = StepWorkspaceBytes(shard, parallel, limits);
      EXPECT_GT(planned, allocated - allocated / 100) << tensor << " " << data << " " << tokens;
      EXPECT_LT(planned, allocated + allocated / 20) << tensor << " " << data << " " << tokens;
    }
  }
}

}  // namespace
}  // namespace fathom::model
