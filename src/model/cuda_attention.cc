#include <cmath>

#include "kernels/attention_prologue/queries_alone_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/output_batch_cuda.h"
#include "kernels/gemm/output_rows_cuda.h"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/sparse_attention/sparse_attention_cuda.h"
#include "model/cuda_layers.h"
#include "model/cuda_prologue.h"

namespace fathom::model {
namespace {

using config::LayerKind;
using kernels::GemmOutput;

// When entries are selected: behind the launch that makes the index queries; beside it; or in the
// place of it, by who makes them.
enum class Selected { kBehindQueries, kBesideQueries, kWithQueries };

// One layer's attention.
class AttentionPass : CudaPass {
 public:
  AttentionPass(const CudaContext& context, const CudaLayer& layer)
      : CudaPass(context, layer),
        kind_(c_.layer_kind(layer.idx)),
        scoring_(kind_ == LayerKind::kC4 && step_.any_index_scoring),
        part_(ranks_.PartOf(share_, w_)),
        selecting_ranks_(ranks_.SelectingRanks(share_)),
        cache_(CacheOfLayer(c_, context.layout, context.index_dtype,
                            kernels::KvDataBytes<BFloat16>(c_.head_dim, c_.rope_dim), step_.kv,
                            layer.idx)) {}

  void Run() {
    if (part_.num_heads > 0) Heads();  // else others', who keep the cache
    OutputProducts();
  }

 private:
  void Heads() {
    InputProducts();
    // Keys of all ranks then come behind the query products, beside which they are on their way.
    const bool keys_follow = ranks_.SendsAhead(share_);
    if (keys_follow) {
      ranks_.SendKeys(share_, w_);
    } else if (share_.is_share()) {
      ranks_.GatherKeys(share_, layer_.idx, w_);
    }
    kernels::CudaGemmParams products = QueryProducts();
    const Selected selected = WhenSelected(products);
    // A selection that makes its queries comes between the prologue and the other products.
    const bool alone = selected != Selected::kWithQueries && !share_.is_share() &&
                       kernels::AreQueriesAlone(products);
    if (selected == Selected::kBesideQueries) {
      products.problems[0].output = GemmOutput::kNumbered;
      products.problems[0].y = ws_.index_words;
      products.number = QueryNumber();
    }
    kernels::CudaAttentionPrologueParams prologue =
        PrologueParams(context_, layer_, cache_, QueryRows());
    prologue.has_entries = !keys_follow;
    if (alone) {
      operators_.Enqueue(step_, "prologue and query products",
                         kernels::CudaQueriesAloneParams{prologue, products});
    } else {
      operators_.Enqueue(step_, "attention prologue", prologue);
    }
    kernels::CudaSparseAttentionParams attention = AttentionParams();
    attention.q_is_early = kind_ == LayerKind::kC4 && selected == Selected::kBehindQueries;
    attention.step_is_early = attention.q_is_early || (!alone && !keys_follow);
    attention.allows_early = kind_ == LayerKind::kC128 && HasAloneOutputs();
    if (selected == Selected::kWithQueries) {
      kernels::CudaGemmParams others =
          kernels::ProductsBehindSelection(products, selecting_ranks_, share_.max_entries);
      // Where these have multiprocessors of their own, attention starts there. Choices that are
      // recorded or forced are no words.
      const bool told =
          others.max_blocks > 0 && share_.recorder == nullptr && kernels::AwaitsWords(attention);
      if (told) {
        attention.words = {ws_.query_words, ws_.selected_words, QueryNumber()};
        others.number = attention.words.number;
        others.problems[0].output = GemmOutput::kNumbered;
        others.problems[0].y = ws_.query_words;
      }
      Select(selected, told, products.problems[0]);
      products = others;
    }
    if (!alone) operators_.Enqueue(share_, "query products", products);
    if (keys_follow) {
      ranks_.GatherKeys(share_, layer_.idx, w_);
      prologue.num_queries = 0, prologue.has_entries = true;
      operators_.Enqueue(step_, "attention prologue", prologue);
    }
    if (kind_ == LayerKind::kC4 && selected != Selected::kWithQueries) Select(selected, false);
    operators_.Enqueue(share_, "attention", attention);
  }

  // The products that read h: queries, window entry, both compressors' rows, and what the index
  // scores are weighted with.
  void InputProducts() {
    kernels::CudaGemmParams gemm{.num_tokens = share_.batch.num_tokens, .prefill = share_.prefill};
    const int64_t first = share_.first_token;
    const auto add = [&](const kernels::TiledMatrix& matrix, GemmOutput output, void* y,
                         int64_t stride) {
      gemm.problems[gemm.num_problems++] = {.w = matrix,
                                            .x_fp8 = context_.HFp8(share_),
                                            .x_bf16 = context_.H(share_),
                                            .output = output,
                                            .y = y,
                                            .y_stride = stride,
                                            .y_fp8 = {}};
    };
    add(w_.wq_a, GemmOutput::kBf16, ws_.qr, c_.q_lora_rank);
    add(w_.wkv, GemmOutput::kBf16, ws_.kv + first * c_.head_dim, c_.head_dim);
    const auto add_compressor = [&](const CudaCompressorWeights& compressor, float* rows) {
      const int64_t width = compressor.wkv.rows;
      float* const c = rows + first * 2 * width;
      add(compressor.wkv, GemmOutput::kF32, c, 2 * width);
      add(compressor.wgate, GemmOutput::kF32, c + width, 2 * width);
    };
    if (kind_ != LayerKind::kWindow) add_compressor(w_.compressor, ws_.compressed);
    if (kind_ == LayerKind::kC4) add_compressor(w_.index_compressor, ws_.index_compressed);
    if (scoring_) {
      add(w_.index_proj, GemmOutput::kBf16, ws_.index_projected, c_.index_num_heads);
    }
    operators_.Enqueue(share_, "input products", gemm);
  }

  // As the prologue leaves them.
  kernels::Fp8Tiles QueryRows() const { return {ws_.qr_fp8, ws_.qr_scales, RowGroups(share_)}; }

  // Of the query rows: what the indexer scores with, where it does, and the queries.
  kernels::CudaGemmParams QueryProducts() const {
    kernels::CudaGemmParams gemm{.num_tokens = share_.batch.num_tokens, .prefill = share_.prefill};
    const auto add = [&](const kernels::TiledMatrix& matrix, void* y) {
      gemm.problems[gemm.num_problems++] = {.w = matrix,
                                            .x_fp8 = QueryRows(),
                                            .x_bf16 = context_.H(share_),
                                            .output = GemmOutput::kBf16,
                                            .y = y,
                                            .y_stride = matrix.rows,
                                            .y_fp8 = {}};
    };
    if (scoring_) add(w_.index_wq_b, ws_.index_q);
    add(part_.wq_b, ws_.q);
    return gemm;
  }

  // As early as may be.
  Selected WhenSelected(const kernels::CudaGemmParams& products) const {
    const int heads = c_.index_num_heads, entries = share_.max_entries;
    if (!scoring_) return Selected::kBehindQueries;
    if (kernels::MakesIndexQueries(products, heads, entries)) return Selected::kWithQueries;
    return entries > c_.index_topk && kernels::AwaitsWords(products, heads, entries)
               ? Selected::kBesideQueries
               : Selected::kBehindQueries;
  }

  kernels::LaunchNumber QueryNumber() const {
    return {ws_.step_number, static_cast<uint32_t>(layer_.idx), ws_.queries_begun};
  }

  // Of the share's tokens.
  const float* Angles() const {
    const float* const all = kind_ == LayerKind::kWindow ? ws_.angles_plain : ws_.angles_compressed;
    return all + int64_t{share_.first_token} * c_.rope_dim;
  }

  // `told`: attention awaits the entries as words. product: of the index queries, where the
  // selection makes them.
  void Select(Selected selected, bool told, const kernels::GemmProblem& product = {}) {
    const double scale = 1.0 / std::sqrt(double{1} * c_.index_head_dim * c_.index_num_heads);
    const bool shared = selected == Selected::kWithQueries &&
                        kernels::RanksShareEntries(selecting_ranks_, share_.max_entries);
    operators_.Enqueue(
        share_, "index selection",
        kernels::CudaIndexSelectParams{
            .batch = share_.batch,
            .any_scoring = share_.any_index_scoring,
            .prefill = share_.prefill,
            .q = ws_.index_q,
            .product = product,
            .query_packets = ws_.query_packets,
            .q_words = selected == Selected::kBesideQueries ? ws_.index_words : nullptr,
            .number = QueryNumber(),
            .projected = ws_.index_projected,
            .projected_stride = c_.index_num_heads,
            .weight_scale = static_cast<float>(scale),
            .num_heads = c_.index_num_heads,
            .angles = Angles(),
            .topk = c_.index_topk,
            .keys = cache_.index_keys,
            .dtype = context_.index_dtype,
            .max_entries = share_.max_entries,
            .workspace = ws_.index_workspace,
            .workspace_bytes = ws_.index_workspace_bytes,
            .lists = shared ? ws_.shared_index_lists : ws_.index_lists,
            .peers = shared ? selecting_ranks_ : kernels::PeerView{},
            .selected = ws_.selected,
            .selected_words = told ? ws_.selected_words : nullptr,
            .counts = ws_.num_selected});
    context_.recording.TakeIndex(share_, layer_.idx);
  }

  kernels::CudaSparseAttentionParams AttentionParams() const {
    return {.batch = share_.batch,
            .prefill = share_.prefill,
            .q = ws_.q,
            .num_heads = part_.num_heads,
            .norm_eps = static_cast<float>(c_.rms_norm_eps),
            .angles = Angles(),
            .sink = part_.sink,
            .fresh = reinterpret_cast<uint8_t*>(ws_.kv),
            .pages = cache_.window,
            .ratio = cache_.ratio,
            .compressed = cache_.compressed,
            .selected = ws_.selected,
            .topk = c_.index_topk,
            .out = {ws_.attention_out, RowGroups(share_)},
            .workspace = ws_.attention_workspace,
            // The selection is over, and the next one not yet begun.
            .wide = {reinterpret_cast<uint8_t*>(ws_.index_workspace), ws_.index_workspace_bytes},
            .num_fresh = share_.total_tokens};
  }

  // Whether the output products are those of one token on a rank, whose weights fit into shared
  // memory and are asked for as soon as they start.
  bool HasAloneOutputs() const {
    return share_.batch.num_tokens == 1 && ranks_.AddsOutputs(share_) &&
           kernels::HaveAloneProducts(part_.wo_a, part_.wo_b);
  }

  // Likewise of some tokens on a rank that has few rows of wo_b.
  bool HasRowsOutputs() const {
    return !share_.prefill && ranks_.HaveFewRows() && !ranks_.AddsOutputs(share_) &&
           kernels::HaveRowsProducts(part_.wo_a, part_.wo_b, share_.batch.num_tokens);
  }

  // wo_a of each group, then wo_b of all groups.
  void OutputProducts() {
    const int tokens = share_.batch.num_tokens;
    const kernels::Fp8Tiles grouped{ws_.grouped_fp8, ws_.grouped_scales, RowGroups(share_)};
    const bool adds = ranks_.AddsOutputs(share_);
    const kernels::CudaGemmParams first = GroupedProduct(grouped);
    const kernels::CudaGemmParams second = OutputProduct(grouped, adds);
    if (HasAloneOutputs()) {
      operators_.Enqueue(share_, "grouped output product",
                         kernels::CudaGroupedAloneParams{first.problems[0], ws_.grouped_parts});
      operators_.Enqueue(
          share_, "output product",
          kernels::CudaSumsAloneParams{second.problems[0], ws_.grouped_parts, ranks_.BeginSums()});
      return;
    }
    if (adds && kernels::HaveBatchProducts(part_.wo_a, part_.wo_b, tokens)) {
      operators_.Enqueue(share_, "grouped output product",
                         kernels::CudaGroupedBatchParams{first.problems[0], tokens});
      operators_.Enqueue(
          share_, "output product",
          kernels::CudaSumsBatchParams{second.problems[0], tokens, ranks_.BeginSums()});
      return;
    }
    const bool has_rows = HasRowsOutputs();
    if (has_rows) {
      operators_.Enqueue(
          share_, "grouped output product",
          kernels::CudaGroupedBatchParams{first.problems[0], tokens, ranks_.HaveFewRows()});
    } else if (part_.wo_a.rows > 0) {
      operators_.Enqueue(share_, "grouped output product", first);
    }
    ranks_.CompleteGroups(share_, layer_.idx, grouped);
    if (has_rows) {
      operators_.Enqueue(share_, "output product",
                         kernels::CudaOutputRowsParams{second.problems[0], tokens});
    } else if (adds) {
      operators_.Enqueue(share_, "output product",
                         kernels::CudaColumnSumsParams{second, ranks_.BeginSums()});
    } else if (part_.wo_b.rows > 0) {
      operators_.Enqueue(share_, "output product", second);
    }
  }

  // Of a share all columns are this rank's.
  kernels::CudaGemmParams GroupedProduct(const kernels::Fp8Tiles& grouped) const {
    kernels::CudaGemmParams gemm = OneProduct();
    gemm.problems[0] = {.w = part_.wo_a,
                        .x_fp8 = {},
                        .x_bf16 = {ws_.attention_out, RowGroups(share_)},
                        .groups = part_.num_groups,
                        .output = GemmOutput::kFp8Tiles,
                        .y_fp8 = share_.is_share() ? grouped : ranks_.OwnGroups(grouped)};
    return gemm;
  }
  kernels::CudaGemmParams OutputProduct(const kernels::Fp8Tiles& grouped, bool adds) const {
    const int64_t begin =
        share_.is_share() ? int64_t{share_.first_token} * c_.hidden_size : ranks_.first_output();
    kernels::CudaGemmParams gemm = OneProduct();
    gemm.problems[0] = {.w = part_.wo_b,
                        .x_fp8 = adds ? ranks_.OwnGroups(grouped) : grouped,
                        .x_bf16 = {},
                        .output = adds ? GemmOutput::kF32 : GemmOutput::kBf16,
                        .y = adds ? static_cast<void*>(ws_.output_sums) : ws_.y + begin,
                        .y_stride = c_.hidden_size,
                        .y_fp8 = {}};
    return gemm;
  }
  kernels::CudaGemmParams OneProduct() const {
    return kernels::CudaGemmParams{.num_problems = 1,
                                   .num_tokens = share_.batch.num_tokens,
                                   .prefill = share_.prefill,
                                   .mirrors = ranks_.MirrorsOf(share_),
                                   .few_rows = ranks_.HaveFewRows()};
  }

  const LayerKind kind_;
  const bool scoring_;
  const AttentionPart part_;
  const kernels::PeerView selecting_ranks_;
  const LayerCache cache_;
};

}  // namespace

void EnqueueAttention(const CudaContext& context, const CudaLayer& layer) {
  AttentionPass(context, layer).Run();
}

}  // namespace fathom::model
