// CudaStep: a step as a GPU's kernels see it. StepUploader: brings a ForwardBatch there in one
// copy, out of pinned memory in two places that take turns, so that a step is uploaded while the
// one before runs. One thread.
//
// A step of decodes is padded to one of few sizes, so that few graphs serve all: 1, 2, 4, 8, 12 and
// multiples of 8. A padding token has token_seq -1 and is token 0 at position 0; a padding sequence
// has no tokens and no state slot: kernels skip both, and write no cache for them.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <memory>
#include <vector>

#include "kernels/batch_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "model/cuda_workspace.h"
#include "model/model.h"

namespace fathom::model {

struct CudaStep {
  kernels::CudaBatch batch;
  // Where tensor ranks share out the tokens (token_shares.h), what a rank does for its own is a
  // step of these: token_seq, positions and the arrays below begin with the first of them.
  int first_token = 0;
  int total_tokens = 0;                    // of the step that is shared out, or of this one
  const int32_t* token_ids = nullptr;      // [num_tokens], as the host knows them
  const int32_t* token_sources = nullptr;  // [num_tokens], into sampled; -1: token_ids has it
  const int32_t* sampled = nullptr;
  const int32_t* logits_rows = nullptr;
  int64_t num_logits_rows = 0;
  // Not a step of decodes: each token's bits are the same in a step of any size (docs/kernels.md).
  bool prefill = false;
  // Of ranks with whole experts: the tokens of the data rank that has most, and whether all tokens'
  // experts run as a prompt's.
  int64_t most_tokens = 0;
  bool experts_prefill = false;
  bool any_index_scoring = false;
  int max_entries = 0;  // ratio-4 entries that a token may see
  KvCacheView kv;
  float* logits = nullptr;
  device::Stream* stream = nullptr;
  ChoiceRecorder* recorder = nullptr;

  bool is_share() const { return batch.num_tokens < total_tokens; }
};

// Of the tiles of activations (kernels/tiles.cuh): of the step's own tokens, and of all, where what
// they leave lies as if one rank had run them.
inline int64_t RowGroups(const CudaStep& step) {
  return kernels::PaddedTokens(step.batch.num_tokens, step.prefill) / kernels::kTileRows;
}
inline int64_t TotalRowGroups(const CudaStep& step) {
  return kernels::PaddedTokens(step.total_tokens, step.prefill) / kernels::kTileRows;
}

// A step in which every sequence runs one token, none of a prompt, and wants its logits.
inline bool IsDecode(const ForwardBatch& batch) {
  return !batch.has_prompt && batch.token_ids.size() == batch.num_computed.size() &&
         batch.logits_rows.size() == batch.token_ids.size();
}

// The size to which `num_seqs` decodes are padded, at most max_num_seqs.
int DecodeBucket(int num_seqs, int max_num_seqs);

class StepUploader {
 public:
  // kOutOfMemory. The workspace outlives it.
  static Result<std::unique_ptr<StepUploader>> Make(const ModelLimits& limits, int index_topk,
                                                    const CudaWorkspace& workspace);
  ~StepUploader();
  StepUploader(const StepUploader&) = delete;
  StepUploader& operator=(const StepUploader&) = delete;

  // Fills the step's arrays, but for what the batch does not have (kv, logits, recorder). The batch
  // may change when it returns. As a step of decodes it is padded, as so many would be; 0: not.
  CudaStep Upload(const ForwardBatch& batch, int num_decodes, device::Stream& stream);

  // A step of decodes for a graph to be captured of: its sequences hold nothing, each has one token
  // after `context`, and tables of `max_blocks`.
  CudaStep UploadNobody(int num_seqs, int max_blocks, int64_t context, const int32_t* sampled,
                        device::Stream& stream);

  // What rows of block tables are padded to, at most max_table_blocks: few different ones, so that
  // few graphs serve a growing sequence.
  int TableStride(int max_blocks) const;
  int max_table_blocks() const { return static_cast<int>(MaxTableBlocks(limits_)); }

 private:
  struct Place {
    std::byte* host = nullptr;
    cudaEvent_t copied = nullptr;
  };
  StepUploader(const ModelLimits& limits, int index_topk, const CudaWorkspace& workspace)
      : limits_(limits), index_topk_(index_topk), workspace_(workspace) {}
  void ListTokens(const ForwardBatch& batch);

  const ModelLimits limits_;
  const int index_topk_;
  const CudaWorkspace& workspace_;
  std::array<Place, 2> places_;
  size_t turn_ = 0;
  std::vector<int32_t> token_seq_, positions_, rows_;
};

}  // namespace fathom::model
