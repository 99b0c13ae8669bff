// ModelConfig: the sizes and constants of one checkpoint, as typed values. Filled and validated by
// checkpoint/ from config.json (the official field names stand behind each member); a value,
// immutable after load, any thread. Layer, routing and draft kinds are data here, never branches on
// a model name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fathom::config {

// How a model is computed. kOfficial rounds where DeepSeek's reference rounds; kFp32 rounds
// nothing.
enum class Numerics { kOfficial, kFp32 };

enum class LayerKind { kWindow, kC4, kC128 };  // compress ratio 0, 4, 128
enum class RoutingKind { kHash, kScore };
enum class ExpertDType { kFp4, kFp8 };
// What an index key is stored as: kFp4 (official) or kFp8 with official numerics, kFp32 with fp32
// numerics.
enum class IndexKeyDType { kFp4, kFp8, kFp32 };
enum class DraftKind { kNone, kMtp, kDSpark };

// YaRN for the compressed layers' rope; always on there.
struct YarnConfig {
  double factor = 16;
  double original_max_position_embeddings = 65536;
  double beta_fast = 32;
  double beta_slow = 1;
};

struct DSparkConfig {
  int block_size = 0;
  int markov_rank = 0;
  std::vector<int> target_layer_ids;
  int noise_token_id = 0;
};

struct ModelConfig {
  int vocab_size = 0;
  int hidden_size = 0;
  int num_layers = 0;  // num_hidden_layers: without draft blocks
  int64_t max_position_embeddings = 0;
  int bos_token_id = 0;
  int eos_token_id = 1;
  double rms_norm_eps = 1e-6;

  // Attention. One KV head; K and V are the same entry of head_dim values, the last rope_dim
  // rotated.
  int num_heads = 0;
  int head_dim = 512;
  int rope_dim = 64;
  int q_lora_rank = 0;
  int o_lora_rank = 0;
  int o_groups = 0;
  int sliding_window = 128;
  std::vector<int> compress_ratios;  // one per layer, then one per draft block
  double rope_theta = 10000;
  double compress_rope_theta = 160000;
  YarnConfig yarn;

  // Indexer (ratio-4 layers).
  int index_num_heads = 0;
  int index_head_dim = 128;
  int index_topk = 0;

  // Experts.
  int num_experts = 0;  // n_routed_experts
  int num_experts_per_token = 0;
  int num_shared_experts = 1;
  int moe_intermediate_size = 0;
  int num_hash_layers = 0;
  double routed_scaling_factor = 1;
  double swiglu_limit = 0;  // 0: no clamp
  ExpertDType expert_dtype = ExpertDType::kFp4;

  // Hyper-connections.
  int hc_mult = 4;
  int hc_sinkhorn_iters = 20;
  double hc_eps = 1e-6;

  // Drafts.
  DraftKind draft = DraftKind::kNone;
  int num_draft_blocks = 0;  // 1 for MTP, the number of stages for DSpark
  DSparkConfig dspark;       // meaningful when draft is kDSpark

  // `layer` may reach into the draft blocks: num_layers + i.
  LayerKind layer_kind(int layer) const;
  // Draft blocks are never hashed.
  RoutingKind routing_kind(int layer) const;
  int num_layers_of(LayerKind kind) const;  // draft blocks left out
};

}  // namespace fathom::config
