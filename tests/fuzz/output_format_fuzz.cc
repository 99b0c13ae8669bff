// One byte of options, then what a request may send as an output format: a JSON schema, a regular
// expression, a grammar in EBNF or tools. It is refused, or compiles within its budget to a grammar
// whose masks and acceptance agree along a walk.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/check.h"
#include "json/json.h"
#include "text/format_check.h"
#include "text/grammar.h"
#include "text/output_format.h"

namespace {

using namespace fathom::text;
namespace json = fathom::json;

constexpr int32_t kEnd = 256;

const GrammarVocabulary& Bytes() {
  static const auto vocabulary = [] {
    GrammarVocabulary::Tokens tokens;
    for (int byte = 0; byte < 256; ++byte) tokens.bytes.emplace_back(1, static_cast<char>(byte));
    for (const char* text : {"", "\":", "</think>", "｜DSML｜", "true", " \""}) {
      tokens.bytes.emplace_back(text);
    }
    tokens.end_token_ids = {kEnd};
    return GrammarVocabulary::Make(tokens);
  }();
  return *vocabulary;
}

// The format in `text`, when it passes the checks of a request.
std::string FormatOf(uint8_t options, std::string_view text) {
  OutputFormat format{.in_reasoning = (options & 8) != 0};
  const auto value = json::Parse(text, {.max_depth = 128});
  switch (options % 4) {
    case 0:
      if (!value.ok() || !CheckJsonSchema(*value, "schema").ok()) return "";
      format.content = JsonSchemaFormat(*value);
      break;
    case 1:
      if (!json::Parse(json::Quote(text)).ok() || !CheckRegex(text, "regex").ok()) return "";
      format.content = RegexFormat(std::string(text));
      break;
    case 2:
      if (!json::Parse(json::Quote(text)).ok() || !CheckEbnf(text, "grammar").ok()) return "";
      format.content = EbnfFormat(std::string(text));
      break;
    default: {
      if (!value.ok() || !value->is_object()) return "";
      json::Value function = json::Value::Object();
      function.Set("name", json::Value::String("f"));
      function.Set("parameters", *value);
      function.Set("strict", json::Value::Bool(true));
      format.calls = ToolCallFormat{.tools = json::Value::Array({function}),
                                    .is_required = (options & 16) != 0,
                                    .parallel = (options & 32) != 0};
    }
  }
  return StructuralTag(format);
}

bool Allowed(const uint32_t* mask, int32_t id) { return (mask[id / 32] >> (id % 32) & 1) != 0; }

void Walk(const Grammar& grammar, std::string_view seed) {
  const auto constraint = grammar.NewConstraint();
  for (size_t i = 0; i < 64; ++i) {
    uint32_t mask[9] = {};
    const bool masked = constraint->FillNextTokenMask(mask);
    const auto wish = static_cast<unsigned char>(seed[i % seed.size()] + i);
    int32_t id = wish;
    for (int tries = 0; masked && !Allowed(mask, id) && tries < 262; ++tries) id = (id + 1) % 262;
    if (masked && !Allowed(mask, id)) return;  // a dead end
    CHECK(constraint->AcceptToken(id));
    if (id == kEnd) return;
    if (wish % 7 == 0) {
      constraint->Rollback(1);
      CHECK(constraint->AcceptToken(id));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string format = FormatOf(data[0], text);
  if (format.empty()) return 0;
  const std::atomic<bool> cancelled{false};
  const auto grammar = Grammar::Compile(Bytes(), format, {.num_steps = 200'000}, cancelled);
  if (grammar.ok()) Walk(**grammar, text);
  return 0;
}
