#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "checkpoint/shard.h"
#include "kernels/embedding/embedding.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/indexer/indexer.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "model/layers.h"
#include "model/model.h"

namespace fathom::model {
namespace {

using kernels::Launch;

template <typename T>
class DeepSeekV4Model final : public DeepSeekV4 {
 public:
  DeepSeekV4Model(const config::ModelConfig& config, kv_cache::IndexKeyDType index_dtype,
                  std::shared_ptr<const Weights> weights, const ModelLimits& limits,
                  std::unique_ptr<Workspace<T>> workspace, const ModelRank& rank)
      : config_(config),
        layout_(kv_cache::MakeKvLayout(
            config, kernels::kIsOfficial<T> ? config::Numerics::kOfficial : config::Numerics::kFp32,
            index_dtype)),
        index_dtype_(index_dtype),
        weights_(std::move(weights)),
        limits_(limits),
        workspace_(std::move(workspace)),
        ranks_(rank),
        frequencies_plain_(kernels::RopeFrequencies(config, config::LayerKind::kWindow)),
        frequencies_compressed_(kernels::RopeFrequencies(config, config::LayerKind::kC4)),
        constants_{static_cast<float>(config.rms_norm_eps), static_cast<float>(config.hc_eps),
                   config.hc_sinkhorn_iters} {}

  Status Forward(const ForwardBatch& batch, const KvCacheView& kv, float* logits,
                 device::Stream& stream, ChoiceRecorder* recorder) override {
    const auto num_tokens = static_cast<int32_t>(batch.token_ids.size());
    StepContext<T> step{.config = config_,
                        .layout = layout_,
                        .index_dtype = index_dtype_,
                        .frequencies_plain = frequencies_plain_,
                        .frequencies_compressed = frequencies_compressed_,
                        .batch = MakeBatchView(batch),
                        .c4_entries = {},
                        .c128_entries = {},
                        .kv = kv,
                        .ws = *workspace_,
                        .stream = stream,
                        .ranks = ranks_,
                        .data_rank_tokens = batch.data_rank_tokens.empty()
                                                ? std::span(&num_tokens, 1)
                                                : batch.data_rank_tokens,
                        .recorder = recorder,
                        .expert_ids = batch.expert_ids};
    if (num_tokens == 0) return RunWithoutTokens(step);
    PlanStep(step);
    RETURN_IF_ERROR(Begin(step));
    for (int layer = 0; layer < config_.num_layers; ++layer) {
      const BlockWeights& block = weights_->layers[static_cast<size_t>(layer)];
      Pre(step, block.hc_attn, block.attn_norm);
      RETURN_IF_ERROR(RunAttention(step, layer, block.attn));
      Post(step);
      Pre(step, block.hc_ffn, block.ffn_norm);
      RETURN_IF_ERROR(RunMoe(step, layer, block.ffn));
      Post(step);
      if (recorder != nullptr) recorder->OnStreams(layer, std::as_bytes(Streams(step)));
    }
    if (!ranks_.is_last_stage()) return ranks_.SendToStageAfter(std::as_bytes(Streams(step)));
    return Logits(step, batch.logits_rows, logits);
  }

 private:
  // Other data ranks have tokens, which this one's experts run.
  Status RunWithoutTokens(StepContext<T>& step) {
    if (ranks_.size(RankGroups::Who::kData) == 1) return OkStatus();
    for (int layer = 0; layer < config_.num_layers; ++layer) {
      RETURN_IF_ERROR(RunMoe(step, layer, weights_->layers[static_cast<size_t>(layer)].ffn));
    }
    return OkStatus();
  }

  std::span<T> Streams(const StepContext<T>& step) const {
    return {step.ws.streams,
            static_cast<size_t>(step.num_tokens() * config_.hc_mult * config_.hidden_size)};
  }

  // The residual streams: of the embedding, or the stage before's.
  Status Begin(StepContext<T>& step) {
    if (!ranks_.is_first_stage()) {
      return ranks_.ReceiveFromStageBefore(std::as_writable_bytes(Streams(step)));
    }
    Embed(step);
    return OkStatus();
  }

  // Copies the ids and spells out every token's sequence and position.
  kernels::BatchView MakeBatchView(const ForwardBatch& batch) {
    const size_t num_tokens = batch.token_ids.size();
    const size_t num_seqs = batch.num_computed.size();
    CHECK_LE(num_tokens, static_cast<size_t>(limits_.max_batched_tokens));
    CHECK_LE(num_seqs, static_cast<size_t>(limits_.max_num_seqs));
    CHECK_EQ(batch.cu_seqlens_q.size(), num_seqs + 1);
    CHECK_EQ(static_cast<size_t>(batch.cu_seqlens_q[num_seqs]), num_tokens);
    Workspace<T>& ws = *workspace_;
    std::copy(batch.token_ids.begin(), batch.token_ids.end(), ws.token_ids);
    for (size_t s = 0; s < num_seqs; ++s) {
      const int32_t first = batch.cu_seqlens_q[s];
      const int32_t count = batch.cu_seqlens_q[s + 1] - first;
      CHECK_LE(batch.num_computed[s] + count, limits_.max_model_len);
      for (int32_t i = 0; i < count; ++i) {
        ws.token_seq[first + i] = static_cast<int32_t>(s);
        ws.positions[first + i] = batch.num_computed[s] + i;
      }
    }
    return {.cu_seqlens_q = batch.cu_seqlens_q,
            .num_computed = batch.num_computed,
            .token_seq = {ws.token_seq, num_tokens},
            .positions = {ws.positions, num_tokens},
            .block_tables = batch.block_tables,
            .max_blocks = batch.max_blocks,
            .window_tables = batch.window_tables,
            .max_window_pages = batch.max_window_pages,
            .first_window_page = batch.first_window_page,
            .state_slots = batch.state_slots};
  }

  void PlanStep(StepContext<T>& step) {
    Workspace<T>& ws = step.ws;
    const auto tokens = static_cast<size_t>(limits_.max_batched_tokens);
    const auto seqs = static_cast<size_t>(limits_.max_num_seqs);
    const int c4 =
        kernels::PlanCompressedEntries(step.batch, 4, {ws.c4_entries, tokens / 4 + seqs});
    const int c128 =
        kernels::PlanCompressedEntries(step.batch, 128, {ws.c128_entries, tokens / 128 + seqs});
    step.c4_entries = {ws.c4_entries, static_cast<size_t>(c4)};
    step.c128_entries = {ws.c128_entries, static_cast<size_t>(c128)};
    step.any_index_scoring =
        std::any_of(step.batch.positions.begin(), step.batch.positions.end(),
                    [this](int32_t position) { return (position + 1) / 4 > config_.index_topk; });
    for (const bool compressed : {false, true}) {
      Launch(
          kernels::RopeAnglesParams{
              .positions = ws.positions,
              .num_tokens = step.num_tokens(),
              .frequencies = compressed ? frequencies_compressed_ : frequencies_plain_,
              .angles = compressed ? ws.angles_compressed : ws.angles_plain},
          step.stream);
    }
  }

  void Embed(StepContext<T>& step) {
    Launch(kernels::EmbeddingParams<T>{.token_ids = step.ws.token_ids,
                                       .num_tokens = step.num_tokens(),
                                       .table = weights_->embed,
                                       .num_streams = config_.hc_mult,
                                       .streams = step.ws.streams},
           step.stream);
  }

  // streams -> h, with post and C kept for Post.
  void Pre(StepContext<T>& step, const HyperConnectionWeights& w, const BFloat16* norm) {
    Workspace<T>& ws = step.ws;
    Linear(ws.streams, step.num_tokens(), w.fn, ws.mixes, step.stream);
    Launch(kernels::HyperConnectionPreParams<T>{.streams = ws.streams,
                                                .num_tokens = step.num_tokens(),
                                                .hidden = config_.hidden_size,
                                                .mixes = ws.mixes,
                                                .scale = w.scale,
                                                .base = w.base,
                                                .norm_weight = norm,
                                                .constants = constants_,
                                                .y = ws.h,
                                                .post = ws.post,
                                                .comb = ws.comb},
           step.stream);
  }

  void Post(StepContext<T>& step) {
    Workspace<T>& ws = step.ws;
    Launch(kernels::HyperConnectionPostParams<T>{.streams = ws.streams,
                                                 .num_tokens = step.num_tokens(),
                                                 .hidden = config_.hidden_size,
                                                 .y = ws.y,
                                                 .post = ws.post,
                                                 .comb = ws.comb},
           step.stream);
  }

  Status Logits(StepContext<T>& step, std::span<const int32_t> rows, float* logits) {
    if (rows.empty()) return OkStatus();
    Workspace<T>& ws = step.ws;
    const auto m = static_cast<int64_t>(rows.size());
    const int64_t hidden = config_.hidden_size;
    const int64_t row_size = config_.hc_mult * hidden;
    // Ascending rows move to the front without overwriting each other.
    for (int64_t i = 0; i < m; ++i) {
      const int64_t row = rows[static_cast<size_t>(i)];
      if (row != i) std::copy_n(ws.streams + row * row_size, row_size, ws.streams + i * row_size);
    }
    Linear(ws.streams, m, weights_->hc_head.fn, ws.mixes, step.stream);
    Launch(kernels::HyperConnectionHeadParams<T>{.streams = ws.streams,
                                                 .num_tokens = m,
                                                 .hidden = hidden,
                                                 .mixes = ws.mixes,
                                                 .scale = weights_->hc_head.scale,
                                                 .base = weights_->hc_head.base,
                                                 .constants = constants_,
                                                 .y = ws.y},
           step.stream);
    Launch(kernels::RmsNormParams<T>{.x = ws.y,
                                     .weight = weights_->norm,
                                     .y = ws.y,
                                     .num_rows = m,
                                     .size = hidden,
                                     .x_stride = hidden,
                                     .y_stride = hidden,
                                     .eps = constants_.norm_eps},
           step.stream);
    constexpr auto kTensor = RankGroups::Who::kTensor;
    const auto columns = ranks_.PartsOf(kTensor, config_.vocab_size, checkpoint::kVocabularyRows);
    Linear(ws.y, m, weights_->head,
           logits + columns[static_cast<size_t>(ranks_.rank(kTensor))].begin, step.stream, 1,
           config_.vocab_size);
    return ranks_.GatherColumns(kTensor, logits, m, columns);
  }

  const config::ModelConfig config_;
  const kv_cache::KvLayout layout_;
  const kv_cache::IndexKeyDType index_dtype_;
  const std::shared_ptr<const Weights> weights_;
  const ModelLimits limits_;
  const std::unique_ptr<Workspace<T>> workspace_;
  RankGroups ranks_;
  const std::vector<float> frequencies_plain_;
  const std::vector<float> frequencies_compressed_;
  const kernels::HyperConnectionConstants constants_;
};

template <typename T>
Result<std::unique_ptr<DeepSeekV4>> MakeModel(const config::ModelConfig& config,
                                              kv_cache::IndexKeyDType index_dtype,
                                              std::shared_ptr<const Weights> weights,
                                              const ModelLimits& limits, device::Device& device,
                                              const ModelRank& rank) {
  ASSIGN_OR_RETURN(const std::unique_ptr<device::Stream> stream, device.MakeStream());
  const WorkspaceSizes sizes{.limits = limits,
                             .num_threads = stream->thread_pool().num_threads(),
                             .num_data_ranks = rank.parallel.data_parallel_size,
                             .grouped_size = weights->layers.at(0).attn.wo_b.cols};
  ASSIGN_OR_RETURN(std::unique_ptr<Workspace<T>> workspace,
                   MakeWorkspace<T>(config, sizes, device));
  return std::unique_ptr<DeepSeekV4>(std::make_unique<DeepSeekV4Model<T>>(
      config, index_dtype, std::move(weights), limits, std::move(workspace), rank));
}

// Sizes that the kernels fix or bound.
Status CheckSizes(const config::ModelConfig& c) {
  const auto refuse = [](const char* name, int64_t value, const char* expected) {
    return BadModel(fmt::format("{} is {}: this build runs {}", name, value, expected));
  };
  if (c.hc_mult != kernels::kNumStreams) return refuse("hc_mult", c.hc_mult, "4");
  if (c.head_dim > kernels::kMaxEntrySize) return refuse("head_dim", c.head_dim, "at most 512");
  if (c.index_head_dim > kernels::kMaxIndexHeadDim) {
    return refuse("index_head_dim", c.index_head_dim, "at most 128");
  }
  if (c.num_heads > kernels::kMaxAttentionHeads) {
    return refuse("num_attention_heads", c.num_heads, "at most 256");
  }
  const int64_t group_cols = c.o_groups == 0 ? 0 : int64_t{c.num_heads} * c.head_dim / c.o_groups;
  const int64_t longest =
      std::max({int64_t{c.hc_mult} * c.hidden_size, int64_t{c.q_lora_rank},
                int64_t{c.o_groups} * c.o_lora_rank, group_cols, int64_t{c.moe_intermediate_size}});
  if (longest > kernels::kMaxGemmCols)
    return refuse("the longest weight row", longest, "at most 65536");
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4(const config::ModelConfig& config,
                                                   config::Numerics numerics,
                                                   kv_cache::IndexKeyDType index_dtype,
                                                   std::shared_ptr<const Weights> weights,
                                                   const ModelLimits& limits,
                                                   device::Device& device, const ModelRank& rank) {
  if (device.kind() != device::DeviceKind::kCpu) {
    return DeviceError("the model runs on the CPU only so far: use --device cpu");
  }
  RETURN_IF_ERROR(CheckSizes(config));
  if (numerics == config::Numerics::kFp32) {
    return MakeModel<float>(config, index_dtype, std::move(weights), limits, device, rank);
  }
  return MakeModel<BFloat16>(config, index_dtype, std::move(weights), limits, device, rank);
}

}  // namespace fathom::model
