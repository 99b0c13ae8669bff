// ParseModelConfig: config.json with the official field names to a ModelConfig. Nothing is guessed:
// a field that the mathematics needs has to be there, and a value that this engine does not compute
// is refused.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/config_fields.h"

namespace fathom::checkpoint {
namespace {

using config::DraftKind;
using config::ExpertDType;
using config::ModelConfig;

constexpr const char* kModelType = "deepseek_v4";
constexpr const char* kArchitecture = "DeepseekV4ForCausalLM";

// Far beyond any published model, and small enough that no product of sizes overflows.
constexpr int64_t kMaxVocabSize = 1 << 22;
constexpr int64_t kMaxWidth = 1 << 16;
constexpr int64_t kMaxLayers = 512;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxExperts = 2048;
constexpr int64_t kMaxPositions = 1 << 24;  // every position is exact in FP32, as rope needs it
constexpr int64_t kMaxDraftBlocks = 16;
constexpr int64_t kMaxDraftTokens = 64;
constexpr double kMaxRopeBase = 1e9;

// A string field for a message: empty when it is none.
std::string StringField(const json::Value& object, std::string_view field) {
  const json::Value* value = object.Find(field);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

void CheckArchitecture(const json::Value& root, ConfigFields& fields) {
  const std::string model_type = StringField(root, "model_type");
  std::string architecture;
  if (const json::Value* list = root.Find("architectures"); list != nullptr && list->is_array() &&
                                                            !list->items().empty() &&
                                                            list->items()[0].is_string()) {
    architecture = list->items()[0].AsString();
  }
  const bool known =
      model_type == kModelType || (model_type.empty() && architecture == kArchitecture);
  if (known && (architecture.empty() || architecture == kArchitecture)) return;
  if (model_type.empty() && architecture.empty()) {
    fields.Fail(fmt::format("model_type is missing, expected \"{}\"", kModelType));
    return;
  }
  fields.Fail(fmt::format("this is model_type {} ({}); Fathom serves {}",
                          model_type.empty() ? "(none)" : json::Escape(model_type),
                          architecture.empty() ? "no architecture" : json::Escape(architecture),
                          kModelType));
}

// An integer that is also a multiple of 128, the block of quantization.
int BlockedSize(ConfigFields& fields, std::string_view field) {
  const int64_t size = fields.Int(field, 1, kMaxWidth);
  if (fields.ok() && size % 128 != 0) fields.Refuse(field, "a multiple of 128");
  return static_cast<int>(size);
}

int Size(ConfigFields& fields, std::string_view field, int64_t low, int64_t high) {
  return static_cast<int>(fields.Int(field, low, high));
}

void ParseGeneral(ConfigFields& f, ModelConfig& c) {
  c.vocab_size = Size(f, "vocab_size", 1, kMaxVocabSize);
  c.hidden_size = BlockedSize(f, "hidden_size");
  c.num_layers = Size(f, "num_hidden_layers", 1, kMaxLayers);
  c.max_position_embeddings = f.Int("max_position_embeddings", 1, kMaxPositions);
  c.bos_token_id = Size(f, "bos_token_id", 0, std::max(c.vocab_size - 1, 0));
  c.eos_token_id = Size(f, "eos_token_id", 0, std::max(c.vocab_size - 1, 0));
  c.rms_norm_eps = f.Number("rms_norm_eps", 1e-12, 1e-2);
  f.ExpectString("hidden_act", "silu");
  f.ExpectBool("attention_bias", false);
  f.ExpectBool("tie_word_embeddings", false);
  c.hc_mult = Size(f, "hc_mult", 4, 4);
  c.hc_sinkhorn_iters = Size(f, "hc_sinkhorn_iters", 1, 1000);
  c.hc_eps = f.Number("hc_eps", 1e-12, 1e-2);
}

void ParseAttention(ConfigFields& f, ModelConfig& c) {
  f.ExpectInt("num_key_value_heads", 1);
  c.num_heads = Size(f, "num_attention_heads", 1, kMaxHeads);
  c.head_dim = Size(f, "head_dim", 512, 512);
  c.rope_dim = Size(f, "qk_rope_head_dim", 64, 64);
  c.sliding_window = Size(f, "sliding_window", 128, 128);
  c.q_lora_rank = BlockedSize(f, "q_lora_rank");
  c.o_groups = Size(f, "o_groups", 1, kMaxHeads);
  c.o_lora_rank = Size(f, "o_lora_rank", 1, kMaxWidth);
  if (!f.ok()) return;
  if (c.num_heads % c.o_groups != 0) {
    f.Refuse("o_groups", fmt::format("a divisor of num_attention_heads {}", c.num_heads));
  }
  if (int64_t{c.o_groups} * c.o_lora_rank % 128 != 0) {
    f.Refuse("o_lora_rank",
             fmt::format("o_groups {} times it to be a multiple of 128", c.o_groups));
  }
  c.index_num_heads = Size(f, "index_n_heads", 1, kMaxHeads);
  c.index_topk = Size(f, "index_topk", 1, kMaxWidth);
  c.index_head_dim = Size(f, "index_head_dim", c.rope_dim, 128);
  if (f.ok() && c.index_head_dim != 64 && c.index_head_dim != 128) {
    f.Refuse("index_head_dim", "a power of two: 64 or 128");
  }
}

void ParseRope(ConfigFields& f, ModelConfig& c) {
  c.rope_theta = f.Number("rope_theta", 2, kMaxRopeBase);
  c.compress_rope_theta = f.Number("compress_rope_theta", 2, kMaxRopeBase);
  ConfigFields yarn = f.Object("rope_scaling");
  if (!f.ok()) return;
  yarn.OneOf(yarn.Has("rope_type") ? "rope_type" : "type", {"yarn"});
  c.yarn.factor = yarn.Number("factor", 1, 1e4);
  c.yarn.original_max_position_embeddings =
      yarn.Number("original_max_position_embeddings", 1, static_cast<double>(kMaxPositions));
  c.yarn.beta_slow = yarn.NumberOr("beta_slow", 1e-3, 1e4, 1);
  c.yarn.beta_fast = yarn.NumberOr("beta_fast", 1e-3, 1e4, 32);
  if (yarn.ok() && c.yarn.beta_fast < c.yarn.beta_slow) {
    yarn.Refuse("beta_fast", fmt::format("at least beta_slow {}", c.yarn.beta_slow));
  }
}

void ParseExperts(ConfigFields& f, ModelConfig& c) {
  c.num_experts = Size(f, "n_routed_experts", 1, kMaxExperts);
  c.num_experts_per_token = Size(f, "num_experts_per_tok", 1, std::max(c.num_experts, 1));
  c.num_shared_experts = static_cast<int>(f.IntOr("n_shared_experts", 1, 1, 1));
  c.moe_intermediate_size = BlockedSize(f, "moe_intermediate_size");
  c.num_hash_layers = Size(f, "num_hash_layers", 0, std::max(c.num_layers, 0));
  c.routed_scaling_factor = f.Number("routed_scaling_factor", 1e-6, 1e6);
  c.swiglu_limit = f.Number("swiglu_limit", 0, 1e6);
  f.ExpectString("scoring_func", "sqrtsoftplus");
  f.ExpectString("topk_method", "noaux_tc");
  f.ExpectBool("norm_topk_prob", true);
  const bool fp8 = f.Has("expert_dtype") && f.OneOf("expert_dtype", {"fp4", "fp8"}) == 1;
  c.expert_dtype = fp8 ? ExpertDType::kFp8 : ExpertDType::kFp4;
}

void ParseQuantization(ConfigFields& f) {
  ConfigFields q = f.Object("quantization_config");
  if (!f.ok()) return;
  q.OneOf("quant_method", {"fp8"});
  q.OneOf("scale_fmt", {"ue8m0"});
  q.ExpectString("fmt", "e4m3");
  q.ExpectString("activation_scheme", "dynamic");
  if (q.Ints("weight_block_size", 1, kMaxWidth) != std::vector<int>{128, 128} && q.ok()) {
    q.Refuse("weight_block_size", "[128,128]");
  }
}

void ParseDSpark(ConfigFields& f, ModelConfig& c) {
  c.dspark.block_size = Size(f, "dspark_block_size", 1, kMaxDraftTokens);
  c.dspark.markov_rank = Size(f, "dspark_markov_rank", 1, kMaxWidth);
  c.dspark.noise_token_id = Size(f, "dspark_noise_token_id", 0, std::max(c.vocab_size - 1, 0));
  c.dspark.target_layer_ids = f.Ints("dspark_target_layer_ids", 0, std::max(c.num_layers - 1, 0));
  if (!f.ok()) return;
  const std::vector<int>& ids = c.dspark.target_layer_ids;
  if (ids.empty() ||
      std::adjacent_find(ids.begin(), ids.end(), std::greater_equal<>()) != ids.end()) {
    f.Refuse("dspark_target_layer_ids", "at least one layer, ascending");
  }
}

// The draft kind, and how many of compress_ratios are its blocks'.
void ParseDrafts(ConfigFields& f, ModelConfig& c) {
  const int64_t block_size = f.IntOr("dspark_block_size", 0, kMaxDraftTokens, 0);
  // A DSpark config counts its stages here; there is one MTP block.
  const int64_t nextn =
      f.IntOr("num_nextn_predict_layers", 0, block_size > 0 ? kMaxDraftBlocks : 1, 0);
  c.compress_ratios = f.Ints("compress_ratios", 0, 128);
  if (!f.ok()) return;
  const int64_t extra = static_cast<int64_t>(c.compress_ratios.size()) - c.num_layers;
  if (block_size > 0) {
    c.draft = DraftKind::kDSpark;
    c.num_draft_blocks = static_cast<int>(std::clamp<int64_t>(extra, 1, kMaxDraftBlocks));
    f.ExpectInt("n_mtp_layers", c.num_draft_blocks);
    ParseDSpark(f, c);
  } else if (nextn > 0) {
    c.draft = DraftKind::kMtp;
    c.num_draft_blocks = 1;
  }
  if (extra != c.num_draft_blocks) {
    f.Fail(fmt::format(
        "compress_ratios has {} entries, expected {}: one for each of num_hidden_layers {} "
        "and of {} draft blocks",
        c.compress_ratios.size(), c.num_layers + c.num_draft_blocks, c.num_layers,
        c.num_draft_blocks));
  }
}

void CheckRatios(ConfigFields& f, const ModelConfig& c) {
  for (size_t i = 0; i < c.compress_ratios.size(); ++i) {
    const int ratio = c.compress_ratios[i];
    const bool draft = i >= static_cast<size_t>(c.num_layers);
    if (ratio == 0 || (!draft && (ratio == 4 || ratio == 128))) continue;
    f.Fail(fmt::format("compress_ratios[{}] is {}, expected {}", i, ratio,
                       draft ? "0 for a draft block" : "0, 4 or 128"));
    return;
  }
}

}  // namespace

Result<ModelConfig> ParseModelConfig(std::string_view text, const std::string& name) {
  Result<json::Value> root = json::Parse(text, {.max_depth = 32, .max_nodes = 100'000});
  if (!root.ok()) return BadModel(fmt::format("{}: {}", name, root.status().message()));
  if (!root->is_object()) return BadModel(fmt::format("{}: expected a JSON object", name));
  Status status;
  ConfigFields fields(*root, name, "", &status);
  ModelConfig config;
  CheckArchitecture(*root, fields);
  ParseGeneral(fields, config);
  ParseAttention(fields, config);
  ParseRope(fields, config);
  ParseExperts(fields, config);
  ParseQuantization(fields);
  ParseDrafts(fields, config);
  CheckRatios(fields, config);
  RETURN_IF_ERROR(status);
  return config;
}

}  // namespace fathom::checkpoint
