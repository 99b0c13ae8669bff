#include "apps/fathom/model_session.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>

#include "apps/fathom/commands.h"
#include "apps/fathom/progress.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/embedded_files.h"
#include "checkpoint/synthetic_checkpoint.h"
#include "model/deepseek_v4_cuda.h"
#include "model/weights.h"

namespace fathom::app {
namespace {

// Reads pass through; what has been read is shown.
class ReportingSource final : public checkpoint::TensorSource {
 public:
  ReportingSource(std::unique_ptr<checkpoint::TensorSource> source, const std::string& what)
      : source_(std::move(source)), progress_(what) {
    for (const checkpoint::TensorInfo& tensor : source_->tensors()) total_bytes_ += tensor.bytes;
  }
  const std::vector<checkpoint::TensorInfo>& tensors() const override { return source_->tensors(); }
  const checkpoint::TensorInfo* Find(std::string_view name) const override {
    return source_->Find(name);
  }
  Status Read(const checkpoint::TensorInfo& tensor, int64_t offset,
              std::span<std::byte> out) const override {
    if (!begun_.exchange(true)) begin_ = clock_.Now();
    RETURN_IF_ERROR(source_->Read(tensor, offset, out));
    std::lock_guard lock(mutex_);
    done_bytes_ += static_cast<int64_t>(out.size());
    progress_.Update(done_bytes_, total_bytes_);
    return OkStatus();
  }
  int64_t total_bytes() const { return total_bytes_; }
  // When no thread reads any more: what was read, and since when.
  int64_t bytes_read() const { return done_bytes_; }
  double SecondsSinceFirstRead() const { return begun_ ? Seconds(clock_.Now() - begin_) : 0; }

 private:
  const std::unique_ptr<checkpoint::TensorSource> source_;
  const SystemClock clock_;
  int64_t total_bytes_ = 0;
  mutable std::atomic<bool> begun_{false};
  mutable TimePoint begin_{};  // written once
  mutable std::mutex mutex_;
  mutable int64_t done_bytes_ = 0;  // guarded by mutex_
  mutable ProgressLine progress_;   // guarded by mutex_
};

// Set: each operator is waited for on the GPU, so that a fault has a name in the log. Slow.
constexpr const char* kSyncVariable = "FATHOM_CUDA_SYNC";

int NumThreads(const ModelOptions& options) {
  return options.num_threads > 0 ? options.num_threads : NumUsableCores();
}

Result<std::unique_ptr<device::Device>> OpenDevice(const ModelOptions& options) {
  const bool fp32 = options.numerics == config::Numerics::kFp32;
  if (options.device == DeviceChoice::kCuda) {
    if (fp32) return InvalidArgument("--numerics fp32 runs on the CPU only: add --device cpu");
    return device::MakeCudaDevice(0);
  }
  if (options.device == DeviceChoice::kAuto && !fp32) {
    auto gpu = device::MakeCudaDevice(0);
    if (gpu.ok()) return gpu;
  }
  return device::MakeCpuDevice(NumThreads(options));
}

Result<std::unique_ptr<model::DeepSeekV4>> LoadModel(const ModelOptions& options,
                                                     const ModelSession& session,
                                                     const checkpoint::TensorSource& source) {
  if (session.device->kind() == device::DeviceKind::kCuda) {
    return model::MakeDeepSeekV4Cuda(session.config, session.index_dtype, source,
                                     options.load_format == LoadFormat::kDummy, session.limits,
                                     *session.device,
                                     {.enforce_eager = options.enforce_eager,
                                      .sync_operators = std::getenv(kSyncVariable) != nullptr});
  }
  ASSIGN_OR_RETURN(auto weights, model::LoadWeights(session.config, source, *session.device));
  return model::MakeDeepSeekV4(session.config, session.numerics, session.index_dtype,
                               std::move(weights), session.limits, *session.device);
}

Result<config::ModelConfig> LoadConfig(const ModelOptions& options, std::string text) {
  if (options.num_hidden_layers > 0) {
    ASSIGN_OR_RETURN(text, checkpoint::CutLayers(text, options.num_hidden_layers));
  }
  return checkpoint::ParseModelConfig(text, options.model);
}

// A preset's name stands for its config with dummy weights; anything else is a folder.
Status FindModel(const ModelOptions& options, SessionText text, ModelSession* session) {
  const bool dummy = options.load_format == LoadFormat::kDummy;
  if (options.num_hidden_layers > 0 && !dummy) {
    return InvalidArgument("--num-hidden-layers goes with --load-format dummy");
  }
  const bool is_preset =
      dummy && (options.model == "flash" || options.model == "pro" || options.model == "tiny");
  if (is_preset) {
    ASSIGN_OR_RETURN(std::string config, checkpoint::PresetConfigText(options.model));
    ASSIGN_OR_RETURN(session->config, LoadConfig(options, std::move(config)));
    ASSIGN_OR_RETURN(session->tokenizer,
                     text::Tokenizer::Parse(checkpoint::kTinyTokenizer, "the built-in tokenizer"));
    return OkStatus();
  }
  ASSIGN_OR_RETURN(session->folder,
                   checkpoint::ResolveModelFolder(options.model, HuggingFaceHome()));
  ASSIGN_OR_RETURN(session->config, checkpoint::LoadModelConfig(session->folder));
  if (options.num_hidden_layers > 0) {
    ASSIGN_OR_RETURN(std::string config, ReadTextFile(session->folder + "/config.json"));
    ASSIGN_OR_RETURN(session->config, LoadConfig(options, std::move(config)));
  }
  if (text == SessionText::kTokensOnly) return OkStatus();
  ASSIGN_OR_RETURN(session->tokenizer, text::Tokenizer::Load(session->folder + "/tokenizer.json"));
  return OkStatus();
}

// The longest sequence: what was asked for, within what the model was made for. Auto: 32K tokens on
// a CPU, where a longer context would take the machine's memory without being asked for; on a GPU
// the most, of which the engine takes what its KV cache holds.
Result<int64_t> ChooseModelLen(const ModelOptions& options, const config::ModelConfig& config,
                               device::DeviceKind device) {
  constexpr int64_t kAutoCpuModelLen = 32768;
  if (options.max_model_len == 0) {
    return device == device::DeviceKind::kCuda
               ? config.max_position_embeddings
               : std::min(kAutoCpuModelLen, config.max_position_embeddings);
  }
  if (options.max_model_len > config.max_position_embeddings) {
    return InvalidArgument(
        fmt::format("--max-model-len {} is more than the model's max_position_embeddings {}",
                    options.max_model_len, config.max_position_embeddings));
  }
  return options.max_model_len;
}

}  // namespace

Result<ModelSession> OpenModel(const ModelOptions& options, SessionText text) {
  const SystemClock clock;
  const TimePoint start = clock.Now();
  ModelSession session;
  RETURN_IF_ERROR(FindModel(options, text, &session));
  if (text == SessionText::kTokenizer) {
    ASSIGN_OR_RETURN(session.special_tokens, text::SpecialTokens::Find(*session.tokenizer));
  }
  session.numerics = options.numerics;
  session.index_dtype = options.numerics == config::Numerics::kFp32
                            ? kv_cache::IndexKeyDType::kFp32
                            : options.index_dtype.value_or(kv_cache::IndexKeyDType::kFp4);
  ASSIGN_OR_RETURN(session.device, OpenDevice(options));
  ASSIGN_OR_RETURN(session.limits.max_model_len,
                   ChooseModelLen(options, session.config, session.device->kind()));
  session.limits.max_num_seqs = options.max_num_seqs;
  session.limits.max_batched_tokens =
      std::max(options.max_num_batched_tokens, options.max_num_seqs);

  std::unique_ptr<checkpoint::TensorSource> source;
  if (options.load_format == LoadFormat::kDummy) {
    source = checkpoint::MakeSyntheticSource(session.config, options.seed);
  } else {
    ASSIGN_OR_RETURN(source, checkpoint::OpenCheckpoint(session.folder, session.config));
  }
  const ReportingSource reporting(std::move(source), "loading " + options.model);
  ASSIGN_OR_RETURN(session.model, LoadModel(options, session, reporting));
  session.load_times = {.bytes = reporting.bytes_read(),
                        .transfer_seconds = reporting.SecondsSinceFirstRead(),
                        .seconds = Seconds(clock.Now() - start)};
  LogInfo("loaded {} ({}) onto {} in {:.2f} s", options.model,
          FormatBytes(static_cast<double>(reporting.total_bytes())), session.device->name(),
          session.load_times.seconds);
  return session;
}

}  // namespace fathom::app
