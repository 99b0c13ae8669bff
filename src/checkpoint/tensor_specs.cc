#include "checkpoint/tensor_specs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "checkpoint/synthetic_values.h"
#include "checkpoint/tensor_list.h"

namespace fathom::checkpoint {
namespace {

using config::DraftKind;
using config::ExpertDType;
using config::LayerKind;
using config::ModelConfig;
using config::RoutingKind;

constexpr int64_t kFp8Block = 128;  // rows and columns under one FP8 scale
constexpr int64_t kFp4Block = 32;   // columns under one FP4 scale

// Gains over 1/sqrt(fan_in) that keep every sub-layer's output near the size of the residual
// stream: averaging over keys (wo_a) and the gated product (w2) shrink it.
constexpr float kOutputGain = 2.0f;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
float FanInStd(int64_t fan_in) { return 1.0f / std::sqrt(static_cast<float>(fan_in)); }

class SpecBuilder {
 public:
  explicit SpecBuilder(const ModelConfig& config) : c_(config) {}

  std::vector<TensorSpec> Build() {
    const int64_t hidden = c_.hidden_size;
    AddNormal("embed.weight", TensorPart::kEmbedding, FileDType::kBF16, {c_.vocab_size, hidden}, 1);
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      AddBlock(fmt::format("layers.{}.", layer), c_.layer_kind(layer), c_.routing_kind(layer));
    }
    AddHeadMix("");
    AddNorm("norm", hidden);
    AddNormal("head.weight", TensorPart::kHead, FileDType::kBF16, {c_.vocab_size, hidden},
              FanInStd(hidden));
    draft_ = true;
    for (int i = 0; i < c_.num_draft_blocks; ++i) {
      AddBlock(fmt::format("mtp.{}.", i), LayerKind::kWindow, RoutingKind::kScore);
    }
    if (c_.draft == DraftKind::kMtp) AddMtp();
    if (c_.draft == DraftKind::kDSpark) AddDSpark();
    return std::move(specs_);
  }

 private:
  void Add(std::string name, TensorPart part, FileDType dtype, std::vector<int64_t> shape,
           const ValueRule& values) {
    TensorSpec spec;
    spec.info = MakeTensorInfo(std::move(name), dtype, std::move(shape));
    spec.part = part;
    spec.draft = draft_;
    spec.values = values;
    specs_.push_back(std::move(spec));
  }

  void AddNormal(std::string name, TensorPart part, FileDType dtype, std::vector<int64_t> shape,
                 float std, float mean = 0) {
    Add(std::move(name), part, dtype, std::move(shape),
        {.pattern = Pattern::kNormal, .mean = mean, .std = std});
  }

  void AddNorm(const std::string& name, int64_t width) {
    AddNormal(name + ".weight", TensorPart::kNorms, FileDType::kBF16, {width}, 0.1f, 1);
  }

  void AddFp8(const std::string& name, TensorPart part, int64_t rows, int64_t cols,
              float gain = 1) {
    Add(name + ".weight", part, FileDType::kF8E4M3, {rows, cols}, {.pattern = Pattern::kFp8Codes});
    Add(name + ".scale", part, FileDType::kF8E8M0,
        {CeilDiv(rows, kFp8Block), CeilDiv(cols, kFp8Block)},
        {.pattern = Pattern::kScales, .std = gain * FanInStd(cols), .code_std = kFp8CodeStd});
  }

  void AddFp4(const std::string& name, TensorPart part, int64_t rows, int64_t cols, float gain) {
    Add(name + ".weight", part, FileDType::kI8, {rows, cols / 2}, {.pattern = Pattern::kFp4Codes});
    Add(name + ".scale", part, FileDType::kF8E8M0, {rows, cols / kFp4Block},
        {.pattern = Pattern::kScales, .std = gain * FanInStd(cols), .code_std = kFp4CodeStd});
  }

  void AddHyperConnection(const std::string& name, int64_t rows, int64_t num_scales) {
    const int64_t flat = int64_t{c_.hc_mult} * c_.hidden_size;
    constexpr TensorPart kPart = TensorPart::kHyperConnections;
    AddNormal(name + "_fn", kPart, FileDType::kF32, {rows, flat}, FanInStd(flat));
    Add(name + "_base", kPart, FileDType::kF32, {rows}, {.pattern = Pattern::kHcBase, .std = 0.1f});
    AddNormal(name + "_scale", kPart, FileDType::kF32, {num_scales}, 0.02f, 0.2f);
  }

  void AddHeadMix(const std::string& prefix) {
    AddHyperConnection(prefix + "hc_head", c_.hc_mult, 1);
  }

  void AddCompressor(const std::string& name, TensorPart part, int64_t width, LayerKind kind) {
    const int64_t ratio = kind == LayerKind::kC4 ? 4 : 128;
    const int64_t columns = kind == LayerKind::kC4 ? 2 * width : width;
    const int64_t hidden = c_.hidden_size;
    AddNormal(name + ".ape", part, FileDType::kF32, {ratio, columns}, 0.5f);
    AddNormal(name + ".wkv.weight", part, FileDType::kBF16, {columns, hidden}, FanInStd(hidden));
    AddNormal(name + ".wgate.weight", part, FileDType::kBF16, {columns, hidden}, FanInStd(hidden));
    AddNorm(name + ".norm", width);
  }

  void AddAttention(const std::string& name, LayerKind kind) {
    constexpr TensorPart kPart = TensorPart::kAttention;
    const int64_t hidden = c_.hidden_size;
    const int64_t rank = c_.q_lora_rank;
    const int64_t out_rows = int64_t{c_.o_groups} * c_.o_lora_rank;
    const int64_t all_heads = int64_t{c_.num_heads} * c_.head_dim;
    AddFp8(name + ".wq_a", kPart, rank, hidden);
    AddNorm(name + ".q_norm", rank);
    AddFp8(name + ".wq_b", kPart, all_heads, rank);
    AddFp8(name + ".wkv", kPart, c_.head_dim, hidden);
    AddNorm(name + ".kv_norm", c_.head_dim);
    AddFp8(name + ".wo_a", kPart, out_rows, all_heads / c_.o_groups, kOutputGain);
    AddFp8(name + ".wo_b", kPart, hidden, out_rows);
    AddNormal(name + ".attn_sink", kPart, FileDType::kF32, {c_.num_heads}, 0.5f);
    if (kind == LayerKind::kWindow) return;
    AddCompressor(name + ".compressor", TensorPart::kCompressor, c_.head_dim, kind);
    if (kind == LayerKind::kC4) AddIndexer(name + ".indexer");
  }

  void AddIndexer(const std::string& name) {
    constexpr TensorPart kPart = TensorPart::kIndexer;
    const int64_t hidden = c_.hidden_size;
    AddFp8(name + ".wq_b", kPart, int64_t{c_.index_num_heads} * c_.index_head_dim, c_.q_lora_rank);
    AddNormal(name + ".weights_proj.weight", kPart, FileDType::kBF16, {c_.index_num_heads, hidden},
              FanInStd(hidden));
    AddCompressor(name + ".compressor", kPart, c_.index_head_dim, LayerKind::kC4);
  }

  void AddExpert(const std::string& name, int64_t rows, int64_t cols, float gain) {
    if (c_.expert_dtype == ExpertDType::kFp4) {
      AddFp4(name, TensorPart::kExperts, rows, cols, gain);
    } else {
      AddFp8(name, TensorPart::kExperts, rows, cols, gain);
    }
  }

  void AddExperts(const std::string& name, RoutingKind routing) {
    const int64_t hidden = c_.hidden_size;
    const int64_t inter = c_.moe_intermediate_size;
    AddNormal(name + ".gate.weight", TensorPart::kRouter, FileDType::kBF16,
              {c_.num_experts, hidden}, FanInStd(hidden));
    if (routing == RoutingKind::kHash) {
      Add(name + ".gate.tid2eid", TensorPart::kRouter, FileDType::kI64,
          {c_.vocab_size, c_.num_experts_per_token},
          {.pattern = Pattern::kExpertIds, .num_experts = c_.num_experts});
    } else {
      AddNormal(name + ".gate.bias", TensorPart::kRouter, FileDType::kF32, {c_.num_experts}, 0.01f);
    }
    for (int expert = 0; expert < c_.num_experts; ++expert) {
      const std::string prefix = fmt::format("{}.experts.{}.", name, expert);
      AddExpert(prefix + "w1", inter, hidden, 1);
      AddExpert(prefix + "w2", hidden, inter, kOutputGain);
      AddExpert(prefix + "w3", inter, hidden, 1);
    }
    constexpr TensorPart kShared = TensorPart::kSharedExperts;
    AddFp8(name + ".shared_experts.w1", kShared, inter, hidden);
    AddFp8(name + ".shared_experts.w2", kShared, hidden, inter, kOutputGain);
    AddFp8(name + ".shared_experts.w3", kShared, inter, hidden);
  }

  void AddBlock(const std::string& prefix, LayerKind kind, RoutingKind routing) {
    const int64_t mixes = int64_t{c_.hc_mult} * (2 + c_.hc_mult);
    AddHyperConnection(prefix + "hc_attn", mixes, 3);
    AddNorm(prefix + "attn_norm", c_.hidden_size);
    AddAttention(prefix + "attn", kind);
    AddHyperConnection(prefix + "hc_ffn", mixes, 3);
    AddNorm(prefix + "ffn_norm", c_.hidden_size);
    AddExperts(prefix + "ffn", routing);
  }

  void AddMtp() {
    const int64_t hidden = c_.hidden_size;
    for (const char* norm : {"mtp.0.enorm", "mtp.0.hnorm", "mtp.0.norm"}) AddNorm(norm, hidden);
    AddFp8("mtp.0.e_proj", TensorPart::kDraftHeads, hidden, hidden);
    AddFp8("mtp.0.h_proj", TensorPart::kDraftHeads, hidden, hidden);
    AddHeadMix("mtp.0.");
  }

  void AddDSpark() {
    constexpr TensorPart kPart = TensorPart::kDraftHeads;
    const int64_t hidden = c_.hidden_size;
    const int64_t rank = c_.dspark.markov_rank;
    const auto num_targets = static_cast<int64_t>(c_.dspark.target_layer_ids.size());
    AddFp8("mtp.0.main_proj", kPart, hidden, num_targets * hidden);
    AddNorm("mtp.0.main_norm", hidden);
    const std::string last = fmt::format("mtp.{}.", c_.num_draft_blocks - 1);
    AddNorm(last + "norm", hidden);
    AddHeadMix(last);
    AddNormal(last + "markov_head.markov_w1.weight", kPart, FileDType::kBF16, {c_.vocab_size, rank},
              1);
    AddNormal(last + "markov_head.markov_w2.weight", kPart, FileDType::kBF16, {c_.vocab_size, rank},
              FanInStd(rank));
    AddNormal(last + "confidence_head.proj.weight", kPart, FileDType::kF32, {1, hidden + rank},
              FanInStd(hidden + rank));
  }

  const ModelConfig& c_;
  bool draft_ = false;
  std::vector<TensorSpec> specs_;
};

}  // namespace

const char* PartName(const TensorSpec& spec) {
  if (spec.draft) return "draft";
  switch (spec.part) {
    case TensorPart::kEmbedding:
      return "embedding";
    case TensorPart::kHead:
      return "head";
    case TensorPart::kAttention:
      return "attention";
    case TensorPart::kCompressor:
      return "compressor";
    case TensorPart::kIndexer:
      return "indexer";
    case TensorPart::kRouter:
      return "router";
    case TensorPart::kExperts:
      return "experts";
    case TensorPart::kSharedExperts:
      return "shared_experts";
    case TensorPart::kHyperConnections:
      return "hyper_connections";
    case TensorPart::kNorms:
      return "norms";
    case TensorPart::kDraftHeads:
      return "draft";
  }
  return "";
}

std::vector<TensorSpec> MakeTensorSpecs(const ModelConfig& config) {
  return SpecBuilder(config).Build();
}

std::vector<TensorInfo> ExpectedTensors(const ModelConfig& config) {
  std::vector<TensorSpec> specs = MakeTensorSpecs(config);
  std::vector<TensorInfo> tensors;
  tensors.reserve(specs.size());
  for (TensorSpec& spec : specs) tensors.push_back(std::move(spec.info));
  return tensors;
}

}  // namespace fathom::checkpoint
