#include "model/roofline.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "base/check.h"

namespace fathom::model {
namespace {

using config::ModelConfig;
using config::ParallelConfig;
using kv_cache::KvLayout;

// FP8 with a scale byte per 128x128.
double Fp8Bytes(double rows, double columns) { return rows * columns * (1 + 1.0 / (128 * 128)); }
double Fp4Bytes(double rows, double columns) { return rows * columns * (0.5 + 1.0 / 32); }

// One [rows, columns] product for `tokens` tokens in `count` layers.
ProductCost Linear(std::string name, ProductType type, double bytes, double rows, double columns,
                   double tokens, double count) {
  return {.name = std::move(name),
          .type = type,
          .weight_bytes = bytes * count,
          .flops = 2 * rows * columns * tokens * count};
}

// The sum over the step's tokens of min(entries visible to the token, limit), one sequence.
// Token at position p sees (p + 1) / ratio entries.
double VisibleEntries(const StepShape& shape, int64_t ratio, double limit) {
  double sum = 0;
  for (int i = 0; i < shape.tokens_per_seq; ++i) {
    const int64_t entries = (shape.context_tokens + i + 1) / ratio;
    sum += std::min(static_cast<double>(entries), limit);
  }
  return sum;
}

void AddAttentionProjections(const ModelConfig& c, double tokens, std::vector<ProductCost>* out) {
  const double layers = c.num_layers;
  const double h = c.hidden_size;
  const double heads_dim = static_cast<double>(c.num_heads) * c.head_dim;
  const double down = c.q_lora_rank + c.head_dim;
  const double o_rank = static_cast<double>(c.o_groups) * c.o_lora_rank;
  const double group_width = heads_dim / c.o_groups;
  out->push_back(
      Linear("wq_a, wkv", ProductType::kFp8, Fp8Bytes(down, h), down, h, tokens, layers));
  out->push_back(Linear("wq_b", ProductType::kFp8, Fp8Bytes(heads_dim, c.q_lora_rank), heads_dim,
                        c.q_lora_rank, tokens, layers));
  out->push_back(Linear("wo_a", ProductType::kBf16, Fp8Bytes(o_rank, group_width), o_rank,
                        group_width, tokens, layers));
  out->push_back(Linear("wo_b", ProductType::kFp8, Fp8Bytes(h, o_rank), h, o_rank, tokens, layers));
}

void AddCompressors(const ModelConfig& c, double tokens, std::vector<ProductCost>* out) {
  const double h = c.hidden_size;
  const double c4 = c.num_layers_of(config::LayerKind::kC4);
  const double c128 = c.num_layers_of(config::LayerKind::kC128);
  // wkv and wgate; ratio 4 has twice the columns (the overlap).
  const double c4_rows = 2 * 2 * (c.head_dim + c.index_head_dim);
  const double c128_rows = 2.0 * c.head_dim;
  out->push_back(
      Linear("compressors, ratio 4", ProductType::kBf16, 2 * c4_rows * h, c4_rows, h, tokens, c4));
  out->push_back(Linear("compressors, ratio 128", ProductType::kBf16, 2 * c128_rows * h, c128_rows,
                        h, tokens, c128));
}

// Entries of a kind that one sequence's step reads at least once: all that any of its tokens may
// select.
double EntriesRead(double visible_at_end, double selected_per_token, int tokens) {
  return std::min(visible_at_end, selected_per_token * tokens);
}

void AddIndexer(const ModelConfig& c, const KvLayout& layout, const StepShape& shape,
                std::vector<ProductCost>* out) {
  const double layers = c.num_layers_of(config::LayerKind::kC4);
  const int64_t last = shape.context_tokens + shape.tokens_per_seq;
  const int64_t entries = last / 4;
  const auto visible = static_cast<double>(entries);
  if (layers == 0 || visible <= c.index_topk) return;  // everything is selected anyway
  const auto tokens = static_cast<double>(shape.own_tokens());
  const double width = static_cast<double>(c.index_num_heads) * c.index_head_dim;
  out->push_back(Linear("indexer wq_b", ProductType::kFp8, Fp8Bytes(width, c.q_lora_rank), width,
                        c.q_lora_rank, tokens, layers));
  out->push_back(Linear("indexer weights_proj", ProductType::kBf16,
                        2.0 * c.index_num_heads * c.hidden_size, c.index_num_heads, c.hidden_size,
                        tokens, layers));
  out->push_back({.name = "indexer scores",
                  .type = ProductType::kFp8,
                  .kv_bytes = layers * shape.num_seqs * visible * layout.index.entry_bytes,
                  .flops = layers * shape.num_seqs * 2 * width * VisibleEntries(shape, 4, 1e18)});
}

void AddAttention(const ModelConfig& c, const KvLayout& layout, const StepShape& shape,
                  std::vector<ProductCost>* out) {
  const int64_t last = shape.context_tokens + shape.tokens_per_seq;
  const double flops_per_key = 4.0 * c.num_heads * c.head_dim;  // scores and values
  const double entry_bytes = layout.window.entry_bytes;
  const double seqs = shape.num_seqs;
  const double window = std::min<double>(c.sliding_window, static_cast<double>(last));
  const double c4 = c.num_layers_of(config::LayerKind::kC4);
  const double c128 = c.num_layers_of(config::LayerKind::kC128);
  const auto add = [&](const char* name, double layers, double keys_read, double keys_scored) {
    if (layers == 0) return;
    out->push_back({.name = name,
                    .type = ProductType::kBf16,
                    .kv_bytes = layers * seqs * keys_read * entry_bytes,
                    .flops = layers * seqs * keys_scored * flops_per_key});
  };
  const int64_t entries4 = last / 4, entries128 = last / 128;
  // A chunk's own entries come from the step itself; at most a window's worth is read from the
  // cache.
  add("attention, window", c.num_layers, window, VisibleEntries(shape, 1, c.sliding_window));
  add("attention, ratio 4", c4,
      EntriesRead(static_cast<double>(entries4), c.index_topk, shape.tokens_per_seq),
      VisibleEntries(shape, 4, c.index_topk));
  add("attention, ratio 128", c128, static_cast<double>(entries128),
      VisibleEntries(shape, 128, 1e18));
}

// The experts of a rank that holds `held` of them: each is hit, or gets a token, by chance. Of
// several such ranks the one with most, to first order.
double OfBusiestRank(double mean, double variance, int num_ranks) {
  return mean + std::sqrt(variance) * ExpectedLargest(num_ranks);
}

void AddRoutedExperts(const RankShare& share, const StepShape& shape,
                      std::vector<ProductCost>* out) {
  const ModelConfig& c = share.shard.config;
  const double tokens = static_cast<double>(shape.own_tokens() + shape.other_tokens);
  const double layers = c.num_layers, h = c.hidden_size;
  const auto inner = static_cast<double>(share.shard.routed_up.size());
  const double e = c.num_experts, chosen = c.num_experts_per_token / e;
  const double hit =
      shape.distinct_experts > 0 ? shape.distinct_experts / e : 1 - std::pow(1 - chosen, tokens);
  const auto held = static_cast<double>(share.shard.experts.size());
  const int num_parts = share.parallel.gpus_have_whole_experts() ? share.parallel.stage_size() : 1;
  const double distinct =
      std::min(held, OfBusiestRank(held * hit, held * hit * (1 - hit), num_parts));
  const double pairs = std::min(
      tokens * c.num_experts_per_token,
      OfBusiestRank(held * tokens * chosen, held * tokens * chosen * (1 - chosen), num_parts));
  const double expert_bytes =
      c.expert_dtype == config::ExpertDType::kFp4 ? 3 * Fp4Bytes(inner, h) : 3 * Fp8Bytes(inner, h);
  out->push_back({.name = "routed experts",
                  .type = ProductType::kFp8,
                  .weight_bytes = layers * distinct * expert_bytes,
                  .flops = layers * pairs * 6 * inner * h});
}

void AddExperts(const RankShare& share, const StepShape& shape, std::vector<ProductCost>* out) {
  const ModelConfig& c = share.shard.config;
  const auto tokens = static_cast<double>(shape.own_tokens());
  const double layers = c.num_layers, h = c.hidden_size;
  const auto inner = static_cast<double>(share.shard.shared_up.size());
  AddRoutedExperts(share, shape, out);
  out->push_back({.name = "shared expert",
                  .type = ProductType::kFp8,
                  .weight_bytes = layers * c.num_shared_experts * 3 * Fp8Bytes(inner, h),
                  .flops = layers * tokens * c.num_shared_experts * 6 * inner * h});
  out->push_back(Linear("router gate", ProductType::kBf16, 2.0 * c.num_experts * h, c.num_experts,
                        h, tokens, layers));
}

}  // namespace

Result<RankShare> MakeRankShare(const ModelConfig& config, const ParallelConfig& parallel,
                                const config::RankPlace& place) {
  ASSIGN_OR_RETURN(checkpoint::Shard shard, checkpoint::MakeGpuShard(config, parallel, place));
  return RankShare{std::move(shard), parallel};
}

std::vector<ProductCost> StepCosts(const RankShare& share, const KvLayout& layout,
                                   const StepShape& shape) {
  const ModelConfig& c = share.shard.config;
  const auto tokens = static_cast<double>(shape.own_tokens());
  const double h = c.hidden_size;
  std::vector<ProductCost> out;
  if (c.o_groups > 0) AddAttentionProjections(c, tokens, &out);
  AddCompressors(c, tokens, &out);
  AddIndexer(c, layout, shape, &out);
  AddAttention(c, layout, shape, &out);
  AddExperts(share, shape, &out);
  const double mixes = (2 + c.hc_mult) * c.hc_mult;
  out.push_back(Linear("hyper-connection mixes", ProductType::kFp32, 4 * mixes * c.hc_mult * h,
                       mixes, c.hc_mult * h, tokens, 2.0 * c.num_layers));
  if (share.shard.has_head) {
    const auto rows = static_cast<double>(share.shard.vocabulary.size());
    out.push_back(
        Linear("head", ProductType::kBf16, 2.0 * rows * h, rows, h, shape.logits_rows, 1));
  }
  return out;
}

std::vector<ProductCost> StepCosts(const ModelConfig& config, const KvLayout& layout,
                                   const StepShape& shape) {
  const Result<RankShare> whole = MakeRankShare(config, {}, {});
  CHECK(whole.ok());
  return StepCosts(*whole, layout, shape);
}

std::vector<ExchangeCost> StepExchanges(const RankShare& share, const StepShape& shape) {
  const ModelConfig& c = share.shard.config;
  const ParallelConfig& p = share.parallel;
  const int tensor = p.tensor_parallel_size, ranks = p.stage_size();
  const double layers = c.num_layers, row_bytes = 2.0 * c.hidden_size;
  const auto own = static_cast<double>(shape.own_tokens());
  const auto but_own = [](int n) { return (n - 1.0) / n; };
  std::vector<ExchangeCost> out;
  if (share.shard.layers.begin > 0) {
    out.push_back({"streams from the stage before", 2, 1, own * c.hc_mult * row_bytes});
  }
  if (tensor > 1) {  // each sums a part, then gives it to all
    out.push_back(
        {"sum of the heads", tensor, layers, layers * 2 * but_own(tensor) * own * row_bytes});
  }
  if (p.data_parallel_size > 1) {
    const double fp8_row = c.hidden_size * (1 + 4.0 / 128), copies = p.data_parallel_size - 1;
    out.push_back(
        {"tokens for the experts", p.data_parallel_size, layers, layers * copies * own * fp8_row});
  }
  if (ranks > 1) {
    // Tensor ranks share out their rows, take the others' parts of these, and give each other sums.
    const double rows = ((ranks - 1.0) / tensor + but_own(tensor)) * own;
    out.push_back({"sum of the experts", ranks, layers, layers * rows * row_bytes});
  }
  if (tensor > 1 && share.shard.has_head) {
    out.push_back({"logits", tensor, 1, but_own(tensor) * shape.logits_rows * 4.0 * c.vocab_size});
  }
  return out;
}

double RooflineTime::floor_us() const {
  return std::max({bytes_us, compute_us, link_us}) + exchange_us;
}

RooflineTime Price(const std::vector<ProductCost>& costs, const DeviceCeilings& ceilings) {
  return Price(costs, {}, ceilings);
}

RooflineTime Price(const std::vector<ProductCost>& costs,
                   const std::vector<ExchangeCost>& exchanges, const DeviceCeilings& ceilings) {
  RooflineTime time;
  for (const ProductCost& cost : costs) {
    const double flops_per_s = cost.type == ProductType::kFp8    ? ceilings.fp8_flops
                               : cost.type == ProductType::kBf16 ? ceilings.bf16_flops
                                                                 : ceilings.bf16_flops / 3;
    time.bytes_us += (cost.weight_bytes + cost.kv_bytes) / ceilings.memory_bytes_per_s * 1e6;
    time.compute_us += cost.flops / flops_per_s * 1e6;
  }
  for (const ExchangeCost& exchange : exchanges) {
    time.link_us += exchange.bytes / ceilings.link_bytes_per_s * 1e6;
    time.exchange_us += exchange.count * ceilings.exchange_us(exchange.num_ranks);
  }
  return time;
}

// The mean of the largest: the integral of x over the density of the maximum.
double ExpectedLargest(int n) {
  constexpr double kEnd = 8, kStep = 1.0 / 64;  // beyond it lies nothing
  double sum = 0;
  for (int i = 0; n > 1 && i <= 2 * kEnd / kStep; ++i) {
    const double x = i * kStep - kEnd;
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
    const double below = 0.5 * std::erfc(-x / std::numbers::sqrt2);
    sum += x * n * density * std::pow(below, n - 1) * kStep;
  }
  return sum;
}

}  // namespace fathom::model
