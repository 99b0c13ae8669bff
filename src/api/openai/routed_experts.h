// Routed experts as RL tools read them (vLLM's form): base64 of a NumPy .npy file, [tokens, layers,
// experts per token], uint8 where the model has at most 256 experts, else uint16, little-endian:
// np.load(io.BytesIO(base64.b64decode(text))). Pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "api/api_options.h"

namespace fathom::api::openai {

// `ids`: whole rows of [layers, experts per token]; those beyond `num_tokens` are left out.
std::string EncodeRoutedExperts(std::span<const uint16_t> ids, int64_t num_tokens,
                                const ModelInfo& model);

}  // namespace fathom::api::openai
