#include "api/output_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "text/format_check.h"

namespace fathom::api {
namespace {

using json::Value;

constexpr size_t kMaxChoices = 5'000;
constexpr size_t kMaxTagBytes = 64 << 10;  // of a structural tag

Parsed<std::optional<Value>> Refused(const Status& status, std::string_view param) {
  return BadRequest(status.message(), std::string(param));
}

// The format inside `place`, or `value` itself where JSON stands in a string.
Parsed<Value> ParsedJson(const Value& value, const std::string& place) {
  if (!value.is_string()) return value;
  auto parsed = json::Parse(value.AsString());
  if (!parsed.ok()) {
    return BadRequest(fmt::format("{} is not JSON: {}", place, parsed.status().message()), place);
  }
  return *std::move(parsed);
}

Parsed<std::optional<Value>> ReadSchema(const Value& value, const std::string& place) {
  const Parsed<Value> schema = ParsedJson(value, place);
  if (!schema.ok()) return schema.error();
  const Status status = text::CheckJsonSchema(*schema, place);
  if (!status.ok()) return Refused(status, place);
  return std::optional(text::JsonSchemaFormat(*schema));
}

Parsed<std::optional<Value>> ReadRegex(const Value& value, const std::string& place) {
  if (!value.is_string()) return BadRequest(place + " must be a string", place);
  const Status status = text::CheckRegex(value.AsString(), place);
  if (!status.ok()) return Refused(status, place);
  return std::optional(text::RegexFormat(value.AsString()));
}

Parsed<std::optional<Value>> ReadEbnf(const Value& value, const std::string& place) {
  if (!value.is_string()) return BadRequest(place + " must be a string", place);
  const Status status = text::CheckEbnf(value.AsString(), place);
  if (!status.ok()) return Refused(status, place);
  return std::optional(text::EbnfFormat(value.AsString()));
}

Parsed<std::optional<Value>> ReadChoices(const Value& value, const std::string& place) {
  std::vector<std::string> choices;
  if (value.is_array()) {
    for (const Value& item : value.items()) {
      if (item.is_string() && !item.AsString().empty()) choices.push_back(item.AsString());
    }
  }
  const bool fits = value.is_array() && choices.size() == value.items().size();
  if (!fits || choices.empty() || choices.size() > kMaxChoices) {
    return BadRequest(
        fmt::format("{} must be a list of 1 to {} strings that are not empty", place, kMaxChoices),
        place);
  }
  return std::optional(text::ChoiceFormat(choices));
}

// {format: …}, or the format itself.
Parsed<std::optional<Value>> ReadStructuralTag(const Value& value, const std::string& place) {
  const Parsed<Value> tag = ParsedJson(value, place);
  if (!tag.ok()) return tag.error();
  const Value* format = tag->Find("format");
  if (format == nullptr || !format->is_object()) {
    return BadRequest(
        fmt::format("{} must have a field 'format' with a structural tag's format", place), place);
  }
  if (json::Dump(*format).size() > kMaxTagBytes) {
    return BadRequest(fmt::format("{} may have at most {} bytes", place, kMaxTagBytes), place);
  }
  return std::optional(*format);
}

Parsed<std::optional<Value>> ReadJsonObject(const Value& value, const std::string& place) {
  if (!value.is_bool() || !value.AsBool()) return BadRequest(place + " must be true", place);
  return std::optional(text::JsonObjectFormat());
}

struct Kind {
  std::string_view name;
  std::string_view older_name;  // a field of its own
  Parsed<std::optional<Value>> (*read)(const Value&, const std::string& place);
};

constexpr Kind kKinds[] = {{"json", "guided_json", ReadSchema},
                           {"regex", "guided_regex", ReadRegex},
                           {"choice", "guided_choice", ReadChoices},
                           {"grammar", "guided_grammar", ReadEbnf},
                           {"json_object", "guided_json_object", ReadJsonObject},
                           {"structural_tag", "", ReadStructuralTag}};

bool IsSet(const Value* value) {
  return value != nullptr && !value->is_null() && !(value->is_bool() && !value->AsBool());
}

const Value* FindFunction(const Value& tools, const std::string& name) {
  for (const Value& tool : tools.items()) {
    const Value* function = tool.Find("function");
    const Value* tool_name = function != nullptr ? function->Find("name") : nullptr;
    if (tool_name != nullptr && tool_name->is_string() && tool_name->AsString() == name)
      return &tool;
  }
  return nullptr;
}

bool AnyIsStrict(const Value& tools) {
  return std::any_of(tools.items().begin(), tools.items().end(), [](const Value& tool) {
    const Value* function = tool.Find("function");
    return function != nullptr && IsSet(function->Find("strict"));
  });
}

}  // namespace

Parsed<std::optional<Value>> ReadFormat(const Value& format, std::string_view place) {
  const std::string name(place);
  const Value* type = format.Find("type");
  const std::string kind = type != nullptr && type->is_string() ? type->AsString() : "";
  if (kind == "text") return std::optional<Value>();
  if (kind == "json_object") return std::optional(text::JsonObjectFormat());
  if (kind == "structural_tag") return ReadStructuralTag(format, name);
  if (kind == "json_schema") {
    const Value* spec = format.Find("json_schema");
    const Value* schema = (spec != nullptr ? *spec : format).Find("schema");
    const std::string schema_place = name + (spec != nullptr ? ".json_schema.schema" : ".schema");
    if (schema == nullptr) return BadRequest(schema_place + " is required", schema_place);
    return ReadSchema(*schema, schema_place);
  }
  return BadRequest(
      fmt::format("{}.type must be text, json_object, json_schema or structural_tag, got {}", place,
                  type == nullptr ? "nothing" : ShortDump(*type)),
      name);
}

void ReadContentRules(FieldReader* fields, OutputRules* rules) {
  std::string_view given;  // the field that said it
  const auto take = [&](std::string_view field, Parsed<std::optional<Value>> format) {
    if (!format.ok()) return fields->Fail(format.error());
    if (!format->has_value()) return;
    if (rules->content) {
      return fields->Fail(field, fmt::format("{} and {} cannot be sent together", given, field));
    }
    given = field;
    rules->content = *std::move(*format);
  };
  if (const Value* format = fields->Object("response_format")) {
    take("response_format", ReadFormat(*format, "response_format"));
  }
  const Value* outputs = fields->Object("structured_outputs");
  size_t num_kinds = 0;
  for (const Kind& kind : kKinds) {
    const Value* value = outputs != nullptr ? outputs->Find(kind.name) : nullptr;
    if (IsSet(value) && ++num_kinds == 1) {
      take("structured_outputs", kind.read(*value, "structured_outputs." + std::string(kind.name)));
    }
    const Value* older = kind.older_name.empty() ? nullptr : fields->Find(kind.older_name);
    if (IsSet(older)) take(kind.older_name, kind.read(*older, std::string(kind.older_name)));
  }
  if (outputs != nullptr && num_kinds != 1) {
    fields->Fail("structured_outputs",
                 "structured_outputs must have exactly one of json, regex, choice, grammar, "
                 "json_object and structural_tag");
  }
}

MaybeError ReadCallRules(const Value& tools, const ToolChoice& choice, OutputRules* rules) {
  if (choice.mode == ToolChoice::Mode::kNone || tools.items().empty()) return std::nullopt;
  const bool is_required = choice.mode == ToolChoice::Mode::kRequired;
  if (!is_required && choice.allowed.empty() && !AnyIsStrict(tools)) return std::nullopt;
  if (is_required && rules->content) {
    return BadRequest(
        "tool_choice asks for a call and the answer's format for something else: send one of them",
        "tool_choice");
  }
  text::ToolCallFormat calls{
      .tools = tools, .is_required = is_required, .parallel = choice.parallel};
  std::vector<std::string> names = choice.allowed;
  if (!choice.name.empty()) {
    names = {choice.name};
    calls.parallel = false;
  }
  if (!names.empty()) calls.tools = Value::Array();
  for (const std::string& name : names) {
    const Value* tool = FindFunction(tools, name);
    if (tool == nullptr) {
      return BadRequest(fmt::format("tool_choice names '{}', which is not among the tools", name),
                        "tool_choice");
    }
    calls.tools.items().push_back(*tool);
  }
  rules->calls = std::move(calls);
  return std::nullopt;
}

void PrepareGrammar(const ServerContext& context, const OutputRules& rules, bool in_reasoning,
                    const std::shared_ptr<http::ResponseWriter>& writer,
                    std::function<void(Parsed<GrammarPtr>)> then) {
  if (!rules.content && !rules.calls) return then(GrammarPtr());
  const std::string tag = text::StructuralTag(
      {.in_reasoning = in_reasoning, .content = rules.content, .calls = rules.calls});
  context.grammars->Compile(
      tag, [writer, then = std::move(then)](const text::GrammarCompiler::Compiled& compiled) {
        const auto grammar = compiled.ok() ? Parsed<GrammarPtr>(*compiled)
                                           : Parsed<GrammarPtr>(FromStatus(compiled.status()));
        writer->Post([then, grammar] { then(grammar); });
      });
}

}  // namespace fathom::api
