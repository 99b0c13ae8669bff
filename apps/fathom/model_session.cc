#include "apps/fathom/model_session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "apps/fathom/commands.h"
#include "apps/fathom/join_nodes.h"
#include "apps/fathom/progress.h"
#include "base/clock.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/embedded_files.h"
#include "checkpoint/synthetic_checkpoint.h"
#include "kv_cache/chain_hash.h"

namespace fathom::app {
namespace {

Result<config::ModelConfig> LoadConfig(const ModelOptions& options, std::string text) {
  if (options.num_hidden_layers > 0) {
    ASSIGN_OR_RETURN(text, checkpoint::CutLayers(text, options.num_hidden_layers));
  }
  return checkpoint::ParseModelConfig(text, options.model);
}

Result<std::string> FindFolder(const std::string& model) {
  std::error_code error;
  if (checkpoint::PresetConfigText(model).ok() && !std::filesystem::exists(model, error)) {
    return BadModel(fmt::format(
        "{} is a size without weights: add --load-format dummy, which makes some up, or "
        "name a model folder or a Hugging Face repository",
        model));
  }
  return checkpoint::ResolveModelFolder(model, HuggingFaceHome());
}

// A preset's name stands for its config with dummy weights; anything else is a folder.
Status FindModel(const ModelOptions& options, SessionText text, ModelSession* session) {
  const bool dummy = options.load_format == LoadFormat::kDummy;
  if (options.num_hidden_layers > 0 && !dummy) {
    return InvalidArgument("--num-hidden-layers goes with --load-format dummy");
  }
  Result<std::string> preset = checkpoint::PresetConfigText(options.model);
  if (dummy && preset.ok()) {
    ASSIGN_OR_RETURN(session->config, LoadConfig(options, *std::move(preset)));
    ASSIGN_OR_RETURN(session->tokenizer,
                     text::Tokenizer::Parse(checkpoint::kTinyTokenizer, "the built-in tokenizer"));
    return OkStatus();
  }
  ASSIGN_OR_RETURN(session->folder, FindFolder(options.model));
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

// Two configs have the same name when they are the same text; a preset has its own.
Result<std::string> NameOfConfig(const ModelSession& session, const std::string& model) {
  if (session.folder.empty()) return model;
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(session.folder + "/config.json"));
  const std::string_view parts[] = {text};
  const kv_cache::HashKey key = kv_cache::DeriveKey(parts);
  return fmt::format("config.json {:02x}", fmt::join(std::span(key).first(8), ""));
}

// The ranks of this process: devices, and transports to all others.
Status OpenRanks(const ModelOptions& options, ModelSession& session) {
  session.parallel = options.parallel;
  if (options.only_rank) {
    ASSIGN_OR_RETURN(session.ranks, OpenDevices(options, 1, 0));
    session.ranks.front().place = PlaceOf(options.parallel, *options.only_rank);
    return OkStatus();
  }
  ASSIGN_OR_RETURN(const std::string name, NameOfConfig(session, options.model));
  ASSIGN_OR_RETURN(JoinedNodes joined, JoinNodes(options, name));
  session.nodes = std::move(joined.group);
  ASSIGN_OR_RETURN(session.ranks,
                   OpenDevices(options, joined.num_local_ranks, joined.local_device.value_or(0)));
  if (session.nodes == nullptr) return OkStatus();
  const comm::NodeInfo& own =
      session.nodes->nodes()[static_cast<size_t>(session.nodes->node_rank())];
  for (int i = 0; i < joined.num_local_ranks; ++i) {
    SessionRank& rank = session.ranks[static_cast<size_t>(i)];
    rank.place = PlaceOf(options.parallel, own.first_rank + i);
    rank.transport = &session.nodes->transport(i);
  }
  return OkStatus();
}

double TotalBytes(const checkpoint::TensorSource& source) {
  double bytes = 0;
  for (const checkpoint::TensorInfo& tensor : source.tensors()) {
    bytes += static_cast<double>(tensor.bytes);
  }
  return bytes;
}

using BeforeLoading = std::function<Status(const ModelSession&)>;

// From the devices to the weights.
Status LoadSession(const ModelOptions& options, TimePoint start,
                   const BeforeLoading& before_loading, ModelSession& session) {
  RETURN_IF_ERROR(OpenRanks(options, session));
  if (before_loading) RETURN_IF_ERROR(before_loading(session));
  ASSIGN_OR_RETURN(session.limits.max_model_len,
                   ChooseModelLen(options, session.config, session.device().kind()));
  session.limits.max_num_seqs = options.max_num_seqs;
  session.limits.max_batched_tokens =
      std::max(MaxBatchedTokens(options, session.device().kind()), options.max_num_seqs);

  std::unique_ptr<checkpoint::TensorSource> source;
  if (options.load_format == LoadFormat::kDummy) {
    source = checkpoint::MakeSyntheticSource(session.config, options.seed);
  } else {
    ASSIGN_OR_RETURN(source, checkpoint::OpenCheckpoint(session.folder, session.config));
  }
  const RankModelOptions model_options{.config = session.config,
                                       .numerics = session.numerics,
                                       .index_dtype = session.index_dtype,
                                       .limits = session.limits};
  RETURN_IF_ERROR(LoadRanks(options, model_options, *source, session.ranks, session.load_times));
  session.load_times.seconds = Seconds(SystemClock().Now() - start);
  LogInfo("loaded {} ({}) onto {}{} in {:.2f} s", options.model, FormatBytes(TotalBytes(*source)),
          session.ranks.size() > 1 ? fmt::format("{} x ", session.ranks.size()) : "",
          session.device().name(), session.load_times.seconds);
  return OkStatus();
}

}  // namespace

int MaxBatchedTokens(const ModelOptions& options, device::DeviceKind device) {
  if (options.max_num_batched_tokens > 0) return options.max_num_batched_tokens;
  return device == device::DeviceKind::kCuda ? 8192 : 2048;
}

Result<ModelSession> OpenModel(const ModelOptions& options, SessionText text,
                               const BeforeLoading& before_loading) {
  const TimePoint start = SystemClock().Now();
  ModelSession session;
  RETURN_IF_ERROR(FindModel(options, text, &session));
  if (text == SessionText::kTokenizer) {
    ASSIGN_OR_RETURN(session.special_tokens, text::SpecialTokens::Find(*session.tokenizer));
  }
  session.numerics = options.numerics;
  session.index_dtype = options.numerics == config::Numerics::kFp32
                            ? kv_cache::IndexKeyDType::kFp32
                            : options.index_dtype.value_or(kv_cache::IndexKeyDType::kFp4);
  const Status status = LoadSession(options, start, before_loading, session);
  if (status.ok()) return session;
  if (session.nodes != nullptr) session.nodes->control().Abort(status);  // the others hear why
  return status;
}

}  // namespace fathom::app
