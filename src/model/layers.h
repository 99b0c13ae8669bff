// The sub-layers of the model, as calls of kernels on a workspace. StepContext is what they share
// in one forward pass. T is the activation type.
#pragma once

#include "checkpoint/checkpoint.h"
#include "config/model_config.h"
#include "kernels/batch.h"
#include "kernels/gemm/gemm.h"
#include "kernels/quantize/quantize.h"
#include "model/model.h"
#include "model/rank_groups.h"
#include "model/weights.h"
#include "model/workspace.h"

namespace fathom::model {

template <typename T>
struct StepContext {
  const config::ModelConfig& config;
  const kv_cache::KvLayout& layout;
  kv_cache::IndexKeyDType index_dtype;
  std::span<const float> frequencies_plain;
  std::span<const float> frequencies_compressed;
  kernels::BatchView batch;
  std::span<const kernels::CompressedEntry> c4_entries;  // that this step completes
  std::span<const kernels::CompressedEntry> c128_entries;
  bool any_index_scoring = false;  // some token sees more than index_topk entries
  KvCacheView kv;
  Workspace<T>& ws;
  device::Stream& stream;
  RankGroups& ranks;
  std::span<const int32_t> data_rank_tokens;  // of every data rank; one number where there is one
  ChoiceRecorder* recorder = nullptr;
  std::span<int32_t> expert_ids;  // ForwardBatch's

  int64_t num_tokens() const { return batch.num_tokens(); }
};

// h -> y, both in the workspace. kPeer: another rank is gone.
template <typename T>
Status RunAttention(StepContext<T>& step, int layer, const AttentionWeights& weights);
template <typename T>
Status RunMoe(StepContext<T>& step, int layer, const MoeWeights& weights);

// y [m, w.rows] = x w^T for contiguous rows; groups as in kernels/gemm. With a stride y may be some
// columns of a wider matrix, of a rank that has no rows too.
template <typename X, typename Y>
void Linear(const X* x, int64_t m, const WeightMatrix& w, Y* y, device::Stream& stream,
            int groups = 1, int64_t y_stride = 0) {
  if (w.rows == 0) return;
  kernels::Launch(kernels::GemmParams<X, Y>{.x = x,
                                            .x_stride = w.cols * groups,
                                            .m = m,
                                            .w = w,
                                            .groups = groups,
                                            .y = y,
                                            .y_stride = y_stride == 0 ? w.rows : y_stride},
                  stream);
}

// x as a quantized product sees it: rounded to FP8 into `out` in official numerics, x itself in
// fp32.
template <typename T>
const T* Quantize(const T* x, int64_t m, int64_t size, T* out, device::Stream& stream) {
  if constexpr (!kernels::kIsOfficial<T>) {
    return x;
  } else {
    kernels::Launch(
        kernels::QuantizeParams<T>{
            .x = x, .x_stride = size, .y = out, .y_stride = size, .num_rows = m, .size = size},
        stream);
    return out;
  }
}

}  // namespace fathom::model
