// One byte of options, then JSON: a list of messages, or an object of messages and tools. Refused,
// or a prompt whose tokens are the control tokens that we wrote and no other, and decode to its
// text.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "json/json.h"
#include "text/chat_encoder.h"

namespace {

using namespace fathom::text;
namespace json = fathom::json;

const Tokenizer& TinyTokenizer() {
  static const auto loaded =
      Tokenizer::Load(FATHOM_SOURCE_DIR "/models/fathom-tiny/tokenizer.json");
  return **loaded;
}

EncodeOptions OptionsOf(uint8_t byte) {
  EncodeOptions options;
  options.mode = byte & 1 ? ThinkingMode::kChat : ThinkingMode::kThinking;
  options.drop_thinking = (byte & 2) == 0;
  options.effort = static_cast<Effort>(byte >> 2 & 3);
  options.profile = byte & 16 ? EffortProfile::kOfficial : EffortProfile::kPreview;
  options.num_context = byte >> 5;
  return options;
}

void CheckPrompt(const std::vector<PromptPiece>& pieces) {
  const Tokenizer& tokenizer = TinyTokenizer();
  const std::vector<int32_t> ids = TokenizePieces(tokenizer, pieces, false);
  const auto num_control = std::ranges::count_if(pieces, &PromptPiece::is_control);
  CHECK_EQ(std::ranges::count_if(ids, [&](int32_t id) { return tokenizer.IsAddedToken(id); }),
           num_control);
  CHECK_EQ(tokenizer.Decode(ids, false), JoinPieces(pieces));
  CHECK_EQ(tokenizer.Decode(TokenizePieces(tokenizer, pieces, true), false), JoinPieces(pieces));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  auto parsed = json::Parse(text);
  if (!parsed.ok()) return 0;
  json::Value messages = *parsed;
  if (const json::Value* inner = parsed->Find("messages"); inner != nullptr) {
    messages = *inner;
    const json::Value* tools = parsed->Find("tools");
    if (tools != nullptr && !AttachTools(*tools, &messages).ok()) return 0;
  }
  const auto pieces = EncodeMessages(messages, OptionsOf(data[0]));
  if (pieces.ok()) CheckPrompt(*pieces);
  return 0;
}
