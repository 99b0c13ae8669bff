#include "model/cuda_sizes.h"

#include <fmt/format.h>

#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/moe_route/moe_route_cuda.h"

namespace fathom::model {

Status CheckCudaSizes(const config::ModelConfig& c, int num_tensor_ranks) {
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
  if (c.index_num_heads > 64) return refuse("index_n_heads", c.index_num_heads, "at most 64");
  if (c.num_heads > 128) return refuse("num_attention_heads", c.num_heads, "at most 128");
  if (c.num_experts > kernels::kMaxExperts) {
    return refuse("n_routed_experts", c.num_experts, "at most 512");
  }
  return OkStatus();
}

}  // namespace fathom::model
