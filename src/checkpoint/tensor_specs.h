// TensorSpec: a tensor of an official checkpoint with what its readers need beside its shape: the
// part of the model that it belongs to (summaries) and the distribution that a synthetic checkpoint
// gives it. One table, so that names and shapes are written once. Values; any thread.
#pragma once

#include <vector>

#include "checkpoint/checkpoint.h"

namespace fathom::checkpoint {

enum class TensorPart {
  kEmbedding,
  kHead,
  kAttention,
  kCompressor,
  kIndexer,
  kRouter,
  kExperts,
  kSharedExperts,
  kHyperConnections,
  kNorms,
  kDraftHeads,  // what only a draft has: MTP's and DSpark's projections, Markov and confidence
                // heads
};

// How synthetic elements are drawn.
enum class Pattern {
  kNormal,     // mean + std * N(0, 1): BF16 and FP32
  kHcBase,     // the bias of a hyper-connection: mixing near the identity
  kExpertIds,  // tid2eid rows: distinct ids, uniform over the experts
  kFp8Codes,   // e4m3 codes around N(0, kFp8CodeStd)
  kFp4Codes,   // packed e2m1 codes around N(0, kFp4CodeStd)
  kScales,     // ue8m0, so that code * scale has standard deviation `std`
};

struct ValueRule {
  Pattern pattern = Pattern::kNormal;
  float mean = 0;
  float std = 0;        // kScales: of the dequantized weight
  float code_std = 0;   // kScales: of the codes it scales
  int num_experts = 0;  // kExpertIds
};

struct TensorSpec {
  TensorInfo info;
  TensorPart part = TensorPart::kAttention;
  bool draft = false;  // under mtp.
  ValueRule values;
};

// What summaries call the part: "experts", "attention", …; all of a draft block is "draft".
const char* PartName(const TensorSpec& spec);

// In the order of the model: embedding, layers, final norm and head, drafts.
std::vector<TensorSpec> MakeTensorSpecs(const config::ModelConfig& config);

}  // namespace fathom::checkpoint
