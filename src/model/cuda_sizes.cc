#include "model/cuda_sizes.h"

#include <fmt/format.h>

#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/moe_route/moe_route_cuda.h"

namespace fathom::model {

Status CheckCudaSizes(const config::ModelConfig& c, const ModelLimits& limits,
                      int num_tensor_ranks) {
  constexpr int kMostTokens = (1 << 16) - 1;  // half of a word of routing's
  if (limits.max_batched_tokens > kMostTokens) {
    return InvalidArgument(
        fmt::format("--max-num-batched-tokens is {}: a GPU's step has at most {} (and "
                    "--max-num-seqs is as much at most)",
                    limits.max_batched_tokens, kMostTokens));
  }
  const auto refuse = [](const char* name, int64_t value, const char* expected) {
    return BadModel(fmt::format("{} is {}: the GPU kernels run {}", name, value, expected));
  };
  // Tensor ranks exchange packets of two logits each, and every rank has to send some.
  if (num_tensor_ranks > 1 && (c.vocab_size % 2 != 0 || c.vocab_size < 64 * num_tensor_ranks)) {
    return BadModel(fmt::format("vocab_size is {}: {} tensor ranks run an even one of at least {}",
                                c.vocab_size, num_tensor_ranks, 64 * num_tensor_ranks));
  }
  if (c.hc_mult != kernels::kNumStreams) return refuse("hc_mult", c.hc_mult, "4");
  if (c.head_dim != 512) return refuse("head_dim", c.head_dim, "512");
  if (c.rope_dim != 64) return refuse("qk_rope_head_dim", c.rope_dim, "64");
  if (c.index_head_dim != 128) return refuse("index_head_dim", c.index_head_dim, "128");
  if (c.sliding_window != 128) return refuse("sliding_window", c.sliding_window, "128");
  if (c.hidden_size > 8192) return refuse("hidden_size", c.hidden_size, "at most 8192");
  if (c.q_lora_rank > 2048) return refuse("q_lora_rank", c.q_lora_rank, "at most 2048");
  if (c.num_heads > 128) return refuse("num_attention_heads", c.num_heads, "at most 128");
  if (c.o_groups > 1 && c.o_lora_rank % 128 != 0) {
    return refuse("o_lora_rank", c.o_lora_rank, "multiples of 128");
  }
  // Two rows of a matrix are written at once.
  if (c.vocab_size % 2 != 0) return refuse("vocab_size", c.vocab_size, "even ones");
  if (c.index_num_heads > 64 || c.index_num_heads % 2 != 0) {
    return refuse("index_n_heads", c.index_num_heads, "even numbers up to 64");
  }
  if (c.index_topk > kernels::kMaxIndexTopk) {
    return refuse("index_topk", c.index_topk, "at most 1024");
  }
  if (c.num_experts > kernels::kMaxExperts || c.num_experts % 2 != 0) {
    return refuse("n_routed_experts", c.num_experts, "even numbers up to 512");
  }
  if (c.num_experts_per_token > kernels::kMaxChosen) {
    return refuse("num_experts_per_tok", c.num_experts_per_token, "at most 16");
  }
  return OkStatus();
}

}  // namespace fathom::model
