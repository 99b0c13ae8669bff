#include "api/thinking_mode.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <utility>

namespace fathom::api {
namespace {

using text::Effort;
using text::EffortProfile;
using text::ThinkingMode;

// What one source says.
struct Wish {
  std::optional<bool> think;
  std::optional<std::string> effort;
  std::optional<bool> drop_thinking;
};

Wish ReadKwargs(FieldReader* kwargs) {
  Wish wish;
  const std::optional<bool> thinking = kwargs->Bool("thinking");
  const std::optional<bool> enable_thinking = kwargs->Bool("enable_thinking");
  if (thinking || enable_thinking)
    wish.think = thinking.value_or(false) || enable_thinking.value_or(false);
  wish.effort = kwargs->String("reasoning_effort");
  wish.drop_thinking = kwargs->Bool("drop_thinking");
  return wish;
}

std::optional<bool> ReadThinkingType(FieldReader* request) {
  const json::Value* thinking = request->Object("thinking");
  if (thinking == nullptr) return std::nullopt;
  const json::Value* type = thinking->Find("type");
  const std::string name = type != nullptr && type->is_string() ? type->AsString() : "";
  if (name == "enabled" || name == "adaptive") return true;
  if (name == "disabled") return false;
  request->Fail("thinking", "thinking.type must be enabled, adaptive or disabled");
  return std::nullopt;
}

// The effort of a name that is not "none"; nothing for an unknown one.
std::optional<Effort> EffortOf(std::string_view name, EffortProfile profile) {
  struct Row {
    std::string_view name;
    Effort official;
    Effort preview;
  };
  static constexpr std::array<Row, 7> kTable{{
      {"minimal", Effort::kLow, Effort::kHigh},
      {"low", Effort::kLow, Effort::kHigh},
      {"medium", Effort::kHigh, Effort::kHigh},
      {"high", Effort::kHigh, Effort::kHigh},
      {"xhigh", Effort::kHigh, Effort::kMax},
      {"max", Effort::kMax, Effort::kMax},
      {"ultra", Effort::kMax, Effort::kMax},
  }};
  for (const Row& row : kTable) {
    if (row.name == name) return profile == EffortProfile::kOfficial ? row.official : row.preview;
  }
  return std::nullopt;
}

MaybeError CheckEffort(const std::string& name, EffortProfile profile) {
  if (name == "none" || EffortOf(name, profile)) return std::nullopt;
  return BadRequest(
      fmt::format(
          "reasoning_effort must be none, minimal, low, medium, high, xhigh, max or ultra, got {}",
          ShortDump(json::Value::String(name))),
      "reasoning_effort");
}

}  // namespace

ThinkingChoice ReadThinking(FieldReader* request, const json::Value& defaults,
                            EffortProfile profile) {
  static const json::Value kEmpty = json::Value::Object();
  const json::Value* kwargs_object = request->Object("chat_template_kwargs");
  FieldReader kwargs(kwargs_object != nullptr ? *kwargs_object : kEmpty);
  const Wish in_kwargs = ReadKwargs(&kwargs);
  if (!kwargs.ok()) {
    request->Fail("chat_template_kwargs", "chat_template_kwargs." + kwargs.error()->message);
  }
  FieldReader default_reader(defaults);
  const Wish by_default = ReadKwargs(&default_reader);

  std::optional<std::string> effort = request->String("reasoning_effort");
  if (!effort) effort = in_kwargs.effort;
  if (effort) {
    if (MaybeError error = CheckEffort(*effort, profile)) request->Fail(*std::move(error));
  }
  std::optional<bool> think = ReadThinkingType(request);
  if (!think) think = in_kwargs.think;
  if (!think && effort) think = *effort != "none";
  if (!think) think = by_default.think;
  if (!effort) effort = by_default.effort;

  ThinkingChoice choice;
  choice.drop_thinking = in_kwargs.drop_thinking.value_or(by_default.drop_thinking.value_or(true));
  if (!think.value_or(false) || effort == "none") return choice;
  choice.mode = ThinkingMode::kThinking;
  if (effort) choice.effort = EffortOf(*effort, profile).value_or(Effort::kUnset);
  return choice;
}

MaybeError ValidateThinkingDefaults(const json::Value& defaults, EffortProfile profile) {
  if (!defaults.is_object()) return BadRequest("default_chat_template_kwargs must be an object");
  FieldReader reader(defaults);
  const Wish wish = ReadKwargs(&reader);
  if (!reader.ok()) return reader.error();
  return wish.effort ? CheckEffort(*wish.effort, profile) : std::nullopt;
}

}  // namespace fathom::api
