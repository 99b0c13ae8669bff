#include "model/deepseek_v4_cuda.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "checkpoint/shard.h"
#include "comm/cuda_expert_ranks.h"
#include "device/cuda/cuda_check.h"
#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "kernels/attention_prologue/queries_alone_cuda.h"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/output_batch_cuda.h"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_cuda.h"
#include "kernels/sparse_attention/sparse_attention_cuda.h"
#include "model/cuda_graphs.h"
#include "model/cuda_recording.h"
#include "model/cuda_sizes.h"
#include "model/cuda_stages.h"
#include "model/cuda_step.h"
#include "model/cuda_tensor_ranks.h"
#include "model/cuda_weights.h"
#include "model/cuda_workspace.h"
#include "model/paged_entries.h"

namespace fathom::model {
namespace {

using config::LayerKind;
using kernels::GemmOutput;
using kernels::Launch;

// Captured steps that are kept, some 2 MB each: of up to 64 sequences at contexts of any length.
constexpr size_t kMaxGraphs = 128;

class CudaModel final : public DeepSeekV4 {
 public:
  CudaModel(const config::ModelConfig& config, kv_cache::IndexKeyDType index_dtype,
            std::unique_ptr<const CudaWeights> weights, const ModelLimits& limits,
            std::unique_ptr<CudaWorkspace> workspace, std::unique_ptr<StepUploader> uploader,
            std::unique_ptr<CudaStages> stages, int64_t grouped_columns, bool has_whole_attention,
            const CudaModelOptions& options)
      : c_(config),
        layout_(kv_cache::MakeKvLayout(config, config::Numerics::kOfficial, index_dtype)),
        index_dtype_(index_dtype),
        weights_(std::move(weights)),
        limits_(limits),
        ws_(std::move(workspace)),
        recording_(config, *ws_),
        uploader_(std::move(uploader)),
        stages_(std::move(stages)),
        options_(options),
        ranks_(config, *ws_, options.collectives.get(), grouped_columns, has_whole_attention),
        expert_ranks_(options.expert_ranks.get()),
        own_experts_(expert_ranks_ == nullptr
                         ? checkpoint::Range{0, config.num_experts}
                         : checkpoint::Part(config.num_experts, 1, expert_ranks_->rank(),
                                            expert_ranks_->size())),
        constants_{static_cast<float>(config.rms_norm_eps), static_cast<float>(config.hc_eps),
                   config.hc_sinkhorn_iters} {
    Check(cudaGetDevice(&gpu_));
  }

  Status Health() override {
    RETURN_IF_ERROR(ranks_.Check());
    return expert_ranks_ == nullptr ? OkStatus() : expert_ranks_->Check();
  }

  Status Forward(const ForwardBatch& batch, const KvCacheView& kv, float* logits,
                 device::Stream& stream, ChoiceRecorder* recorder) override {
    RETURN_IF_ERROR(Health());
    const int most_tokens = batch.most_tokens();
    if (most_tokens == 0) return OkStatus();
    Check(cudaSetDevice(gpu_));  // each rank has a thread
    if (options_.poison_scratch) Poison(stream);
    // Data ranks that all decode are padded alike, so that one graph serves a size. One without
    // tokens has padding at least.
    const bool all_decode = expert_ranks_ == nullptr || batch.data_ranks_decode;
    const bool decode = recorder == nullptr && IsDecode(batch);
    const int num_tokens = static_cast<int>(batch.token_ids.size());
    const int num_decodes = decode && all_decode ? most_tokens : std::max(num_tokens, 1);
    CudaStep step = uploader_->Upload(batch, decode || num_tokens == 0 ? num_decodes : 0, stream);
    step.slots = (most_tokens + 7) / 8 * 8;
    step.experts_prefill = !all_decode;
    step.kv = kv;
    step.logits = logits;
    step.recorder = recorder;
    const int64_t stream_bytes = int64_t{step.batch.num_tokens} * 4 * c_.hidden_size * 2;
    auto* const streams = reinterpret_cast<std::byte*>(ws_->streams);
    if (!is_first_stage()) RETURN_IF_ERROR(stages_->Receive(streams, stream_bytes, stream));
    if (decode && all_decode && Captures()) {
      graphs_.Replay(step, [this](const CudaStep& captured) { Run(captured); });
    } else {
      Run(step);
    }
    if (!batch.expert_ids.empty()) FetchExperts(step, batch);
    if (!is_last_stage()) RETURN_IF_ERROR(stages_->Send(streams, stream_bytes, stream));
    return ranks_.exchanged();
  }

  // Short contexts first: of more sequences than so many graphs are for, the rest is captured when
  // it comes.
  int CaptureDecodes(const KvCacheView& kv, float* logits, const int32_t* sampled,
                     device::Stream& stream) override {
    if (!Captures()) return 0;
    Check(cudaSetDevice(gpu_));
    const auto first_scoring =
        int64_t{4} * c_.index_topk + 4;  // tokens from which choices are scored
    const auto capture = [&](int max_blocks, int64_t context) {
      for (int seqs = 1; seqs <= limits_.max_num_seqs && graphs_.size() < kMaxGraphs;
           seqs = DecodeBucket(seqs, limits_.max_num_seqs) + 1) {
        CudaStep step = uploader_->UploadNobody(seqs, max_blocks, context, sampled, stream);
        step.kv = kv;
        step.logits = logits;
        graphs_.Capture(step, [this](const CudaStep& captured) { Run(captured); });
      }
    };
    capture(1, 1);
    for (int blocks = 1; blocks <= uploader_->max_table_blocks();
         blocks = uploader_->TableStride(blocks) + 1) {
      if (first_scoring < limits_.max_model_len) capture(blocks, first_scoring);
    }
    return static_cast<int>(graphs_.size());
  }

 private:
  bool Captures() const {
    return ranks_.are_captured() && !options_.enforce_eager && !options_.sync_operators;
  }

  bool is_first_stage() const { return stages_ == nullptr || stages_->is_first(); }
  bool is_last_stage() const { return stages_ == nullptr || stages_->is_last(); }

  // A broken device is reported by whoever waits for the stream.
  static void Check(cudaError_t error) { device::CheckCuda(error, __FILE__, __LINE__); }

  // Shared memory is left alone where other ranks may have begun to write the step's values.
  void Poison(device::Stream& stream) const {
    const auto fill = [&](std::byte* memory, int64_t bytes) {
      Check(cudaMemsetAsync(memory, 0xff, static_cast<size_t>(bytes),
                            static_cast<cudaStream_t>(stream.native_handle())));
    };
    fill(ws_->scratch, ws_->scratch_bytes);
    if (!ranks_.are_several()) fill(ws_->shared_buffer.data(), ws_->shared_buffer.bytes());
  }

  // Those of the batch's own tokens: a step may be padded.
  void FetchExperts(const CudaStep& step, const ForwardBatch& batch) {
    const auto row = static_cast<size_t>(c_.num_experts_per_token) * sizeof(int32_t);
    const size_t bytes = batch.token_ids.size() * row;
    Check(cudaMemcpy2DAsync(batch.expert_ids.data(), bytes, ws_->expert_ids,
                            static_cast<size_t>(TotalRowGroups(step) * kernels::kTileRows) * row,
                            bytes, static_cast<size_t>(c_.num_layers), cudaMemcpyDeviceToHost,
                            static_cast<cudaStream_t>(step.stream->native_handle())));
  }

  void Run(const CudaStep& step) {
    layer_ = -1;
    Enqueue(step, "rope angles",
            kernels::CudaRopeAnglesParams{.positions = step.batch.positions,
                                          .num_tokens = step.batch.num_tokens,
                                          .frequencies_plain = ws_->frequencies,
                                          .frequencies_compressed = ws_->frequencies + 32,
                                          .angles_plain = ws_->angles_plain,
                                          .angles_compressed = ws_->angles_compressed,
                                          .number = ws_->step_number,
                                          .num_numbers = static_cast<uint32_t>(c_.num_layers)});
    const CudaStep share = ranks_.ShareOf(step);
    if (is_first_stage()) Embed(share);
    kernels::SublayerOutput output;
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      const CudaBlockWeights& w = weights_->layers[static_cast<size_t>(layer)];
      layer_ = layer;
      Boundary(share, output, ws_->ffn_state, w.hc_attn, w.attn_norm, ws_->attn_state);
      if (layer > 0 && recording_.TakeStreams(step, layer - 1)) {
        Boundary(step, {}, ws_->ffn_state, w.hc_attn, w.attn_norm, ws_->attn_state);
      }
      Attention(step, share, layer, w);
      Boundary(share, {.y = ws_->y}, ws_->attn_state, w.hc_ffn, w.ffn_norm, ws_->ffn_state,
               RouteInput(share, w).told);
      output = Moe(step, share, layer, w);
    }
    layer_ = -1;
    if (!is_last_stage() || (step.recorder != nullptr && step.recorder->wants_streams())) {
      // the last layer's streams, which the head would not write
      Boundary(share, output, ws_->ffn_state, weights_->layers[0].hc_attn,
               weights_->layers[0].attn_norm, ws_->attn_state);
      recording_.TakeStreams(step, c_.num_layers - 1);
      output = {};
    }
    if (is_last_stage()) Logits(step, share, output);
    ranks_.EndStep(step);
    if (expert_ranks_ != nullptr) expert_ranks_->EndStep(*step.stream);
  }

  void Embed(const CudaStep& step) {
    Enqueue(step, "embedding",
            kernels::CudaEmbeddingParams{.token_ids = step.token_ids,
                                         .token_sources = step.token_sources,
                                         .sampled = step.sampled,
                                         .resolved = ws_->token_ids + step.first_token,
                                         .num_tokens = step.batch.num_tokens,
                                         .table = weights_->embed,
                                         .hidden = c_.hidden_size,
                                         .streams = Streams(step)});
  }

  // An operator of the layer that is being enqueued.
  template <typename Params>
  void Enqueue(const CudaStep& step, const char* name, const Params& params) {
    if (step.recorder != nullptr) step.recorder->OnOperator(name, layer_);
    Launch(params, *step.stream);
    if (options_.sync_operators) LogFault(step, name);
  }

  void LogFault(const CudaStep& step, const char* name) {
    if (is_broken_) return;
    const Status status = step.stream->Synchronize();
    if (status.ok()) return;
    is_broken_ = true;
    LogError(
        "the GPU failed at the operator '{}' of layer {}, in a step of {} tokens of {} "
        "sequences with block tables of {}: {}",
        name, layer_, step.batch.num_tokens, step.batch.num_seqs, step.batch.max_blocks,
        status.message());
  }

  __nv_bfloat16* Streams(const CudaStep& step) const {
    return ws_->streams + int64_t{step.first_token} * 4 * c_.hidden_size;
  }
  kernels::Bf16Tiles H(const CudaStep& step) const { return {ws_->h, RowGroups(step)}; }
  kernels::Fp8Tiles HFp8(const CudaStep& step) const {
    const int64_t first = step.first_token;
    return {ws_->h_fp8 + first / kernels::kTileRows * kernels::kTileBytes, ws_->h_scales + first,
            TotalRowGroups(step)};
  }

  void Boundary(const CudaStep& step, kernels::SublayerOutput output,
                const kernels::HyperConnectionState& before, const CudaHyperConnection& w,
                const __nv_bfloat16* norm, const kernels::HyperConnectionState& after,
                const kernels::NumberedWords& told = {}) {
    const kernels::OutputExchange gather =
        ranks_.CompleteOutput(step, layer_, step.batch.num_tokens, output);
    if (output.y != nullptr) output.y += int64_t{step.first_token} * c_.hidden_size;
    Enqueue(step, "boundary",
            kernels::CudaHyperConnectionParams{.streams = Streams(step),
                                               .num_tokens = step.batch.num_tokens,
                                               .prefill = step.prefill,
                                               .hidden = c_.hidden_size,
                                               .output = output,
                                               .gather = gather,
                                               .before = before.From(step.first_token),
                                               .fn = w.fn,
                                               .scale = w.scale,
                                               .base = w.base,
                                               .norm_weight = norm,
                                               .constants = constants_,
                                               .after = after.From(step.first_token),
                                               .h = H(step),
                                               .h_fp8 = HFp8(step),
                                               .told = told,
                                               .scratch = ws_->boundary_scratch});
  }

  // The products that read h: queries, window entry, both compressors' rows, and what the index
  // scores are weighted with.
  void InputProducts(const CudaStep& step, LayerKind kind, bool scoring,
                     const CudaBlockWeights& w) {
    kernels::CudaGemmParams gemm{.num_tokens = step.batch.num_tokens, .prefill = step.prefill};
    const int64_t first = step.first_token;
    const auto add = [&](const kernels::TiledMatrix& matrix, GemmOutput output, void* y,
                         int64_t stride) {
      gemm.problems[gemm.num_problems++] = {.w = matrix,
                                            .x_fp8 = HFp8(step),
                                            .x_bf16 = H(step),
                                            .output = output,
                                            .y = y,
                                            .y_stride = stride,
                                            .y_fp8 = {}};
    };
    add(w.wq_a, GemmOutput::kBf16, ws_->qr, c_.q_lora_rank);
    add(w.wkv, GemmOutput::kBf16, ws_->kv + first * c_.head_dim, c_.head_dim);
    const auto add_compressor = [&](const CudaCompressorWeights& compressor, float* rows) {
      const int64_t width = compressor.wkv.rows;
      float* const c = rows + first * 2 * width;
      add(compressor.wkv, GemmOutput::kF32, c, 2 * width);
      add(compressor.wgate, GemmOutput::kF32, c + width, 2 * width);
    };
    if (kind != LayerKind::kWindow) add_compressor(w.compressor, ws_->compressed);
    if (kind == LayerKind::kC4) add_compressor(w.index_compressor, ws_->index_compressed);
    if (scoring) {
      add(w.index_proj, GemmOutput::kBf16, ws_->index_projected, c_.index_num_heads);
    }
    Enqueue(step, "input products", gemm);
  }

  // queries from qr, and what the indexer scores with.
  kernels::CudaGemmParams QueryProducts(const CudaStep& step, bool scoring,
                                        const CudaBlockWeights& w, const AttentionPart& part,
                                        const kernels::Fp8Tiles& qr) const {
    kernels::CudaGemmParams gemm{.num_tokens = step.batch.num_tokens, .prefill = step.prefill};
    const auto add = [&](const kernels::TiledMatrix& matrix, void* y) {
      gemm.problems[gemm.num_problems++] = {.w = matrix,
                                            .x_fp8 = qr,
                                            .x_bf16 = H(step),
                                            .output = GemmOutput::kBf16,
                                            .y = y,
                                            .y_stride = matrix.rows,
                                            .y_fp8 = {}};
    };
    if (scoring) add(w.index_wq_b, ws_->index_q);
    add(part.wq_b, ws_->q);
    return gemm;
  }

  kernels::LaunchNumber QueryNumber() const {
    return {ws_->step_number, static_cast<uint32_t>(layer_), ws_->queries_begun};
  }

  void Attention(const CudaStep& step, const CudaStep& share, int layer,
                 const CudaBlockWeights& w) {
    const AttentionPart part = ranks_.PartOf(share, w);
    if (part.num_heads > 0) Heads(step, share, layer, w, part);  // else others', who keep the cache
    OutputProducts(share, part);
  }

  void Heads(const CudaStep& step, const CudaStep& share, int layer, const CudaBlockWeights& w,
             const AttentionPart& part) {
    const LayerKind kind = c_.layer_kind(layer);
    const int kind_layer = kind == LayerKind::kWindow ? 0 : kv_cache::KindLayer(c_, layer);
    const int entry_bytes = kernels::KvDataBytes<BFloat16>(c_.head_dim, c_.rope_dim);
    const bool c4 = kind == LayerKind::kC4;
    const kernels::PagedEntries pages = LayerEntries(
        step.kv.window_pages, layout_.window_page_bytes, layout_.window, layer, entry_bytes);
    const kernels::PagedEntries compressed =
        kind == LayerKind::kWindow
            ? kernels::PagedEntries{}
            : LayerEntries(step.kv.blocks, layout_.block_bytes, c4 ? layout_.c4 : layout_.c128,
                           kind_layer, entry_bytes);
    const kernels::PagedEntries index_keys =
        c4 ? LayerEntries(step.kv.blocks, layout_.block_bytes, layout_.index, kind_layer,
                          kernels::IndexKeyDataBytes(c_.index_head_dim, index_dtype_))
           : kernels::PagedEntries{};
    const float* angles = kind == LayerKind::kWindow ? ws_->angles_plain : ws_->angles_compressed;
    const float* const own_angles = angles + int64_t{share.first_token} * c_.rope_dim;
    const kernels::Fp8Tiles qr{ws_->qr_fp8, ws_->qr_scales, RowGroups(share)};

    const bool scoring = c4 && step.any_index_scoring;
    InputProducts(share, kind, scoring, w);
    if (share.is_share()) ranks_.GatherKeys(share, layer, w);
    kernels::CudaGemmParams products = QueryProducts(share, scoring, w, part, qr);
    const bool alone = !share.is_share() && kernels::AreQueriesAlone(products);
    // Entries are selected before the queries are made, or beside that, not behind it.
    const int index_heads = c_.index_num_heads, entries = share.max_entries;
    const bool first =
        scoring && !alone && kernels::MakesIndexQueries(products, index_heads, entries);
    const bool beside = first || (scoring && entries > c_.index_topk &&
                                  kernels::AwaitsWords(products, index_heads, entries));
    if (beside) {
      products.problems[0].output = GemmOutput::kNumbered;
      products.problems[0].y = ws_->index_words;
      products.number = QueryNumber();
    }
    const auto prologue = Prologue(step, share.batch.num_tokens, kind, kind_layer, w, angles, qr,
                                   pages, compressed, index_keys);
    if (alone) {
      Enqueue(step, "prologue and query products",
              kernels::CudaQueriesAloneParams{prologue, products});
    } else {
      Enqueue(step, "attention prologue", prologue);
    }
    if (first) {
      Select(share, layer, own_angles, index_keys, beside, products.problems[0]);
      products = kernels::ProductsBehindSelection(products, entries);
    }
    if (!alone) Enqueue(share, "query products", products);
    if (c4 && !first) Select(share, layer, own_angles, index_keys, beside);
    const bool behind_selection = c4 && !beside;
    Enqueue(share, "attention",
            kernels::CudaSparseAttentionParams{.batch = share.batch,
                                               .prefill = step.prefill,
                                               .q = ws_->q,
                                               .q_is_early = behind_selection,
                                               .step_is_early = behind_selection || !alone,
                                               .num_heads = part.num_heads,
                                               .norm_eps = constants_.norm_eps,
                                               .angles = own_angles,
                                               .sink = part.sink,
                                               .fresh = reinterpret_cast<uint8_t*>(ws_->kv),
                                               .pages = pages,
                                               .ratio = kind == LayerKind::kWindow ? 0
                                                        : c4                       ? 4
                                                                                   : 128,
                                               .compressed = compressed,
                                               .selected = ws_->selected,
                                               .topk = c_.index_topk,
                                               .out = {ws_->attention_out, RowGroups(share)},
                                               .workspace = ws_->attention_workspace,
                                               .counters = ws_->attention_counters});
  }

  kernels::CudaAttentionPrologueParams Prologue(const CudaStep& step, int num_queries,
                                                LayerKind kind, int kind_layer,
                                                const CudaBlockWeights& w, const float* angles,
                                                const kernels::Fp8Tiles& qr,
                                                const kernels::PagedEntries& pages,
                                                const kernels::PagedEntries& compressed,
                                                const kernels::PagedEntries& index_keys) const {
    const bool c4 = kind == LayerKind::kC4;
    kernels::CudaAttentionPrologueParams p{.batch = step.batch,
                                           .norm_eps = constants_.norm_eps,
                                           .angles = angles,
                                           .num_queries = num_queries,
                                           .qr = ws_->qr,
                                           .qr_stride = c_.q_lora_rank,
                                           .q_lora_rank = c_.q_lora_rank,
                                           .q_norm = w.q_norm,
                                           .q = qr,
                                           .kv = ws_->kv,
                                           .kv_stride = c_.head_dim,
                                           .kv_norm = w.kv_norm,
                                           .fresh = reinterpret_cast<uint8_t*>(ws_->kv),
                                           .pages = pages,
                                           .ratio = kind == LayerKind::kWindow ? 0
                                                    : c4                       ? 4
                                                                               : 128,
                                           .main = {},
                                           .index = {},
                                           .slot_bytes = layout_.state.slot_bytes,
                                           .frequencies = ws_->frequencies + 32,
                                           .index_dtype = index_dtype_};
    const auto compressor = [](const CudaCompressorWeights& weights, const float* rows,
                               const kernels::PagedEntries& cache, std::byte* state) {
      const int64_t width = weights.wkv.rows;
      return kernels::CudaCompressor{.c = rows,
                                     .z = rows + width,
                                     .row_stride = 2 * width,
                                     .ape = weights.ape,
                                     .norm = weights.norm,
                                     .cache = cache,
                                     .state = state};
    };
    if (kind != LayerKind::kWindow) {
      const int64_t offset = c4 ? layout_.state.c4_layer_offset(kind_layer)
                                : layout_.state.c128_layer_offset(kind_layer);
      std::byte* const state = step.kv.state_slots + offset;
      p.main = compressor(w.compressor, ws_->compressed, compressed, state);
      if (c4) {
        const int64_t main_bytes = int64_t{kv_cache::kC4StateRows} * 4 * c_.head_dim * 4;
        p.index =
            compressor(w.index_compressor, ws_->index_compressed, index_keys, state + main_bytes);
      }
    }
    return p;
  }

  void Select(const CudaStep& step, int layer, const float* angles,
              const kernels::PagedEntries& index_keys, bool beside,
              const kernels::GemmProblem& product = {}) {
    const double scale = 1.0 / std::sqrt(double{1} * c_.index_head_dim * c_.index_num_heads);
    Enqueue(step, "index selection",
            kernels::CudaIndexSelectParams{.batch = step.batch,
                                           .any_scoring = step.any_index_scoring,
                                           .q = ws_->index_q,
                                           .product = product,
                                           .q_words = beside ? ws_->index_words : nullptr,
                                           .q_number = QueryNumber(),
                                           .projected = ws_->index_projected,
                                           .projected_stride = c_.index_num_heads,
                                           .weight_scale = static_cast<float>(scale),
                                           .num_heads = c_.index_num_heads,
                                           .angles = angles,
                                           .topk = c_.index_topk,
                                           .keys = index_keys,
                                           .dtype = index_dtype_,
                                           .max_entries = step.max_entries,
                                           .workspace = ws_->index_workspace,
                                           .workspace_bytes = ws_->index_workspace_bytes,
                                           .counters = ws_->index_counters,
                                           .selected = ws_->selected,
                                           .counts = ws_->num_selected});
    recording_.TakeIndex(step, layer);
  }

  void OutputProducts(const CudaStep& step, const AttentionPart& part) {
    const int64_t groups = RowGroups(step);
    const kernels::Fp8Tiles grouped{ws_->grouped_fp8, ws_->grouped_scales, groups};
    const int tokens = step.batch.num_tokens;
    kernels::CudaGemmParams first{.num_problems = 1,
                                  .num_tokens = tokens,
                                  .prefill = step.prefill,
                                  .mirrors = ranks_.MirrorsOf(step),
                                  .few_rows = ranks_.HaveFewRows()};
    const bool is_share = step.is_share();  // then all columns are this rank's
    first.problems[0] = {.w = part.wo_a,
                         .x_fp8 = {},
                         .x_bf16 = {ws_->attention_out, groups},
                         .groups = part.num_groups,
                         .output = GemmOutput::kFp8Tiles,
                         .y_fp8 = is_share ? grouped : ranks_.OwnGroups(grouped)};
    kernels::CudaGemmParams second = first;
    second.problems[0] = {.w = part.wo_b,
                          .x_fp8 = grouped,
                          .x_bf16 = {},
                          .output = GemmOutput::kBf16,
                          .y = is_share ? ws_->y + int64_t{step.first_token} * c_.hidden_size
                                        : ws_->y + ranks_.first_output(),
                          .y_stride = c_.hidden_size,
                          .y_fp8 = {}};
    const bool adds = ranks_.AddsOutputs(step);
    if (adds) {
      second.problems[0].x_fp8 = ranks_.OwnGroups(grouped);
      second.problems[0].output = GemmOutput::kF32;
      second.problems[0].y = ws_->output_sums;
    }
    if (adds && tokens == 1 && kernels::HaveAloneProducts(part.wo_a, part.wo_b)) {
      return AloneOutputProducts(step, first.problems[0], second.problems[0]);
    }
    if (adds && kernels::HaveBatchProducts(part.wo_a, part.wo_b, tokens)) {
      Enqueue(step, "grouped output product",
              kernels::CudaGroupedBatchParams{first.problems[0], tokens});
      return Enqueue(
          step, "output product",
          kernels::CudaSumsBatchParams{second.problems[0], tokens, ranks_.BeginSums(step)});
    }
    if (part.wo_a.rows > 0) Enqueue(step, "grouped output product", first);
    ranks_.CompleteGroups(step, layer_, grouped);
    if (adds) {
      Enqueue(step, "output product",
              kernels::CudaColumnSumsParams{second, ranks_.BeginSums(step)});
    } else if (part.wo_b.rows > 0) {
      Enqueue(step, "output product", second);
    }
  }
  void AloneOutputProducts(const CudaStep& step, const kernels::GemmProblem& first,
                           const kernels::GemmProblem& second) {
    Enqueue(step, "grouped output product",
            kernels::CudaGroupedAloneParams{first, ws_->grouped_parts});
    Enqueue(step, "output product",
            kernels::CudaSumsAloneParams{second, ws_->grouped_parts, ranks_.BeginSums(step)});
  }

  // The embedding has them all; of later stages the host does.
  const int32_t* TokenIds(const CudaStep& step) const {
    return is_first_stage() ? ws_->token_ids + step.first_token : step.token_ids;
  }

  // Of one layer: [tokens, k].
  int32_t* ExpertIds(const CudaStep& step, int layer) const {
    const int64_t rows = layer * TotalRowGroups(step) * kernels::kTileRows + step.first_token;
    return ws_->expert_ids + rows * c_.num_experts_per_token;
  }
  float* ExpertWeights(const CudaStep& step) const {
    return ws_->expert_weights + int64_t{step.first_token} * c_.num_experts_per_token;
  }

  kernels::RouteInput RouteInput(const CudaStep& share, const CudaBlockWeights& w) const {
    return expert_ranks_ != nullptr ? kernels::RouteInput{} : ranks_.RouteInput(share, layer_, w);
  }
  kernels::SublayerOutput Moe(const CudaStep& step, const CudaStep& share, int layer,
                              const CudaBlockWeights& w) {
    const kernels::Fp8Tiles gathered{ws_->gathered, ws_->gathered_scales, ws_->pair_rows / 8};
    kernels::CudaMoeRouteParams route{.gate = w.gate,
                                      .h = H(share),
                                      .input = RouteInput(share, w),
                                      .scores = ws_->router_scores,
                                      .board = ws_->route_board,
                                      .num_tokens = share.batch.num_tokens,
                                      .prefill = step.prefill,
                                      .num_experts = c_.num_experts,
                                      .num_chosen = c_.num_experts_per_token,
                                      .bias = w.bias,
                                      .tid2eid = w.tid2eid,
                                      .token_ids = TokenIds(share),
                                      .token_seq = share.batch.token_seq,
                                      .scaling = static_cast<float>(c_.routed_scaling_factor),
                                      .expert_ids = ExpertIds(share, layer),
                                      .weights = ExpertWeights(share),
                                      .plans = expert_ranks_ == nullptr && !share.is_share(),
                                      .plan = ws_->plan,
                                      .hidden = c_.hidden_size,
                                      .x = HFp8(share),
                                      .gathered = gathered};
    recording_.ForceRouting(step, layer, route);
    Enqueue(share, "routing", route);
    if (share.is_share()) {
      ranks_.GatherRouted(share, layer);
      route.is_chosen = route.plans = true;
      route.num_tokens = step.batch.num_tokens, route.token_seq = step.batch.token_seq;
      route.expert_ids = ExpertIds(step, layer), route.weights = ExpertWeights(step);
      route.x = HFp8(step);
      Enqueue(step, "plan", route);
    }
    recording_.TellRouting(step, layer, ExpertIds(step, layer));
    if (expert_ranks_ != nullptr) return ExpertsOfAllRanks(step, layer, w);
    Experts(step, w, gathered);
    return {ws_->pairs, ws_->plan.pair_of, c_.num_experts_per_token};
  }

  // With whole matrices; tokens and experts are the caller's.
  kernels::CudaExpertParams ExpertParams(const CudaStep& step, const CudaBlockWeights& w,
                                         const kernels::Fp8Tiles& gathered) const {
    return {.hidden = c_.hidden_size,
            .intermediate = c_.moe_intermediate_size,
            .num_chosen = c_.num_experts_per_token,
            .swiglu_limit = static_cast<float>(c_.swiglu_limit),
            .routed = w.routed,
            .shared = w.shared,
            .x = HFp8(step),
            .gathered = gathered,
            .plan = ws_->plan,
            .t = {ws_->t, ws_->t_scales, ws_->pair_rows / 8},
            .t_packets = ws_->t_packets,
            .y = ws_->pairs,
            .y_stride = c_.hidden_size};
  }

  void Experts(const CudaStep& step, const CudaBlockWeights& w, const kernels::Fp8Tiles& gathered) {
    kernels::CudaExpertParams p = ExpertParams(step, w, gathered);
    p.num_tokens = step.batch.num_tokens;
    p.prefill = step.prefill;
    p.num_experts = c_.num_experts;
    p.y += ranks_.first_output();
    if (step.recorder != nullptr) step.recorder->OnOperator("experts", layer_);
    const kernels::ExpertRank rank = ranks_.RankOfExperts(step);
    if (!ranks_.are_several()) {
      kernels::Launch(p, *step.stream);
    } else if (rank.exchange.peers.size > 1) {
      kernels::Launch(p, rank, *step.stream);
    } else {
      const kernels::Fp8Tiles t = p.t;
      p.intermediate = ranks_.num_intermediate();
      p.t = ranks_.OwnIntermediates(t);
      p.mirrors = ranks_.MirrorsOf(step);
      if (p.intermediate > 0) kernels::LaunchGateUp(p, *step.stream);
      ranks_.CompleteIntermediates(step, layer_, t);
      p.hidden = ranks_.num_outputs();
      p.intermediate = c_.moe_intermediate_size;
      p.t = t;
      if (step.recorder != nullptr) step.recorder->OnOperator("experts, down", layer_);
      if (p.hidden > 0) kernels::LaunchDown(p, *step.stream);
    }
    if (options_.sync_operators) LogFault(step, "experts");
  }

  // The rank's routed experts on the tokens of all data ranks, the shared one on its own.
  kernels::SublayerOutput ExpertsOfAllRanks(const CudaStep& step, int layer,
                                            const CudaBlockWeights& w) {
    const kernels::Fp8Tiles gathered{ws_->gathered, ws_->gathered_scales, ws_->pair_rows / 8};
    const kernels::ExpertExchange tokens = expert_ranks_->Next(step.slots);
    const int num_own_experts = static_cast<int>(own_experts_.size());
    Enqueue(step, "tokens to all ranks",
            kernels::CudaSendTokensParams{.to = tokens,
                                          .num_tokens = step.batch.num_tokens,
                                          .x = HFp8(step),
                                          .expert_ids = ExpertIds(step, layer),
                                          .weights = ws_->expert_weights,
                                          .token_seq = step.batch.token_seq});
    Enqueue(step, "tokens of all ranks",
            kernels::CudaTakeTokensParams{.from = tokens,
                                          .prefill = step.experts_prefill,
                                          .first_expert = static_cast<int>(own_experts_.begin),
                                          .num_experts = num_own_experts,
                                          .first_group = (step.slots + 63) / 64 * 8,
                                          .plan = ws_->plan,
                                          .gathered = gathered});
    kernels::CudaExpertParams p = ExpertParams(step, w, gathered);
    p.num_tokens = expert_ranks_->size() * step.slots;
    p.prefill = step.experts_prefill;
    p.num_experts = num_own_experts;
    p.num_shared_tokens = step.batch.num_tokens;
    p.shared_y = expert_ranks_->outputs();
    Enqueue(step, "experts", p);
    Enqueue(
        step, "outputs to their ranks",
        kernels::CudaReturnOutputsParams{
            .to = expert_ranks_->Next(step.slots), .pair_of = ws_->plan.pair_of, .y = ws_->pairs});
    return {expert_ranks_->outputs(), expert_ranks_->pair_of(), c_.num_experts_per_token};
  }

  void Logits(const CudaStep& step, const CudaStep& share, kernels::SublayerOutput output) {
    if (step.num_logits_rows == 0) return;
    if (share.is_share()) ranks_.GatherStreams(share);
    const kernels::OutputExchange gather =
        ranks_.CompleteOutput(step, layer_, step.num_logits_rows, output);
    const int64_t groups = kernels::PaddedTokens(step.num_logits_rows, step.prefill) / 8;
    Enqueue(step, "last boundary",
            kernels::CudaHyperConnectionParams{.streams = ws_->streams,
                                               .num_tokens = step.num_logits_rows,
                                               .prefill = step.prefill,
                                               .hidden = c_.hidden_size,
                                               .output = output,
                                               .gather = gather,
                                               .before = ws_->ffn_state,
                                               .fn = weights_->hc_head.fn,
                                               .scale = weights_->hc_head.scale,
                                               .base = weights_->hc_head.base,
                                               .norm_weight = weights_->norm,
                                               .constants = constants_,
                                               .h = {ws_->h, groups},
                                               .rows = step.logits_rows});
    // A rank's rows of the head are its columns of the logits.
    kernels::CudaGemmParams head{
        .num_problems = 1, .num_tokens = step.num_logits_rows, .prefill = step.prefill};
    head.problems[0] = {.w = weights_->head,
                        .x_fp8 = {},
                        .x_bf16 = {ws_->h, groups},
                        .output = GemmOutput::kF32,
                        .y = step.logits + ranks_.first_word(),
                        .y_stride = c_.vocab_size,
                        .y_fp8 = {}};
    head.many_rows = true;
    Enqueue(step, "head", head);
    ranks_.CompleteLogits(step);
  }

  const config::ModelConfig c_;
  const kv_cache::KvLayout layout_;
  const kv_cache::IndexKeyDType index_dtype_;
  const std::unique_ptr<const CudaWeights> weights_;
  const ModelLimits limits_;
  const std::unique_ptr<CudaWorkspace> ws_;
  const CudaRecording recording_;
  const std::unique_ptr<StepUploader> uploader_;
  const std::unique_ptr<CudaStages> stages_;  // null: there is one
  const CudaModelOptions options_;
  CudaTensorRanks ranks_;
  comm::CudaExpertRanks* const expert_ranks_;  // null: there is one data rank
  const checkpoint::Range own_experts_;
  const kernels::HyperConnectionConstants constants_;
  int gpu_ = 0;
  int layer_ = -1;  // whose operators are being enqueued; -1: none's
  bool is_broken_ = false;
  CudaGraphs graphs_{kMaxGraphs};
};

// The source's shape of a matrix of the first layer's attention.
Result<std::vector<int64_t>> ShapeOf(const checkpoint::TensorSource& source, const char* matrix) {
  const auto name = fmt::format("layers.0.attn.{}.weight", matrix);
  const checkpoint::TensorInfo* const tensor = source.Find(name);
  if (tensor == nullptr) return BadModel(fmt::format("the checkpoint has no tensor {}", name));
  return tensor->shape;
}

}  // namespace

Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4Cuda(const config::ModelConfig& config,
                                                       kv_cache::IndexKeyDType index_dtype,
                                                       const checkpoint::TensorSource& source,
                                                       bool dummy, const ModelLimits& limits,
                                                       device::Device& device,
                                                       const CudaModelOptions& options) {
  const int tensor_ranks = options.collectives == nullptr ? 1 : options.collectives->size();
  RETURN_IF_ERROR(CheckCudaSizes(config, tensor_ranks));
  ASSIGN_OR_RETURN(const std::vector<int64_t> wo_b, ShapeOf(source, "wo_b"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> wq_b, ShapeOf(source, "wq_b"));
  const int64_t grouped_columns = wo_b.back();  // of all tensor ranks
  const int64_t all_heads = wq_b.front() / config.head_dim;
  const bool has_whole_attention = all_heads > config.num_heads;
  const int64_t head_rows =
      MostHeadRows(limits, config.num_heads, has_whole_attention ? all_heads : 0, tensor_ranks);
  const int data_ranks = options.expert_ranks == nullptr ? 1 : options.expert_ranks->size();
  std::byte* const shared =
      options.collectives == nullptr ? nullptr : options.collectives->shared_memory();
  const int64_t workspace_bytes =
      CudaWorkspaceBytes(config, limits, head_rows, data_ranks) +
      (shared == nullptr ? SharedWorkspaceBytes(config, limits, grouped_columns, data_ranks) : 0);
  ASSIGN_OR_RETURN(auto weights, MakeCudaWeights(config, source, dummy, workspace_bytes,
                                                 options.rank.parallel.world_size(), device));
  ASSIGN_OR_RETURN(auto workspace, MakeCudaWorkspace(config, limits, grouped_columns, head_rows,
                                                     shared, data_ranks, device));
  ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
  for (const LayerKind kind : {LayerKind::kWindow, LayerKind::kC4}) {
    const std::vector<float> frequencies = kernels::RopeFrequencies(config, kind);
    float* to = workspace->frequencies + (kind == LayerKind::kWindow ? 0 : 32);
    RETURN_IF_ERROR(stream->Copy(to, frequencies.data(), 32 * 4));
    RETURN_IF_ERROR(stream->Synchronize());
  }
  ASSIGN_OR_RETURN(auto uploader, StepUploader::Make(limits, config.index_topk, *workspace));
  std::unique_ptr<CudaStages> stages;
  if (options.rank.parallel.pipeline_parallel_size > 1) {
    ASSIGN_OR_RETURN(stages, CudaStages::Make(options.rank));
  }
  return std::unique_ptr<DeepSeekV4>(std::make_unique<CudaModel>(
      config, index_dtype, std::move(weights), limits, std::move(workspace), std::move(uploader),
      std::move(stages), grouped_columns, has_whole_attention, options));
}

}  // namespace fathom::model
