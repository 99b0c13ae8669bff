#include "model/workspace.h"

#include <algorithm>

#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "model/carver.h"

namespace fathom::model {
namespace {

// Tokens whose experts run at once: enough rows per expert, and scratch that stays small.
constexpr int64_t kMaxExpertTokens = 1024;

using CpuCarver = Carver<64>;

template <typename T>
void CarveExperts(const config::ModelConfig& c, const WorkspaceSizes& sizes, CpuCarver& carver,
                  kernels::ExpertWorkspace& w) {
  w.max_tokens = std::min<int64_t>(sizes.limits.max_batched_tokens, kMaxExpertTokens);
  w.max_intermediate = c.moe_intermediate_size;
  const int64_t pairs = w.max_tokens * (c.num_experts_per_token + 1);
  T* t = nullptr;
  T* y = nullptr;
  carver.Take(t, pairs * w.max_intermediate);
  carver.Take(y, pairs * c.hidden_size);
  w.t = t;
  w.y = y;
  carver.Take(w.pair_token, pairs);
  carver.Take(w.pair_of, pairs);
  carver.Take(w.pair_weight, pairs);
  carver.Take(w.first_pair, c.num_experts + 2);
}

template <typename T>
void Carve(const config::ModelConfig& c, const WorkspaceSizes& sizes, CpuCarver& carver,
           Workspace<T>& w) {
  const ModelLimits& limits = sizes.limits;
  const int num_threads = sizes.num_threads;
  const int64_t m = limits.max_batched_tokens;
  carver.Take(w.token_ids, m);
  carver.Take(w.token_seq, m);
  carver.Take(w.positions, m);
  carver.Take(w.angles_plain, m * c.rope_dim);
  carver.Take(w.angles_compressed, m * c.rope_dim);
  carver.Take(w.c4_entries, m / 4 + limits.max_num_seqs);
  carver.Take(w.c128_entries, m / 128 + limits.max_num_seqs);
  carver.Take(w.streams, m * c.hc_mult * c.hidden_size);
  carver.Take(w.mixes, m * kernels::kNumMixes);
  carver.Take(w.post, m * c.hc_mult);
  carver.Take(w.comb, m * c.hc_mult * c.hc_mult);
  for (T** buffer : {&w.h, &w.h_fp8, &w.y}) carver.Take(*buffer, m * c.hidden_size);
  carver.Take(w.qr, m * c.q_lora_rank);
  carver.Take(w.q, m * c.num_heads * c.head_dim);
  carver.Take(w.kv, m * c.head_dim);
  carver.Take(w.grouped, m * sizes.grouped_size);
  carver.Take(w.c, m * 2 * c.head_dim);
  carver.Take(w.z, m * 2 * c.head_dim);
  carver.Take(w.index_q, m * c.index_num_heads * c.index_head_dim);
  carver.Take(w.index_projected, m * c.index_num_heads);
  carver.Take(w.selected, m * c.index_topk);
  carver.Take(w.num_selected, m);
  w.max_entries = limits.max_model_len / 4 + 1;
  carver.Take(w.index_scratch, num_threads * w.max_entries);
  w.max_keys = c.sliding_window + std::max<int64_t>(c.index_topk, limits.max_model_len / 128 + 1);
  carver.Take(w.attention_scratch,
              num_threads * kernels::AttentionScratchFloats(c.num_heads, c.head_dim, w.max_keys));
  carver.Take(w.router_logits, m * c.num_experts);
  const int64_t all = m * sizes.num_data_ranks;
  carver.Take(w.expert_ids, all * c.num_experts_per_token);
  carver.Take(w.expert_weights, all * c.num_experts_per_token);
  if (sizes.num_data_ranks > 1) carver.Take(w.all_x, all * c.hidden_size);
  CarveExperts<T>(c, sizes, carver, w.experts);
}

}  // namespace

template <typename T>
Result<std::unique_ptr<Workspace<T>>> MakeWorkspace(const config::ModelConfig& config,
                                                    const WorkspaceSizes& sizes,
                                                    device::Device& device) {
  auto workspace = std::make_unique<Workspace<T>>();
  CpuCarver counter(nullptr);
  Carve(config, sizes, counter, *workspace);
  ASSIGN_OR_RETURN(workspace->buffer, device.Allocate(counter.bytes()));
  CpuCarver pieces(workspace->buffer.data());
  Carve(config, sizes, pieces, *workspace);
  return workspace;
}

template Result<std::unique_ptr<Workspace<BFloat16>>> MakeWorkspace(const config::ModelConfig&,
                                                                    const WorkspaceSizes&,
                                                                    device::Device&);
template Result<std::unique_ptr<Workspace<float>>> MakeWorkspace(const config::ModelConfig&,
                                                                 const WorkspaceSizes&,
                                                                 device::Device&);

}  // namespace fathom::model
