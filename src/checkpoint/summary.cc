#include "checkpoint/summary.h"

#include <algorithm>
#include <utility>

#include "checkpoint/tensor_specs.h"

namespace fathom::checkpoint {
namespace {

int64_t NumParams(const TensorSpec& spec) {
  switch (spec.values.pattern) {
    case Pattern::kScales:
    case Pattern::kExpertIds:
      return 0;
    case Pattern::kFp4Codes:
      return 2 * spec.info.bytes;
    default:
      return spec.info.bytes / BytesPerElement(spec.info.dtype);
  }
}

}  // namespace

ModelSummary Summarize(const config::ModelConfig& config) {
  ModelSummary summary;
  int64_t expert_params = 0;
  for (const TensorSpec& spec : MakeTensorSpecs(config)) {
    const char* name = PartName(spec);
    auto part = std::find_if(summary.parts.begin(), summary.parts.end(),
                             [&](const PartSummary& p) { return p.name == name; });
    if (part == summary.parts.end()) {
      part = summary.parts.insert(summary.parts.end(), PartSummary{.name = name});
    }
    const int64_t params = NumParams(spec);
    part->num_tensors += 1;
    part->num_params += params;
    part->bytes += spec.info.bytes;
    summary.num_tensors += 1;
    summary.num_params += params;
    summary.bytes += spec.info.bytes;
    if (spec.draft) {
      summary.num_draft_params += params;
    } else if (spec.part == TensorPart::kExperts) {
      expert_params += params;
    } else if (spec.part == TensorPart::kEmbedding) {
      summary.num_active_params += config.hidden_size;  // one row
    } else {
      summary.num_active_params += params;
    }
  }
  summary.num_active_params += expert_params / config.num_experts * config.num_experts_per_token;
  return summary;
}

}  // namespace fathom::checkpoint
