// The scratch of a forward pass on a GPU, allocated once for the limits. One forward at a time.
// Every piece is sized for M = max_batched_tokens rows, tiles for PaddedTokens(M, prefill). What
// tensor ranks complete for each other is as large on each and lies in their shared memory
// (comm/cuda_collectives.h), and so does what they give each other of shared out tokens
// (token_shares.h). What experts need is sized for the places of all data ranks' tokens
// (kernels::ExpertSlots).
#pragma once

#include <cuda_bf16.h>

#include <memory>

#include "config/model_config.h"
#include "device/device.h"
#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/tiles.cuh"
#include "model/model.h"

namespace fathom::model {

struct CudaWorkspace {
  // Kept from step to step.
  float* frequencies = nullptr;  // [2, 32]: plain, compressed
  // Likewise; behind all else, as what lies near the words of ranks is found faster there.
  std::byte* index_lists = nullptr;
  uint2* selected_words = nullptr;             // [index_topk]
  uint2* query_words = nullptr;                // [heads * 256]
  uint32_t* step_number = nullptr;             // kernels::LaunchNumber
  uint32_t* queries_begun = nullptr;           // likewise
  uint2* route_input = nullptr;                // [kernels::ToldWords(hidden)], zero at first
  uint2* index_words = nullptr;                // [kMaxNumberedTokens, index heads * 64]
  uint4* query_packets = nullptr;              // [kernels::kQueryPackets]
  kernels::RouteBoard* route_board = nullptr;  // zero at first, as plan.board

  // All of the rest, but for what is shared: nothing in it outlives a step.
  std::byte* scratch = nullptr;
  int64_t scratch_bytes = 0;

  // The step, as one copy from the host leaves it.
  std::byte* batch = nullptr;
  int64_t batch_bytes = 0;

  int32_t* token_ids = nullptr;        // [M], those sampled on the device, too
  float* angles_plain = nullptr;       // [M, 64]
  float* angles_compressed = nullptr;  // [M, 64]
  kernels::HyperConnectionState attn_state;
  float* boundary_scratch = nullptr;
  __nv_bfloat16* h = nullptr;                // tiles [M, H]
  __nv_bfloat16* qr = nullptr;               // [M, q_lora_rank]
  __nv_bfloat16* index_projected = nullptr;  // [M, index heads]
  uint8_t* qr_fp8 = nullptr;                 // tiles [M, q_lora_rank]
  float* qr_scales = nullptr;
  __nv_bfloat16* q = nullptr;            // [M, heads * 512], or of all heads some tokens'
  __nv_bfloat16* index_q = nullptr;      // [M, index heads * 128]
  int32_t* selected = nullptr;           // [M, index_topk]
  int32_t* num_selected = nullptr;       // [M]
  std::byte* index_workspace = nullptr;  // of the selection, then a prompt's widened keys
  int64_t index_workspace_bytes = 0;
  __nv_bfloat16* attention_out = nullptr;  // tiles, likewise
  float* attention_workspace = nullptr;
  float* grouped_parts = nullptr;  // [kGroupedParts, grouped columns], of one token on a rank
  float* output_sums = nullptr;    // [up to 16, H], of a rank's columns of wo_b
  float* router_scores = nullptr;  // [M, experts]
  kernels::ExpertPlan plan;
  int64_t pair_rows = 0;        // MaxPairRowsOf
  uint8_t* gathered = nullptr;  // tiles [pair rows, H]
  float* gathered_scales = nullptr;
  __nv_bfloat16* pairs = nullptr;  // [pair rows, H]

  // Shared, likewise gone after a step, but for flags. R: the rows of the step's tiles.
  __nv_bfloat16* streams = nullptr;  // [M, 4, H]
  kernels::HyperConnectionState ffn_state;
  __nv_bfloat16* kv = nullptr;        // [M, 512]
  float* compressed = nullptr;        // [M, 4 * 512]: c, z
  float* index_compressed = nullptr;  // [M, 4 * 128]
  uint8_t* h_fp8 = nullptr;           // tiles [M, H]
  float* h_scales = nullptr;
  int32_t* expert_ids = nullptr;    // [layers, R, k]
  float* expert_weights = nullptr;  // [R, k]
  uint8_t* grouped_fp8 = nullptr;   // tiles [M, grouped columns]
  float* grouped_scales = nullptr;
  __nv_bfloat16* y = nullptr;  // [M, H]
  uint8_t* t = nullptr;        // tiles [pair rows, I]
  float* t_scales = nullptr;
  uint4* t_packets = nullptr;     // kept from step to step, as what follows
  uint64_t* t_arrived = nullptr;  // of ranks (kernels::ExpertRank)
  std::byte* shared_index_lists = nullptr;

  device::Buffer buffer, shared_buffer;
};

// `grouped_columns`: what wo_b reads, of all tensor ranks.
int64_t SharedWorkspaceBytes(const config::ModelConfig& config, const ModelLimits& limits,
                             int64_t grouped_columns, int num_data_ranks = 1);
// Without the shared part. `head_rows`: MostHeadRows.
int64_t CudaWorkspaceBytes(const config::ModelConfig& config, const ModelLimits& limits,
                           int64_t head_rows, int num_data_ranks = 1);
// `shared_memory`: SharedWorkspaceBytes on the device, which outlive it; null: it has its own.
Result<std::unique_ptr<CudaWorkspace>> MakeCudaWorkspace(
    const config::ModelConfig& config, const ModelLimits& limits, int64_t grouped_columns,
    int64_t head_rows, std::byte* shared_memory, int num_data_ranks, device::Device& device);

// Rows of queries, one a token and head, at most: all tokens' of the `num_heads` that are a rank's
// own, or those of all heads of its share of the tokens. all_heads 0: tokens are not shared out.
int64_t MostHeadRows(const ModelLimits& limits, int num_heads, int64_t all_heads = 0,
                     int num_ranks = 1);

// Rows of a step's pairs of tokens and experts, at most.
int64_t MaxPairRowsOf(const config::ModelConfig& config, const ModelLimits& limits,
                      int num_data_ranks = 1);

// The longest row of a step's block tables.
int64_t MaxTableBlocks(const ModelLimits& limits);

// What rows of window tables are padded to: few different ones, so that few graphs serve decodes,
// whose sequences hold more pages after a chunk of a prompt than later.
int64_t WindowStride(int64_t max_window_pages);

// Bytes of a step's arrays for S sequences and T tokens.
int64_t StepBytes(int64_t num_tokens, int64_t num_seqs, int64_t max_blocks,
                  int64_t max_window_pages);

}  // namespace fathom::model
