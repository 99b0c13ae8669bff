#include "api/openai/completion_request.h"

#include <fmt/format.h>

#include <utility>

namespace fathom::api::openai {
namespace {

using text::Tokenizer;

// begin + prompt + hole + suffix + end; the model fills the hole.
Parsed<std::vector<int32_t>> EncodeFim(const std::string& prompt, const std::string& suffix,
                                       bool add_bos, const ServerContext& context) {
  const Tokenizer& tokenizer = context.tokenizer;
  const int32_t begin = tokenizer.AddedTokenId("<｜fim▁begin｜>");
  const int32_t hole = tokenizer.AddedTokenId("<｜fim▁hole｜>");
  const int32_t end = tokenizer.AddedTokenId("<｜fim▁end｜>");
  if (begin < 0 || hole < 0 || end < 0) {
    return BadRequest("suffix: this model's tokenizer has no fill-in-the-middle tokens", "suffix");
  }
  std::vector<int32_t> ids;
  if (add_bos) ids.push_back(context.model.special_tokens.bos);
  ids.push_back(begin);
  tokenizer.Encode(prompt, Tokenizer::AddedTokens::kAsPlain, &ids);
  ids.push_back(hole);
  tokenizer.Encode(suffix, Tokenizer::AddedTokens::kAsPlain, &ids);
  ids.push_back(end);
  return ids;
}

class PromptReader {
 public:
  PromptReader(const ServerContext& context, const GenerationParams& params,
               std::optional<std::string> suffix)
      : context_(context), params_(params), suffix_(std::move(suffix)) {}

  Parsed<std::vector<CompletionPrompt>> Read(const json::Value* prompt);

 private:
  Parsed<CompletionPrompt> ReadOne(const json::Value& prompt);
  Parsed<CompletionPrompt> ReadIds(const json::Value& ids);

  const ServerContext& context_;
  const GenerationParams& params_;
  const std::optional<std::string> suffix_;
};

Parsed<CompletionPrompt> PromptReader::ReadIds(const json::Value& ids) {
  if (suffix_) return BadRequest("suffix needs a text prompt", "suffix");
  Parsed<std::vector<int32_t>> token_ids =
      ReadTokenIds(ids, "prompt", context_.tokenizer.vocab_size());
  if (!token_ids.ok()) return token_ids.error();
  if (token_ids->empty()) return BadRequest("prompt must have at least one token id", "prompt");
  std::string text;
  if (params_.echo) text = context_.tokenizer.Decode(*token_ids, false);
  return CompletionPrompt{std::move(text), std::move(*token_ids)};
}

Parsed<CompletionPrompt> PromptReader::ReadOne(const json::Value& prompt) {
  if (prompt.is_array()) return ReadIds(prompt);
  if (!prompt.is_string()) {
    return BadRequest(fmt::format("prompt must be a string, token ids, or a list of these, got {}",
                                  KindName(prompt)),
                      "prompt");
  }
  const std::string& text = prompt.AsString();
  if (suffix_) {
    Parsed<std::vector<int32_t>> ids =
        EncodeFim(text, *suffix_, params_.add_special_tokens, context_);
    if (!ids.ok()) return ids.error();
    return CompletionPrompt{text, std::move(*ids)};
  }
  std::vector<int32_t> ids = EncodeText(text, params_.add_special_tokens, context_);
  if (ids.empty()) return BadRequest("prompt is empty", "prompt");
  return CompletionPrompt{text, std::move(ids)};
}

Parsed<std::vector<CompletionPrompt>> PromptReader::Read(const json::Value* prompt) {
  if (prompt == nullptr) return BadRequest("prompt is required", "prompt");
  const bool is_list =
      prompt->is_array() && !(prompt->items().size() > 0 && prompt->items()[0].is_number());
  std::vector<const json::Value*> items;
  if (is_list) {
    for (const json::Value& item : prompt->items()) items.push_back(&item);
  } else {
    items.push_back(prompt);
  }
  if (items.empty()) return BadRequest("prompt must not be an empty list", "prompt");
  const auto max_sequences = static_cast<size_t>(context_.options.limits.max_sequences);
  const auto num_choices = static_cast<size_t>(params_.num_choices);
  if (items.size() * num_choices > max_sequences) {
    return BadRequest(fmt::format("prompts times n may be at most {}, got {} times {}",
                                  max_sequences, items.size(), num_choices),
                      "prompt");
  }
  std::vector<CompletionPrompt> prompts;
  for (const json::Value* item : items) {
    Parsed<CompletionPrompt> one = ReadOne(*item);
    if (!one.ok()) return one.error();
    prompts.push_back(std::move(*one));
  }
  return prompts;
}

}  // namespace

std::vector<int32_t> EncodeText(const std::string& text, bool add_bos,
                                const ServerContext& context) {
  std::vector<int32_t> ids;
  context.tokenizer.Encode(text, Tokenizer::AddedTokens::kMatch, &ids);
  const int32_t bos = context.model.special_tokens.bos;
  if (add_bos && (ids.empty() || ids.front() != bos)) ids.insert(ids.begin(), bos);
  return ids;
}

Parsed<CompletionRequest> ParseCompletionRequest(const json::Value& body,
                                                 const ServerContext& context) {
  FieldReader fields(body);
  CompletionRequest request;
  Parsed<std::string> model = ReadModelName(&fields, context);
  if (!model.ok()) return model.error();
  request.model = std::move(*model);
  request.params = ReadGenerationParams(&fields, context);
  const auto logprobs = fields.Integer("logprobs", 0, context.options.limits.max_logprobs);
  if (logprobs) {
    request.params.sampling.num_logprobs = static_cast<int>(*logprobs);
    if (request.params.echo)
      request.params.sampling.num_prompt_logprobs = static_cast<int>(*logprobs);
  }
  const auto best_of = fields.Integer("best_of", 1, context.options.limits.max_sequences);
  if (best_of && *best_of != request.params.num_choices) {
    fields.Fail("best_of", "best_of other than n is not served: send n");
  }
  ReadContentRules(&fields, &request.rules);
  RefuseUnsupportedFields(&fields);
  if (!fields.ok()) return *fields.error();

  PromptReader reader(context, request.params, fields.String("suffix"));
  if (!fields.ok()) return *fields.error();
  Parsed<std::vector<CompletionPrompt>> prompts = reader.Read(fields.Find("prompt"));
  if (!prompts.ok()) return prompts.error();
  request.prompts = std::move(*prompts);
  return request;
}

}  // namespace fathom::api::openai
