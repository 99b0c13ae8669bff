#include "api/cache_explanation.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fathom::api {
namespace {

using json::Value;

constexpr std::string_view kToolsBegin = "\n\n## Tools\n";

std::string PrintableAscii(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

// Where a byte of the prompt's text stands: "messages[2] (user)", "the tools", or "the end".
// Contents stand in the prompt as they are, in order.
struct Place {
  std::string name;
  std::optional<int64_t> message_idx;
};

Place FindPlace(std::string_view prompt, size_t at, const Value* messages) {
  if (messages == nullptr) return {"the prompt", std::nullopt};
  size_t end = 0;  // of the content before
  for (size_t i = 0; i < messages->items().size(); ++i) {
    const Value* content = messages->items()[i].Find("content");
    const size_t begin = content == nullptr || !content->is_string()
                             ? std::string_view::npos
                             : prompt.find(content->AsString(), end);
    if (begin == std::string_view::npos) continue;
    const size_t tools = prompt.substr(0, begin).find(kToolsBegin, end);
    if (at < begin && at >= tools) return {"the tools", std::nullopt};
    end = begin + content->AsString().size();
    if (at < end) {
      const Value* role = messages->items()[i].Find("role");
      return {fmt::format("message {} ({})", i, role == nullptr ? "" : role->AsString()),
              static_cast<int64_t>(i)};
    }
  }
  return {"the end", std::nullopt};
}

Value TokenJson(const ServerContext& context, int32_t token_id) {
  return Value::Object({{"token_id", Value::Number(int64_t{token_id})},
                        {"text", Value::String(context.tokenizer.Decode({token_id}, false))}});
}

}  // namespace

CacheExplanation ExplainCache(const ServerContext& context, std::string_view scope,
                              const std::vector<int32_t>& prompt, const Value* messages) {
  const auto size = static_cast<int64_t>(prompt.size());
  CacheExplanation out;
  out.json = Value::Object({{"prompt_tokens", Value::Number(size)}});
  const auto nearest = context.history->Find(scope, prompt);
  if (!nearest || nearest->num_common_tokens == 0) {
    out.line = "no earlier prompt of this caller is remembered that begins alike";
    out.json.Set("reason", Value::String("no_earlier_prompt"));
    out.json.Set("explanation", Value::String(out.line));
    return out;
  }
  const size_t common = nearest->num_common_tokens;
  out.json.Set("common_tokens", Value::Number(static_cast<int64_t>(common)));
  if (common == prompt.size()) {
    out.line = fmt::format("all {} tokens equal an earlier prompt of {:.0f} s ago", size,
                           nearest->age_seconds);
    out.json.Set("reason", Value::String("same_prompt"));
  } else if (!nearest->next_token) {
    out.line = fmt::format(
        "the first {} of {} tokens are an earlier prompt of {:.0f} s ago and its answer; the rest "
        "is new",
        common, size, nearest->age_seconds);
    out.json.Set("reason", Value::String("continued"));
  } else {
    const std::vector<int32_t> same(prompt.begin(), prompt.begin() + static_cast<int64_t>(common));
    const Place place = FindPlace(context.tokenizer.Decode(prompt, false),
                                  context.tokenizer.Decode(same, false).size(), messages);
    Value now = TokenJson(context, prompt[common]);
    Value earlier = TokenJson(context, *nearest->next_token);
    out.line = fmt::format(
        "the first {} of {} tokens equal an earlier prompt of {:.0f} s ago; then, in {}, it has {} "
        "where that had {}",
        common, size, nearest->age_seconds, place.name, json::Dump(*now.Find("text")),
        json::Dump(*earlier.Find("text")));
    out.json.Set("reason", Value::String("differs"));
    out.json.Set("place", Value::String(place.name));
    out.json.Set("message_index", place.message_idx ? Value::Number(*place.message_idx) : Value());
    out.json.Set("token", std::move(now));
    out.json.Set("earlier_token", std::move(earlier));
  }
  out.json.Set("explanation", Value::String(out.line));
  out.line = PrintableAscii(std::move(out.line));
  return out;
}

}  // namespace fathom::api
