#include "model/cuda_workspace.h"

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/collective/expert_exchange_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/sparse_attention/sparse_attention_cuda.h"
#include "model/carver.h"
#include "model/deepseek_v4_cuda.h"
#include "model/token_shares.h"

namespace fathom::model {
namespace {

constexpr int64_t kMaxIndexWorkspaceBytes = int64_t{1} << 30;

using CudaCarver = Carver<1024>;

// Steps of up to m tokens whose experts' rows or tiles may be the most.
std::array<int64_t, 5> StepSizes(int64_t m) {
  return {std::min<int64_t>(kernels::kDirectTokens, m), std::min<int64_t>(64, m),
          std::min<int64_t>(192, m), std::min<int64_t>(512, m), m};
}

// Of a step, whose experts a rank runs.
int64_t MostTokens(const ModelLimits& limits, int num_data_ranks) {
  return num_data_ranks * kernels::ExpertSlots(num_data_ranks, limits.max_batched_tokens);
}

void CarveState(int64_t num_tokens, CudaCarver& carver, kernels::HyperConnectionState& state) {
  carver.Take(state.post, num_tokens * 4);
  carver.Take(state.comb_logits, num_tokens * 16);
  carver.Take(state.comb, num_tokens * 16);
}

void Carve(const config::ModelConfig& c, const ModelLimits& limits, int64_t head_rows,
           int num_data_ranks, CudaCarver& carver, CudaWorkspace& w) {
  const int64_t m = limits.max_batched_tokens, rows = kernels::PaddedTokens(m, /*prefill=*/true);
  const int64_t hidden = c.hidden_size;
  const int64_t max_blocks = MaxTableBlocks(limits);
  w.batch_bytes = StepBytes(m, limits.max_num_seqs, max_blocks, (m + c.sliding_window) / 64 + 4);
  carver.Take(w.frequencies, 64);
  carver.Take(w.step_number, 1);
  carver.Take(w.queries_begun, 1);
  carver.Take(w.index_words,
              kernels::kMaxNumberedTokens * c.index_num_heads * c.index_head_dim / 2);
  carver.Take(w.query_packets, kernels::kQueryPackets);
  carver.Take(w.route_input, kernels::ToldWords(hidden));
  carver.Take(w.route_board, 1);
  carver.Take(w.plan.board, 1);
  const int64_t kept_bytes = carver.bytes();
  carver.Take(w.batch, w.batch_bytes);
  w.scratch = w.batch;
  carver.Take(w.token_ids, m);
  carver.Take(w.angles_plain, m * 64);
  carver.Take(w.angles_compressed, m * 64);
  CarveState(m, carver, w.attn_state);
  carver.Take(w.boundary_scratch, kernels::BoundaryScratchFloats(m, hidden));
  carver.Take(w.h, rows * hidden);
  carver.Take(w.qr, m * c.q_lora_rank);
  carver.Take(w.index_projected, m * c.index_num_heads);
  carver.Take(w.qr_fp8, rows * c.q_lora_rank);
  carver.Take(w.qr_scales, rows * c.q_lora_rank / 128);
  carver.Take(w.q, head_rows * c.head_dim);
  carver.Take(w.index_q, m * c.index_num_heads * c.index_head_dim);
  carver.Take(w.selected, m * c.index_topk);
  carver.Take(w.num_selected, m);
  const auto tokens = static_cast<int>(m), entries = static_cast<int>(max_blocks * 64);
  w.index_workspace_bytes =
      std::max(kernels::MinIndexWorkspaceBytes(tokens, c.index_num_heads, entries),
               std::min(kernels::IndexWorkspaceBytes(tokens, c.index_num_heads, entries),
                        kMaxIndexWorkspaceBytes));
  carver.Take(w.index_workspace, w.index_workspace_bytes);
  carver.Take(w.attention_out, head_rows * c.head_dim);
  carver.Take(w.attention_workspace, kernels::SparseAttentionWorkspaceBytes(c.num_heads) / 4);
  carver.Take(w.grouped_parts, kernels::kGroupedParts * int64_t{c.o_groups} * c.o_lora_rank);
  carver.Take(w.output_sums, std::min(m, kernels::LargeBoundaryTokens(hidden) - 1) * hidden);
  carver.Take(w.router_scores, m * c.num_experts);
  w.pair_rows = MaxPairRowsOf(c, limits, num_data_ranks);
  const int64_t most_tokens = MostTokens(limits, num_data_ranks);
  int64_t max_tiles = 0, num_progress = 0;
  for (const int64_t n : StepSizes(most_tokens)) {
    max_tiles =
        std::max(max_tiles, kernels::MaxExpertTiles(n, c.num_experts, c.num_experts_per_token));
    num_progress =
        std::max(num_progress, kernels::NumProgress(n, c.num_experts, c.num_experts_per_token));
  }
  carver.Take(w.plan.num_tiles, 2);
  carver.Take(w.plan.tiles, max_tiles);
  carver.Take(w.plan.pair_of, most_tokens * c.num_experts_per_token);
  carver.Take(w.plan.pair_weight, w.pair_rows);
  carver.Take(w.plan.progress, num_progress);
  carver.Take(w.gathered, w.pair_rows * hidden);
  carver.Take(w.gathered_scales, w.pair_rows * hidden / 128);
  carver.Take(w.pairs, w.pair_rows * hidden);
  w.scratch_bytes = carver.bytes() - kept_bytes;
  carver.Take(w.selected_words, c.index_topk);
  carver.Take(w.query_words, int64_t{c.num_heads} * c.head_dim / 2);
  carver.Take(w.index_lists, kernels::IndexListsBytes());
}

void CarveShared(const config::ModelConfig& c, const ModelLimits& limits, int64_t grouped_columns,
                 int num_data_ranks, CudaCarver& carver, CudaWorkspace& w) {
  const int64_t m = limits.max_batched_tokens, rows = kernels::PaddedTokens(m, /*prefill=*/true);
  const int64_t pair_rows = MaxPairRowsOf(c, limits, num_data_ranks);
  const int64_t intermediate = c.moe_intermediate_size, hidden = c.hidden_size;
  carver.Take(w.streams, rows * 4 * hidden);
  CarveState(rows, carver, w.ffn_state);
  carver.Take(w.kv, rows * c.head_dim);
  carver.Take(w.compressed, rows * 4 * c.head_dim);
  carver.Take(w.index_compressed, rows * 4 * c.index_head_dim);
  carver.Take(w.h_fp8, rows * hidden);
  carver.Take(w.h_scales, rows * hidden / 128);
  carver.Take(w.expert_ids, c.num_layers * rows * c.num_experts_per_token);
  carver.Take(w.expert_weights, rows * c.num_experts_per_token);
  carver.Take(w.grouped_fp8, rows * grouped_columns);
  carver.Take(w.grouped_scales, rows * grouped_columns / 128);
  carver.Take(w.y, m * c.hidden_size);
  carver.Take(w.t, pair_rows * intermediate);
  carver.Take(w.t_scales, pair_rows * intermediate / 128);
  carver.Take(w.t_packets, kernels::NumPackets(c.num_experts_per_token, intermediate));
  int64_t num_arrivals = 0;
  for (const int64_t n : StepSizes(m)) {
    if (num_data_ranks > 1) continue;
    if (kernels::AreLargeExperts(n, /*prefill=*/false, c.expert_dtype)) continue;
    num_arrivals =
        std::max(num_arrivals,
                 kernels::NumArrivals(n, c.num_experts, c.num_experts_per_token, intermediate));
  }
  carver.Take(w.t_arrived, num_arrivals);
  carver.Take(w.shared_index_lists, kernels::SharedIndexListsBytes());
}

}  // namespace

int64_t MaxTableBlocks(const ModelLimits& limits) {
  return limits.max_model_len / kv_cache::kBlockTokens + 1;
}

int64_t WindowStride(int64_t max_window_pages) {
  return static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(max_window_pages, 8))));
}

int64_t StepBytes(int64_t num_tokens, int64_t num_seqs, int64_t max_blocks,
                  int64_t max_window_pages) {
  const int64_t row = 5 + max_blocks + WindowStride(max_window_pages);
  const int64_t ints = 5 * num_tokens + num_seqs * row + 1;
  return ints * 4 + 16 * 256;  // each array begins at a multiple of 256 bytes
}

int64_t MaxPairRowsOf(const config::ModelConfig& c, const ModelLimits& limits, int num_data_ranks) {
  int64_t rows = 0;
  for (const int64_t n : StepSizes(MostTokens(limits, num_data_ranks))) {
    rows = std::max(rows, kernels::MaxPairRows(n, c.num_experts, c.num_experts_per_token));
  }
  return rows;
}

int64_t SharedWorkspaceBytes(const config::ModelConfig& config, const ModelLimits& limits,
                             int64_t grouped_columns, int num_data_ranks) {
  CudaWorkspace ignored;
  CudaCarver sizes(nullptr);
  CarveShared(config, limits, grouped_columns, num_data_ranks, sizes, ignored);
  return sizes.bytes();
}

int64_t CudaWorkspaceBytes(const config::ModelConfig& config, const ModelLimits& limits,
                           int64_t head_rows, int num_data_ranks) {
  CudaWorkspace ignored;
  CudaCarver sizes(nullptr);
  Carve(config, limits, head_rows, num_data_ranks, sizes, ignored);
  return sizes.bytes();
}

int64_t MostHeadRows(const ModelLimits& limits, int num_heads, int64_t all_heads, int num_ranks) {
  const int64_t tokens = limits.max_batched_tokens;
  return std::max(kernels::PaddedTokens(tokens, /*prefill=*/true) * num_heads,
                  LargestShare(tokens, num_ranks) * all_heads);
}

comm::CudaGroupOptions GroupOptions(const config::ModelConfig& config, const ModelLimits& limits,
                                    int num_ranks, int num_data_ranks) {
  const int64_t t_row_bytes = MaxPairRowsOf(config, limits) * 128;  // a block of columns
  return {
      .hidden = config.hidden_size,
      .shared_bytes = SharedWorkspaceBytes(
          config, limits, int64_t{config.o_groups} * config.o_lora_rank, num_data_ranks),
      .max_row_bytes = std::max<int64_t>(t_row_bytes * num_ranks, int64_t{config.vocab_size} * 4)};
}

Result<std::unique_ptr<CudaWorkspace>> MakeCudaWorkspace(
    const config::ModelConfig& config, const ModelLimits& limits, int64_t grouped_columns,
    int64_t head_rows, std::byte* shared_memory, int num_data_ranks, device::Device& device) {
  auto workspace = std::make_unique<CudaWorkspace>();
  ASSIGN_OR_RETURN(workspace->buffer,
                   device.Allocate(CudaWorkspaceBytes(config, limits, head_rows, num_data_ranks)));
  CudaCarver pieces(workspace->buffer.data());
  Carve(config, limits, head_rows, num_data_ranks, pieces, *workspace);
  if (shared_memory == nullptr) {
    ASSIGN_OR_RETURN(
        workspace->shared_buffer,
        device.Allocate(SharedWorkspaceBytes(config, limits, grouped_columns, num_data_ranks)));
    shared_memory = workspace->shared_buffer.data();
  }
  CudaCarver shared(shared_memory);
  CarveShared(config, limits, grouped_columns, num_data_ranks, shared, *workspace);
  return workspace;
}

}  // namespace fathom::model
