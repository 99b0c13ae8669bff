// ModelSession: a model ready to run, as every command needs it: folder found, config and tokenizer
// read, weights loaded onto the device with progress on stderr. Owned by the command; main thread.
#pragma once

#include <memory>
#include <string>

#include "apps/fathom/serve_options.h"
#include "base/status.h"
#include "config/model_config.h"
#include "device/device.h"
#include "model/model.h"
#include "text/chat_encoder.h"
#include "text/tokenizer.h"

namespace fathom::app {

// What it took to bring the weights to the device.
struct LoadTimes {
  int64_t bytes = 0;            // that were read
  double transfer_seconds = 0;  // from the first read until the model stands; 0: nothing was read
  double seconds = 0;           // of OpenModel
};

struct ModelSession {
  std::string folder;  // empty for a preset with dummy weights
  config::ModelConfig config;
  config::Numerics numerics = config::Numerics::kOfficial;
  kv_cache::IndexKeyDType index_dtype = kv_cache::IndexKeyDType::kFp4;
  std::unique_ptr<text::Tokenizer> tokenizer;  // null when only tokens are needed
  text::SpecialTokens special_tokens;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<model::DeepSeekV4> model;
  model::ModelLimits limits;
  LoadTimes load_times;
};

// kTokensOnly: no text is needed, so a checkpoint without tokenizer.json will do.
enum class SessionText { kTokenizer, kTokensOnly };

Result<ModelSession> OpenModel(const ModelOptions& options, SessionText text);

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
