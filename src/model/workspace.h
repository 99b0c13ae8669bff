// Workspace: the scratch of a forward pass, allocated once for the limits. T is the activation
// type. One forward at a time. Sizes are for max_batched_tokens (M) rows; pages never touched take
// no memory on a CPU.
#pragma once

#include <memory>

#include "config/model_config.h"
#include "device/device.h"
#include "kernels/compressor/compressor.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "model/model.h"

namespace fathom::model {

template <typename T>
struct Workspace {
  // The batch, as kernels see it.
  int32_t* token_ids = nullptr;                      // [M]
  int32_t* token_seq = nullptr;                      // [M]
  int32_t* positions = nullptr;                      // [M]
  float* angles_plain = nullptr;                     // [M, rope_dim]
  float* angles_compressed = nullptr;                // [M, rope_dim]
  kernels::CompressedEntry* c4_entries = nullptr;    // [M / 4 + S]
  kernels::CompressedEntry* c128_entries = nullptr;  // [M / 128 + S]

  T* streams = nullptr;    // [M, 4, H]
  float* mixes = nullptr;  // [M, 24]
  float* post = nullptr;   // [M, 4]
  float* comb = nullptr;   // [M, 16]
  T* h = nullptr;          // [M, H], a sub-layer's normed input
  T* h_fp8 = nullptr;      // [M, H], quantized
  T* y = nullptr;          // [M, H], a sub-layer's output

  T* qr = nullptr;                    // [M, q_lora_rank]
  T* q = nullptr;                     // [M, heads, head_dim]; then the heads' outputs
  T* kv = nullptr;                    // [M, head_dim]
  T* grouped = nullptr;               // [M, o_groups * o_lora_rank] of all tensor ranks
  float* c = nullptr;                 // [M, 2 * head_dim]
  float* z = nullptr;                 // [M, 2 * head_dim]
  T* index_q = nullptr;               // [M, index heads, index head dim]
  T* index_projected = nullptr;       // [M, index heads]
  int32_t* selected = nullptr;        // [M, index_topk]
  int32_t* num_selected = nullptr;    // [M]
  uint64_t* index_scratch = nullptr;  // [threads, max_entries]
  int64_t max_entries = 0;
  float* attention_scratch = nullptr;  // [threads, AttentionScratchFloats]
  int64_t max_keys = 0;

  float* router_logits = nullptr;  // [M, experts]
  // With several data ranks D, for the tokens of all: D * M rows instead of M.
  int32_t* expert_ids = nullptr;    // [M, k]
  float* expert_weights = nullptr;  // [M, k]
  T* all_x = nullptr;               // [D * M, H], only there
  kernels::ExpertWorkspace experts;

  device::Buffer buffer;
};

struct WorkspaceSizes {
  ModelLimits limits;
  int num_threads = 1;
  int num_data_ranks = 1;
  int64_t grouped_size = 0;  // what wo_b reads
};

template <typename T>
Result<std::unique_ptr<Workspace<T>>> MakeWorkspace(const config::ModelConfig& config,
                                                    const WorkspaceSizes& sizes,
                                                    device::Device& device);

}  // namespace fathom::model
