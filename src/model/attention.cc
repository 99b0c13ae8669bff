#include <cmath>

#include "kernels/indexer/indexer.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "model/layer_cache.h"
#include "model/layers.h"

namespace fathom::model {
namespace {

using config::LayerKind;
using kernels::Launch;

static_assert(kernels::kC128StateHeaderBytes == kv_cache::kC128StateHeaderBytes);
static_assert(kv_cache::kC4StateRows >= 8 + kv_cache::kMaxRollbackTokens);
static_assert(kv_cache::kC128StateRows >= 2 * kv_cache::kMaxRollbackTokens);

// One layer's attention over a step.
template <typename T>
class AttentionPass {
 public:
  AttentionPass(StepContext<T>& step, int layer, const AttentionWeights& weights)
      : s_(step),
        c_(step.config),
        ws_(step.ws),
        w_(weights),
        layer_(layer),
        kind_(step.config.layer_kind(layer)),
        cache_(CacheOfLayer(step.config, step.layout, step.index_dtype,
                            kernels::KvDataBytes<T>(c_.head_dim, c_.rope_dim), step.kv, layer)),
        m_(step.num_tokens()),
        eps_(static_cast<float>(step.config.rms_norm_eps)) {}

  Status Run() {
    const T* h_fp8 = Quantize(ws_.h, m_, c_.hidden_size, ws_.h_fp8, s_.stream);
    Linear(h_fp8, m_, w_.wq_a, ws_.qr, s_.stream);
    Norm(ws_.qr, w_.q_norm, c_.q_lora_rank);
    const T* qr_fp8 = Quantize(ws_.qr, m_, c_.q_lora_rank, ws_.qr, s_.stream);
    if (c_.num_heads > 0) Queries(qr_fp8);
    WindowEntries(h_fp8);
    if (kind_ != LayerKind::kWindow) CompressMain();
    if (kind_ == LayerKind::kC4) {
      CompressIndexKeys();
      SelectEntries(qr_fp8);
    }
    if (c_.num_heads > 0) {
      Attend();
      Rope(ws_.q, c_.num_heads, true);
    }
    return OutputProducts();
  }

 private:
  const float* angles() const {
    return kind_ == LayerKind::kWindow ? ws_.angles_plain : ws_.angles_compressed;
  }

  void Norm(T* x, const BFloat16* weight, int64_t size) {
    Launch(kernels::RmsNormParams<T>{.x = x,
                                     .weight = weight,
                                     .y = x,
                                     .num_rows = m_,
                                     .size = size,
                                     .x_stride = size,
                                     .y_stride = size,
                                     .eps = eps_},
           s_.stream);
  }

  void Rope(T* x, int num_heads, bool inverse) {
    Launch(kernels::RopeParams<T>{.x = x,
                                  .num_tokens = m_,
                                  .num_heads = num_heads,
                                  .head_dim = c_.head_dim,
                                  .rope_dim = c_.rope_dim,
                                  .angles = angles(),
                                  .inverse = inverse},
           s_.stream);
  }

  void Queries(const T* qr_fp8) {
    Linear(qr_fp8, m_, w_.wq_b, ws_.q, s_.stream);
    Launch(
        kernels::HeadNormParams<T>{
            .q = ws_.q, .num_rows = m_ * c_.num_heads, .size = c_.head_dim, .eps = eps_},
        s_.stream);
    Rope(ws_.q, c_.num_heads, false);
  }

  void WindowEntries(const T* h_fp8) {
    Linear(h_fp8, m_, w_.wkv, ws_.kv, s_.stream);
    Norm(ws_.kv, w_.kv_norm, c_.head_dim);
    Rope(ws_.kv, 1, false);
    Launch(kernels::WindowStoreParams<T>{.batch = s_.batch,
                                         .kv = ws_.kv,
                                         .head_dim = c_.head_dim,
                                         .rope_dim = c_.rope_dim,
                                         .window = c_.sliding_window,
                                         .max_rollback = kv_cache::kMaxRollbackTokens,
                                         .pages = cache_.window},
           s_.stream);
  }

  // Runs one compressor; `state` is its rows in slot 0.
  void Compress(const CompressorWeights& w, int dim, kernels::CompressorOutput output,
                const kernels::PagedEntries& cache, std::byte* state) {
    Linear(ws_.h, m_, w.wkv, ws_.c, s_.stream);
    Linear(ws_.h, m_, w.wgate, ws_.z, s_.stream);
    const bool c4 = kind_ == LayerKind::kC4;
    Launch(kernels::CompressorParams<T>{.batch = s_.batch,
                                        .entries = c4 ? s_.c4_entries : s_.c128_entries,
                                        .ratio = cache_.ratio,
                                        .dim = dim,
                                        .rope_dim = c_.rope_dim,
                                        .c = ws_.c,
                                        .z = ws_.z,
                                        .ape = w.ape,
                                        .norm_weight = w.norm,
                                        .norm_eps = eps_,
                                        .frequencies = s_.frequencies_compressed,
                                        .output = output,
                                        .index_dtype = s_.index_dtype,
                                        .cache = cache,
                                        .state = state,
                                        .slot_bytes = s_.layout.state.slot_bytes,
                                        .ring_rows =
                                            c4 ? kv_cache::kC4StateRows : kv_cache::kC128StateRows,
                                        .max_rollback = kv_cache::kMaxRollbackTokens},
           s_.stream);
  }

  void CompressMain() {
    Compress(w_.compressor, c_.head_dim, kernels::CompressorOutput::kKvEntry, cache_.compressed,
             cache_.compressor_state);
  }

  void CompressIndexKeys() {
    Compress(w_.indexer.compressor, c_.index_head_dim, kernels::CompressorOutput::kIndexKey,
             cache_.index_keys, cache_.index_state);
  }

  void SelectEntries(const T* qr_fp8) {
    if (s_.any_index_scoring) {
      Linear(qr_fp8, m_, w_.indexer.wq_b, ws_.index_q, s_.stream);
      Launch(kernels::IndexQueryParams<T>{.q = ws_.index_q,
                                          .num_tokens = m_,
                                          .num_heads = c_.index_num_heads,
                                          .dim = c_.index_head_dim,
                                          .rope_dim = c_.rope_dim,
                                          .angles = angles(),
                                          .dtype = s_.index_dtype},
             s_.stream);
      Linear(ws_.h, m_, w_.indexer.weights_proj, ws_.index_projected, s_.stream);
    }
    const double scale = 1.0 / std::sqrt(double{1} * c_.index_head_dim * c_.index_num_heads);
    Launch(kernels::IndexSelectParams<T>{.batch = s_.batch,
                                         .q = ws_.index_q,
                                         .projected = ws_.index_projected,
                                         .weight_scale = static_cast<float>(scale),
                                         .num_heads = c_.index_num_heads,
                                         .dim = c_.index_head_dim,
                                         .topk = c_.index_topk,
                                         .keys = cache_.index_keys,
                                         .dtype = s_.index_dtype,
                                         .scratch = ws_.index_scratch,
                                         .max_entries = ws_.max_entries,
                                         .selected = ws_.selected,
                                         .counts = ws_.num_selected},
           s_.stream);
    if (s_.recorder == nullptr) return;
    for (int64_t t = 0; t < m_; ++t) {
      s_.recorder->OnIndex(
          layer_, static_cast<int>(t),
          {ws_.selected + t * c_.index_topk, static_cast<size_t>(ws_.num_selected[t])});
    }
  }

  void Attend() {
    Launch(kernels::SparseAttentionParams<T>{.batch = s_.batch,
                                             .q = ws_.q,
                                             .num_heads = c_.num_heads,
                                             .head_dim = c_.head_dim,
                                             .rope_dim = c_.rope_dim,
                                             .window = c_.sliding_window,
                                             .scale = static_cast<float>(
                                                 1.0 / std::sqrt(static_cast<double>(c_.head_dim))),
                                             .sink = w_.sink,
                                             .fresh = ws_.kv,
                                             .pages = cache_.window,
                                             .ratio = cache_.ratio,
                                             .compressed = cache_.compressed,
                                             .selected = ws_.selected,
                                             .counts = ws_.num_selected,
                                             .topk = c_.index_topk,
                                             .scratch = ws_.attention_scratch,
                                             .max_keys = ws_.max_keys},
           s_.stream);
  }

  // Each tensor rank has its groups' columns of what wo_b reads, then its columns of y.
  Status OutputProducts() {
    constexpr auto kTensor = RankGroups::Who::kTensor;
    const int64_t width = w_.wo_b.cols, rank_columns = w_.wo_a.rows;
    const auto columns = s_.ranks.PartsOf(kTensor, width, c_.o_lora_rank);
    T* const own = ws_.grouped + columns[static_cast<size_t>(s_.ranks.rank(kTensor))].begin;
    Linear(ws_.q, m_, w_.wo_a, own, s_.stream, c_.o_groups, width);
    if constexpr (kernels::kIsOfficial<T>) {
      Launch(kernels::QuantizeParams<T>{.x = own,
                                        .x_stride = width,
                                        .y = own,
                                        .y_stride = width,
                                        .num_rows = m_,
                                        .size = rank_columns},
             s_.stream);
    }
    RETURN_IF_ERROR(s_.ranks.GatherColumns(kTensor, ws_.grouped, m_, columns));
    const auto outputs = s_.ranks.PartsOf(kTensor, c_.hidden_size, checkpoint::kQuantizedRows);
    T* const y = ws_.y + outputs[static_cast<size_t>(s_.ranks.rank(kTensor))].begin;
    Linear(ws_.grouped, m_, w_.wo_b, y, s_.stream, 1, c_.hidden_size);
    return s_.ranks.GatherColumns(kTensor, ws_.y, m_, outputs);
  }

  StepContext<T>& s_;
  const config::ModelConfig& c_;
  Workspace<T>& ws_;
  const AttentionWeights& w_;
  int layer_;
  LayerKind kind_;
  LayerCache cache_;
  int64_t m_;
  float eps_;
};

}  // namespace

template <typename T>
Status RunAttention(StepContext<T>& step, int layer, const AttentionWeights& weights) {
  return AttentionPass<T>(step, layer, weights).Run();
}

template Status RunAttention(StepContext<BFloat16>&, int, const AttentionWeights&);
template Status RunAttention(StepContext<float>&, int, const AttentionWeights&);

}  // namespace fathom::model
