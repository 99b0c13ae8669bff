#include <fmt/format.h>

#include <random>

#include "apps/fathom/commands.h"
#include "apps/fathom/local_engine.h"
#include "text/chat_encoder.h"
#include "text/detokenizer.h"

namespace fathom::app {
namespace {

Result<std::vector<int32_t>> EncodePrompt(const GenerateOptions& options,
                                          const ModelSession& session) {
  std::string prompt = options.prompt;
  if (prompt == "-") {
    ASSIGN_OR_RETURN(prompt, ReadTextFile("-"));
  }
  std::vector<int32_t> ids;
  if (!options.chat) {
    ids.push_back(session.special_tokens.bos);
    session.tokenizer->Encode(prompt, text::Tokenizer::AddedTokens::kAsPlain, &ids);
    return ids;
  }
  const json::Value messages = json::Value::Array({json::Value::Object(
      {{"role", json::Value::String("user")}, {"content", json::Value::String(prompt)}})});
  text::EncodeOptions encode;
  encode.mode = options.thinking ? text::ThinkingMode::kThinking : text::ThinkingMode::kChat;
  ASSIGN_OR_RETURN(const auto pieces, text::EncodeMessages(messages, encode));
  return text::TokenizePieces(*session.tokenizer, pieces, /*raw_special_tokens=*/false);
}

}  // namespace

Status RunGenerate(const GenerateOptions& options) {
  ModelOptions model_options = options.model;
  model_options.max_num_seqs = 1;
  ASSIGN_OR_RETURN(const auto local,
                   LocalEngine::Start(model_options, options.model.model, /*max_queue=*/1));
  ASSIGN_OR_RETURN(std::vector<int32_t> prompt, EncodePrompt(options, local->session()));
  request::SamplingParams sampling;
  sampling.temperature = options.temperature;
  sampling.top_p = options.top_p;
  sampling.top_k = options.top_k;
  sampling.seed = options.sampling_seed.value_or(std::random_device{}());
  sampling.max_tokens = options.max_tokens;
  sampling.ignore_eos = options.ignore_eos;

  text::IncrementalDetokenizer detokenizer(*local->session().tokenizer);
  const auto print = [](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    return std::ferror(stdout) == 0;  // the reader left
  };
  ASSIGN_OR_RETURN(const request::FinishReason finish,
                   local->Generate(std::move(prompt), sampling, [&](int32_t token_id) {
                     return print(detokenizer.Push(token_id));
                   }));
  print(detokenizer.Flush() + "\n");
  if (finish == request::FinishReason::kLength) {
    fmt::print(stderr, "fathom: stopped at the limit of {} tokens or the context\n",
               options.max_tokens);
  }
  return OkStatus();
}

}  // namespace fathom::app
