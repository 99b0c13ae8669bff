#include "model/cuda_operators.h"

#include "base/log.h"

namespace fathom::model {

void CudaOperators::LogFault(const CudaStep& step, const char* name) {
  if (is_broken_) return;
  const Status status = step.stream->Synchronize();
  if (status.ok()) return;
  is_broken_ = true;
  LogError(
      "the GPU failed at the operator '{}' of layer {}, in a step of {} tokens of {} sequences "
      "with "
      "block tables of {}: {}",
      name, layer_, step.batch.num_tokens, step.batch.num_seqs, step.batch.max_blocks,
      status.message());
}

}  // namespace fathom::model
