// Weights: every tensor of a checkpoint, or of one rank's shard of it, in the memory of one device,
// in the checkpoint's own dtypes (FP4 stays FP4), named by where the model uses it. Immutable after
// LoadWeights; any thread. The views point into buffers that Weights owns; the device outlives it.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "config/model_config.h"
#include "device/device.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/weight_matrix.h"

namespace fathom::model {

using kernels::WeightMatrix;

struct HyperConnectionWeights {
  WeightMatrix fn;  // FP32 [24 or 4, 4 * hidden]
  const float* base = nullptr;
  const float* scale = nullptr;
};

struct CompressorWeights {
  WeightMatrix wkv, wgate;     // BF16 [width, hidden]
  const float* ape = nullptr;  // [ratio, width]
  const BFloat16* norm = nullptr;
};

struct IndexerWeights {
  WeightMatrix wq_b, weights_proj;
  CompressorWeights compressor;
};

struct AttentionWeights {
  WeightMatrix wq_a, wq_b, wkv, wo_a, wo_b;
  const BFloat16* q_norm = nullptr;
  const BFloat16* kv_norm = nullptr;
  const float* sink = nullptr;   // [num_heads]
  CompressorWeights compressor;  // compressed layers
  IndexerWeights indexer;        // ratio-4 layers
};

struct MoeWeights {
  WeightMatrix gate;
  const float* bias = nullptr;                   // score routing
  const int32_t* tid2eid = nullptr;              // hash routing: [vocab, k]
  std::vector<kernels::ExpertMatrices> experts;  // without data: another rank's
  kernels::ExpertMatrices shared;
};

struct BlockWeights {
  HyperConnectionWeights hc_attn, hc_ffn;
  const BFloat16* attn_norm = nullptr;
  const BFloat16* ffn_norm = nullptr;
  AttentionWeights attn;
  MoeWeights ffn;
};

struct MtpWeights {
  WeightMatrix e_proj, h_proj;
  const BFloat16* enorm = nullptr;
  const BFloat16* hnorm = nullptr;
  const BFloat16* norm = nullptr;
  HyperConnectionWeights hc_head;
};

struct DSparkWeights {
  WeightMatrix main_proj, markov_w1, markov_w2, confidence;
  const BFloat16* main_norm = nullptr;
  const BFloat16* norm = nullptr;
  HyperConnectionWeights hc_head;
};

class Weights {
 public:
  // Without data: another stage's.
  WeightMatrix embed, head;
  const BFloat16* norm = nullptr;
  HyperConnectionWeights hc_head;
  std::vector<BlockWeights> layers;
  std::vector<BlockWeights> draft_blocks;
  MtpWeights mtp;        // when the config's draft is kMtp
  DSparkWeights dspark;  // when it is kDSpark

  int64_t bytes() const;
  // The tensor whose memory begins at `data` (CHECKed); the source that was read must live.
  const checkpoint::TensorInfo& TensorAt(const void* data) const;

 private:
  friend class WeightLoader;
  std::vector<device::Buffer> buffers_;
  std::map<const void*, const checkpoint::TensorInfo*> tensors_;  // by where their memory begins
};

// Reads all tensors, on the device's threads. kBadModel for a tensor that is missing or holds
// values no checkpoint may hold (a scale of 255, an expert id out of range); kOutOfMemory.
Result<std::shared_ptr<const Weights>> LoadWeights(const config::ModelConfig& config,
                                                   const checkpoint::TensorSource& source,
                                                   device::Device& device);

// Bytes [offset, offset + out.size()) of a tensor as Weights holds it (expert ids are int32), with
// the checks of LoadWeights. Any thread.
Status ReadTensor(const checkpoint::TensorSource& source, const checkpoint::TensorInfo& tensor,
                  int64_t offset, int num_experts, std::span<std::byte> out);

// The same without values: every byte is zero, and takes no memory until it is touched. For weights
// whose values are read, or made, where they are used.
Result<std::shared_ptr<const Weights>> PlaceWeights(const config::ModelConfig& config,
                                                    const checkpoint::TensorSource& source,
                                                    device::Device& device);

}  // namespace fathom::model
