#include "model/deepseek_v4_cuda.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "comm/cuda_expert_ranks.h"
#include "device/cuda/cuda_check.h"
#include "device/cuda/fault_keeper.h"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_cuda.h"
#include "model/cuda_graphs.h"
#include "model/cuda_layers.h"
#include "model/cuda_milestones.h"
#include "model/cuda_recording.h"
#include "model/cuda_sizes.h"
#include "model/cuda_stages.h"
#include "model/cuda_step.h"
#include "model/cuda_tensor_ranks.h"
#include "model/cuda_weights.h"
#include "model/cuda_workspace.h"

namespace fathom::model {
namespace {

using config::LayerKind;
using kernels::GemmOutput;

// Captured steps that are kept, some 2 MB each: of up to 64 sequences at contexts of any length.
constexpr size_t kMaxGraphs = 128;

int NumDataRanks(const CudaModelOptions& options) {
  return options.expert_ranks == nullptr ? 1 : options.expert_ranks->num_data_ranks();
}

class CudaModel final : public DeepSeekV4 {
 public:
  CudaModel(const config::ModelConfig& config, kv_cache::IndexKeyDType index_dtype,
            std::unique_ptr<const CudaWeights> weights, const ModelLimits& limits,
            std::unique_ptr<CudaWorkspace> workspace, CudaMilestones milestones,
            std::unique_ptr<StepUploader> uploader, std::unique_ptr<CudaStages> stages,
            int64_t grouped_columns, bool has_whole_attention, const CudaModelOptions& options)
      : c_(config),
        layout_(kv_cache::MakeKvLayout(config, config::Numerics::kOfficial, index_dtype)),
        weights_(std::move(weights)),
        limits_(limits),
        ws_(std::move(workspace)),
        milestones_(std::move(milestones)),
        recording_(config, *ws_),
        uploader_(std::move(uploader)),
        stages_(std::move(stages)),
        options_(options),
        ranks_(config, *ws_, options.collectives.get(), grouped_columns, has_whole_attention,
               options.expert_ranks != nullptr),
        expert_ranks_(options.expert_ranks.get()),
        operators_(options.sync_operators),
        context_{.config = c_,
                 .layout = layout_,
                 .index_dtype = index_dtype,
                 .ws = *ws_,
                 .recording = recording_,
                 .ranks = ranks_,
                 .expert_ranks = expert_ranks_,
                 .operators = operators_,
                 .is_first_stage = is_first_stage()},
        constants_{static_cast<float>(config.rms_norm_eps), static_cast<float>(config.hc_eps),
                   config.hc_sinkhorn_iters} {
    Check(cudaGetDevice(&gpu_));
  }

  Status Health() override {
    RETURN_IF_ERROR(ranks_.Check());
    return expert_ranks_ == nullptr ? OkStatus() : expert_ranks_->Check();
  }

  std::string LastBegun() const override {
    std::string half = milestones_.LastBegun(c_.num_layers);
    const auto kernel = device::FindBrokenKernel();
    if (!kernel) return half;
    return fmt::format("{}, in {} of {} blocks of {} threads", half, kernel->name, kernel->blocks,
                       kernel->threads);
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
    const int data_ranks = NumDataRanks(options_);
    const bool all_decode = data_ranks == 1 || batch.data_ranks_decode;
    const bool decode = recorder == nullptr && IsDecode(batch);
    const int num_tokens = static_cast<int>(batch.token_ids.size());
    const int num_decodes = decode && all_decode ? most_tokens : std::max(num_tokens, 1);
    CudaStep step = uploader_->Upload(batch, decode || num_tokens == 0 ? num_decodes : 0, stream);
    step.most_tokens = most_tokens;
    step.experts_prefill = data_ranks == 1 ? step.prefill : !all_decode;
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
    return ranks_.are_captured() && (expert_ranks_ == nullptr || expert_ranks_->is_captured()) &&
           !options_.enforce_eager && !options_.sync_operators;
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
    operators_.BeginLayer(CudaOperators::kNoLayer);
    Angles(step);
    const CudaStep share = ranks_.ShareOf(step);
    if (is_first_stage()) Embed(share);
    kernels::SublayerOutput output;
    for (int idx = 0; idx < c_.num_layers; ++idx) {
      const CudaBlockWeights& w = weights_->layers[static_cast<size_t>(idx)];
      const CudaLayer layer{.step = step, .share = share, .idx = idx, .w = w};
      operators_.BeginLayer(idx);
      Boundary(share, output, ws_->ffn_state, w.hc_attn, w.attn_norm, ws_->attn_state,
               milestones_.Attention(idx));
      if (idx > 0 && recording_.TakeStreams(step, idx - 1)) {
        Boundary(step, {}, ws_->ffn_state, w.hc_attn, w.attn_norm, ws_->attn_state,
                 milestones_.Attention(idx));
      }
      EnqueueAttention(context_, layer);
      Boundary(share, {.y = ws_->y}, ws_->attn_state, w.hc_ffn, w.ffn_norm, ws_->ffn_state,
               milestones_.Experts(idx), ranks_.RouteInput(share, idx, w).told);
      output = EnqueueMoe(context_, layer);
    }
    operators_.BeginLayer(CudaOperators::kNoLayer);
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

  void Angles(const CudaStep& step) {
    operators_.Enqueue(
        step, "rope angles",
        kernels::CudaRopeAnglesParams{.positions = step.batch.positions,
                                      .num_tokens = step.batch.num_tokens,
                                      .frequencies_plain = ws_->frequencies,
                                      .frequencies_compressed = ws_->frequencies + 32,
                                      .angles_plain = ws_->angles_plain,
                                      .angles_compressed = ws_->angles_compressed,
                                      .number = ws_->step_number,
                                      .num_numbers = static_cast<uint32_t>(c_.num_layers)});
  }

  void Embed(const CudaStep& step) {
    operators_.Enqueue(step, "embedding",
                       kernels::CudaEmbeddingParams{.token_ids = step.token_ids,
                                                    .token_sources = step.token_sources,
                                                    .sampled = step.sampled,
                                                    .resolved = ws_->token_ids + step.first_token,
                                                    .num_tokens = step.batch.num_tokens,
                                                    .table = weights_->embed,
                                                    .hidden = c_.hidden_size,
                                                    .streams = Streams(step)});
  }

  __nv_bfloat16* Streams(const CudaStep& step) const {
    return ws_->streams + int64_t{step.first_token} * 4 * c_.hidden_size;
  }

  void Boundary(const CudaStep& step, kernels::SublayerOutput output,
                const kernels::HyperConnectionState& before, const CudaHyperConnection& w,
                const __nv_bfloat16* norm, const kernels::HyperConnectionState& after,
                const kernels::Milestone& milestone = {}, const kernels::NumberedWords& told = {}) {
    const kernels::OutputExchange gather =
        ranks_.CompleteOutput(step, operators_.layer(), step.batch.num_tokens, false, output);
    if (output.y != nullptr) output.y += int64_t{step.first_token} * c_.hidden_size;
    operators_.Enqueue(step, "boundary",
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
                                                          .h = context_.H(step),
                                                          .h_fp8 = context_.HFp8(step),
                                                          .told = told,
                                                          .scratch = ws_->boundary_scratch,
                                                          .milestone = milestone});
  }

  void Logits(const CudaStep& step, const CudaStep& share, kernels::SublayerOutput output) {
    if (step.num_logits_rows == 0) return;
    if (share.is_share()) ranks_.GatherStreams(share);
    const kernels::OutputExchange gather =
        ranks_.CompleteOutput(step, operators_.layer(), step.num_logits_rows, true, output);
    const int64_t groups = kernels::PaddedTokens(step.num_logits_rows, step.prefill) / 8;
    operators_.Enqueue(step, "last boundary",
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
    operators_.Enqueue(step, "head", head);
    ranks_.CompleteLogits(step);
  }

  const config::ModelConfig c_;
  const kv_cache::KvLayout layout_;
  const std::unique_ptr<const CudaWeights> weights_;
  const ModelLimits limits_;
  const std::unique_ptr<CudaWorkspace> ws_;
  const CudaMilestones milestones_;
  const CudaRecording recording_;
  const std::unique_ptr<StepUploader> uploader_;
  const std::unique_ptr<CudaStages> stages_;  // null: there is one
  const CudaModelOptions options_;
  CudaTensorRanks ranks_;
  comm::CudaExpertRanks* const expert_ranks_;  // null: no rank has whole experts
  CudaOperators operators_;
  const CudaContext context_;
  const kernels::HyperConnectionConstants constants_;
  int gpu_ = 0;
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
  RETURN_IF_ERROR(CheckCudaSizes(config, limits, tensor_ranks));
  ASSIGN_OR_RETURN(const std::vector<int64_t> wo_b, ShapeOf(source, "wo_b"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> wq_b, ShapeOf(source, "wq_b"));
  const int64_t grouped_columns = wo_b.back();  // of all tensor ranks
  const int64_t all_heads = wq_b.front() / config.head_dim;
  const bool has_whole_attention = all_heads > config.num_heads;
  const int64_t head_rows =
      MostHeadRows(limits, config.num_heads, has_whole_attention ? all_heads : 0, tensor_ranks);
  const int data_ranks = NumDataRanks(options);
  std::byte* const shared =
      options.collectives == nullptr ? nullptr : options.collectives->shared_memory();
  const int64_t workspace_bytes =
      CudaWorkspaceBytes(config, limits, head_rows, data_ranks) +
      (shared == nullptr ? SharedWorkspaceBytes(config, limits, grouped_columns, data_ranks) : 0);
  ASSIGN_OR_RETURN(auto weights, MakeCudaWeights(config, source, dummy, workspace_bytes,
                                                 options.rank.parallel.world_size(), device));
  ASSIGN_OR_RETURN(auto workspace, MakeCudaWorkspace(config, limits, grouped_columns, head_rows,
                                                     shared, data_ranks, device));
  ASSIGN_OR_RETURN(auto milestones, CudaMilestones::Make(device));
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
      config, index_dtype, std::move(weights), limits, std::move(workspace), std::move(milestones),
      std::move(uploader), std::move(stages), grouped_columns, has_whole_attention, options));
}

}  // namespace fathom::model
