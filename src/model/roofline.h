// Roofline: the bytes and FLOPs that one rank's step cannot do without, product by product, and
// what it exchanges with other ranks, from the config alone. Pure functions.
//
// What a step must at least move: every weight of the rank that it uses once (experts: the distinct
// ones that were counted, or the expected number under uniform independent routing), and the KV
// entries that it reads. Parts that all ranks hold count on each. Activations, hyper-connection
// streams and KV writes are left out: a fused implementation keeps them small.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/shard.h"
#include "config/model_config.h"
#include "config/parallel_config.h"
#include "kv_cache/kv_layout.h"
#include "model/device_ceilings.h"

namespace fathom::model {

// The arithmetic a product is priced by. FP32 sums of BF16 values are BF16 products; kFp32, FP32
// values, is done on tensor cores as three BF16 products.
enum class ProductType { kFp8, kBf16, kFp32 };

struct StepShape {
  int num_seqs = 1;             // of the rank's own data rank
  int tokens_per_seq = 1;       // 1: decode; more: a prefill chunk (or drafts to verify)
  int64_t context_tokens = 0;   // before this step, per sequence
  int logits_rows = 1;          // rows of the head product
  double distinct_experts = 0;  // that a layer chose, the layers' mean; 0: uniform routing
  int64_t other_tokens = 0;     // of all other data ranks: the experts see them, too

  int64_t own_tokens() const { return int64_t{num_seqs} * tokens_per_seq; }
};

struct ProductCost {
  std::string name;
  ProductType type = ProductType::kFp8;
  double weight_bytes = 0;
  double kv_bytes = 0;
  double flops = 0;
};

// One rank's share of a model, split as GPUs split it: what it holds, and among whom.
struct RankShare {
  checkpoint::Shard shard;
  config::ParallelConfig parallel;
};
// kInvalidArgument as checkpoint::MakeGpuShard.
Result<RankShare> MakeRankShare(const config::ModelConfig& config,
                                const config::ParallelConfig& parallel,
                                const config::RankPlace& place);

// `layout` is of share.shard.config. Where experts are given out whole, the rank is the one that
// gets most of the step's: the others wait for it.
std::vector<ProductCost> StepCosts(const RankShare& share, const kv_cache::KvLayout& layout,
                                   const StepShape& shape);
// Of the whole model on one device.
std::vector<ProductCost> StepCosts(const config::ModelConfig& config,
                                   const kv_cache::KvLayout& layout, const StepShape& shape);

// What ranks do together, so often in a step: each time one waits for all.
struct ExchangeCost {
  std::string name;
  int num_ranks = 0;
  double count = 0;
  double bytes = 0;  // that cross the rank's link one way, all of the step's
};
// Empty for a rank that is alone; its data rank has the most tokens. Activations travel as BF16,
// experts' inputs as FP8 with a scale per 128.
std::vector<ExchangeCost> StepExchanges(const RankShare& share, const StepShape& shape);

struct RooflineTime {
  double bytes_us = 0;     // all bytes at memory speed
  double compute_us = 0;   // all products, each at its own type's speed
  double link_us = 0;      // all exchanged bytes at the link's speed
  double exchange_us = 0;  // what exchanges take however small they are
  // Memory, arithmetic and link work at once; a small exchange is waited for.
  double floor_us() const;
};
RooflineTime Price(const std::vector<ProductCost>& costs, const DeviceCeilings& ceilings);
RooflineTime Price(const std::vector<ProductCost>& costs,
                   const std::vector<ExchangeCost>& exchanges, const DeviceCeilings& ceilings);

// The expected largest of n independent standard normal values.
double ExpectedLargest(int n);

}  // namespace fathom::model
