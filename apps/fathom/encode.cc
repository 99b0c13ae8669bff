#include <fmt/format.h>

#include "apps/fathom/commands.h"
#include "apps/fathom/model_session.h"
#include "checkpoint/checkpoint.h"
#include "text/chat_encoder.h"
#include "text/tokenizer.h"

namespace fathom::app {
namespace {

// The messages of the file: a list, or the members of {"messages": […], "tools": […]}.
Result<json::Value> ReadMessages(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string contents, ReadTextFile(path));
  auto parsed = json::Parse(contents);
  if (!parsed.ok()) return InvalidArgument(fmt::format("{}: {}", path, parsed.status().message()));
  if (parsed->is_array()) return parsed;
  json::Value* messages = parsed->Find("messages");
  if (messages == nullptr || !messages->is_array()) {
    return InvalidArgument(
        fmt::format("{}: expected a list of messages, or an object with \"messages\"", path));
  }
  if (const json::Value* tools = parsed->Find("tools"); tools != nullptr && !tools->is_null()) {
    RETURN_IF_ERROR(text::AttachTools(*tools, messages));
  }
  return std::move(*messages);
}

}  // namespace

Status RunEncode(const EncodeCommandOptions& options) {
  ASSIGN_OR_RETURN(const json::Value messages, ReadMessages(options.messages));
  std::string folder;
  config::ModelConfig config;
  if (!options.ids_model.empty()) {
    ASSIGN_OR_RETURN(folder, checkpoint::ResolveModelFolder(options.ids_model, HuggingFaceHome()));
    ASSIGN_OR_RETURN(config, checkpoint::LoadModelConfig(folder));
  }
  text::EncodeOptions encode;
  encode.mode = options.mode == "chat" ? text::ThinkingMode::kChat : text::ThinkingMode::kThinking;
  encode.drop_thinking = !options.keep_thinking;
  encode.effort = ParseEffort(options.effort);
  encode.profile = ResolveEffortProfile(options.effort_profile, folder, config);
  ASSIGN_OR_RETURN(const auto pieces, text::EncodeMessages(messages, encode));
  if (folder.empty()) {
    const std::string prompt = text::JoinPieces(pieces);
    std::fwrite(prompt.data(), 1, prompt.size(), stdout);
    return OkStatus();
  }
  ASSIGN_OR_RETURN(const auto tokenizer, text::Tokenizer::Load(folder + "/tokenizer.json"));
  const auto ids = text::TokenizePieces(*tokenizer, pieces, options.raw_special_tokens);
  fmt::print("[{}]\n", fmt::join(ids, ", "));
  return OkStatus();
}

}  // namespace fathom::app
