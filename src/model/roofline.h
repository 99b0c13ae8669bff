// Roofline: the bytes and FLOPs that one step cannot do without, product by product, from the
// config alone. Pure functions. What a step must at least move: every weight it uses once (experts:
// the distinct ones that were counted, or the expected number under uniform independent routing),
// and the KV entries that it reads. Activations, hyper-connection streams and KV writes are left
// out: a fused implementation keeps them small.
#pragma once

#include <string>
#include <vector>

#include "config/model_config.h"
#include "kv_cache/kv_layout.h"

namespace fathom::model {

// The arithmetic a product is priced by. FP32 sums of BF16 values are BF16 products; kFp32, FP32
// values, is done on tensor cores as three BF16 products.
enum class ProductType { kFp8, kBf16, kFp32 };

struct StepShape {
  int num_seqs = 1;
  int tokens_per_seq = 1;       // 1: decode; more: a prefill chunk (or drafts to verify)
  int64_t context_tokens = 0;   // before this step, per sequence
  int logits_rows = 1;          // rows of the head product
  double distinct_experts = 0;  // that a layer chose, the layers' mean; 0: uniform routing
};

struct ProductCost {
  std::string name;
  ProductType type = ProductType::kFp8;
  double weight_bytes = 0;
  double kv_bytes = 0;
  double flops = 0;
};

std::vector<ProductCost> StepCosts(const config::ModelConfig& config,
                                   const kv_cache::KvLayout& layout, const StepShape& shape);

// What the hardware was measured to do (bytes and FLOPs a second).
struct DeviceCeilings {
  std::string name;
  double memory_bytes_per_s = 0;
  double fp8_flops = 0;
  double bf16_flops = 0;
};
DeviceCeilings H200Ceilings();

struct RooflineTime {
  double bytes_us = 0;    // all bytes at memory speed
  double compute_us = 0;  // all products, each at its own type's speed
  double floor_us() const { return bytes_us > compute_us ? bytes_us : compute_us; }
};
RooflineTime Price(const std::vector<ProductCost>& costs, const DeviceCeilings& ceilings);

}  // namespace fathom::model
