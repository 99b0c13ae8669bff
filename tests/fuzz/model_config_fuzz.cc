// Any bytes as config.json: refused in one line, or a config whose tensors have sizes that add up
// and whose layers can be cut.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/summary.h"
#include "checkpoint/synthetic_checkpoint.h"

namespace {

// A config may ask for millions of tensors; listing them is slow under a sanitizer.
constexpr int64_t kMaxListedExperts = 4096;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto config = fathom::checkpoint::ParseModelConfig(text, "config.json");
  if (!config.ok()) {
    CHECK(config.status().code() == fathom::StatusCode::kBadModel);
    CHECK(config.status().message().find('\n') == std::string::npos);
    return 0;
  }
  const auto cut = fathom::checkpoint::CutLayers(std::string(text), 1);
  if (cut.ok()) CHECK(fathom::checkpoint::ParseModelConfig(*cut, "config.json").ok());
  const int64_t num_blocks = config->num_layers + config->num_draft_blocks;
  if (num_blocks * config->num_experts > kMaxListedExperts) return 0;
  const auto summary = fathom::checkpoint::Summarize(*config);
  CHECK_GT(summary.num_params, summary.num_draft_params);
  CHECK_GT(summary.bytes, 0);
  return 0;
}
