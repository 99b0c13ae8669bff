#include "api/openai/logprobs_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "api/openai/answer_format.h"
#include "text/detokenizer.h"

namespace fathom::api::openai {
namespace {

using json::Value;
using request::TokenLogprob;
using request::TokenLogprobs;

// JSON has no infinity: an impossible token shows the floor that clients know.
Value LogprobNumber(float logprob) {
  return Value::Number(std::max(static_cast<double>(logprob), -9999.0));
}

int64_t NumCharacters(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

}  // namespace

std::string LogprobsFormat::TokenText(int32_t id) const {
  if (as_token_ids_) return fmt::format("token_id:{}", id);
  return text::SanitizeUtf8(tokenizer_.TokenBytes(id), nullptr);
}

Value LogprobsFormat::ChatEntry(const TokenLogprob& logprob) const {
  std::vector<Value> bytes;
  for (const char c : tokenizer_.TokenBytes(logprob.token_id)) {
    bytes.push_back(Integer(static_cast<unsigned char>(c)));
  }
  return Value::Object({{"token", Text(TokenText(logprob.token_id))},
                        {"logprob", LogprobNumber(logprob.logprob)},
                        {"bytes", Value::Array(std::move(bytes))}});
}

std::vector<Value> LogprobsFormat::ChatEntries(const std::vector<TokenLogprobs>& logprobs) const {
  std::vector<Value> entries;
  for (const TokenLogprobs& token : logprobs) {
    std::vector<Value> top;
    for (const TokenLogprob& alternative : token.top) top.push_back(ChatEntry(alternative));
    Value entry = ChatEntry(token.chosen);
    entry.Set("top_logprobs", Value::Array(std::move(top)));
    entries.push_back(std::move(entry));
  }
  return entries;
}

Value LogprobsFormat::PromptLogprobs(const std::vector<TokenLogprobs>& logprobs) const {
  std::vector<Value> items{Value()};
  for (const TokenLogprobs& token : logprobs) {
    Value entries = Value::Object();
    const auto add = [&](const TokenLogprob& logprob, int rank) {
      entries.Set(std::to_string(logprob.token_id),
                  Value::Object({{"logprob", LogprobNumber(logprob.logprob)},
                                 {"rank", Integer(rank)},
                                 {"decoded_token", Text(TokenText(logprob.token_id))}}));
    };
    add(token.chosen, token.rank);
    for (size_t i = 0; i < token.top.size(); ++i) add(token.top[i], static_cast<int>(i) + 1);
    items.push_back(std::move(entries));
  }
  return Value::Array(std::move(items));
}

void CompletionLogprobs::AddToken(int32_t token_id) {
  const std::string token = format_.TokenText(token_id);
  tokens_.push_back(Text(token));
  text_offset_.push_back(Integer(offset_));
  offset_ += NumCharacters(token);
}

void CompletionLogprobs::AddUnscored(int32_t token_id) {
  AddToken(token_id);
  token_logprobs_.push_back(Value());
  top_logprobs_.push_back(Value());
}

void CompletionLogprobs::Add(const TokenLogprobs& logprobs) {
  AddToken(logprobs.chosen.token_id);
  token_logprobs_.push_back(LogprobNumber(logprobs.chosen.logprob));
  if (num_top_ == 0) return top_logprobs_.push_back(Value());
  Value top = Value::Object();
  for (const TokenLogprob& alternative : logprobs.top) {
    top.Set(format_.TokenText(alternative.token_id), LogprobNumber(alternative.logprob));
  }
  top.Set(format_.TokenText(logprobs.chosen.token_id), LogprobNumber(logprobs.chosen.logprob));
  top_logprobs_.push_back(std::move(top));
}

Value CompletionLogprobs::Take() {
  return Value::Object({{"tokens", Value::Array(std::exchange(tokens_, {}))},
                        {"token_logprobs", Value::Array(std::exchange(token_logprobs_, {}))},
                        {"top_logprobs", Value::Array(std::exchange(top_logprobs_, {}))},
                        {"text_offset", Value::Array(std::exchange(text_offset_, {}))}});
}

}  // namespace fathom::api::openai
