// ModelSession: a model ready to run, as every command needs it: folder found, config and tokenizer
// read, weights loaded onto the devices with progress on stderr. Owned by the command; main thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/fathom/rank_loader.h"
#include "apps/fathom/serve_options.h"
#include "base/status.h"
#include "comm/node_group.h"
#include "config/model_config.h"
#include "device/device.h"
#include "model/model.h"
#include "text/chat_encoder.h"
#include "text/tokenizer.h"

namespace fathom::app {

struct ModelSession {
  std::string folder;  // empty for a preset with dummy weights
  config::ModelConfig config;
  config::Numerics numerics = config::Numerics::kOfficial;
  kv_cache::IndexKeyDType index_dtype = kv_cache::IndexKeyDType::kFp4;
  std::unique_ptr<text::Tokenizer> tokenizer;  // null when only tokens are needed
  text::SpecialTokens special_tokens;
  config::ParallelConfig parallel;
  std::unique_ptr<comm::NodeGroup> nodes;  // null: there is one rank
  std::vector<SessionRank> ranks;          // of this process; at least one
  model::ModelLimits limits;
  LoadTimes load_times;

  // The first rank's: all have devices of one kind.
  device::Device& device() const { return *ranks.front().device; }
  bool on_gpu() const { return device().kind() == device::DeviceKind::kCuda; }
  // Another node's requests are run here.
  bool is_follower() const { return nodes != nullptr && nodes->node_rank() > 0; }
  // Of the only rank.
  model::DeepSeekV4& model() const { return *ranks.front().model; }
};

// kTokensOnly: no text is needed, so a checkpoint without tokenizer.json will do.
enum class SessionText { kTokenizer, kTokensOnly };

// The tokens of one step that were asked for; else as many as a GPU needs to read its experts for,
// or as a CPU runs in the time that somebody may wait for the next.
int MaxBatchedTokens(const ModelOptions& options, device::DeviceKind device);

// `before_loading` is called when the ranks are known and no weight is loaded yet, for what need
// not wait so long to fail.
Result<ModelSession> OpenModel(
    const ModelOptions& options, SessionText text,
    const std::function<Status(const ModelSession&)>& before_loading = nullptr);

// The checkpoint's own effort profile, or the one that was asked for (auto, preview, official).
text::EffortProfile ResolveEffortProfile(const std::string& asked, const std::string& folder,
                                         const config::ModelConfig& config);

// low, high or max; anything else is unset.
text::Effort ParseEffort(const std::string& name);

// HF_HOME, or ~/.cache/huggingface.
std::string HuggingFaceHome();

// Reads a whole file; "-" is standard input. kInvalidArgument names the file and the reason.
Result<std::string> ReadTextFile(const std::string& path);

}  // namespace fathom::app
