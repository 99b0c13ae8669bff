// SampledTurn: an assistant turn as the model sampled it, token by token. The encoder puts these
// ids into a later prompt in place of what the turn's text would tokenize to, so that the prompt
// goes on exactly where the model stood. Plain value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace fathom::text {

struct SampledTurn {
  // Reasoning, </think>, content and tool calls, without the end token.
  std::vector<int32_t> token_ids;
  bool in_reasoning = false;  // the turn began after <think>, not after </think>
  // Where the ids after the reasoning begin; unset: the reasoning had no end.
  std::optional<size_t> answer_begin = 0;
};

using SampledTurns = std::vector<std::shared_ptr<const SampledTurn>>;

}  // namespace fathom::text
