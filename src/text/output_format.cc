#include "text/output_format.h"

#include <initializer_list>
#include <string_view>
#include <utility>

#include "text/chat_format.h"

namespace fathom::text {
namespace {

using json::Value;

constexpr std::string_view kCallsBegin = "<｜DSML｜tool_calls>";
constexpr std::string_view kCallsEnd = "</｜DSML｜tool_calls>";
// White space between two parts of a JSON text: enough to indent, and an end to it.
constexpr int64_t kMaxJsonSpaces = 20;
// Between a call's parameters: one line break, as in the prompt.
constexpr int64_t kMaxCallSpaces = 1;

Value Text(std::string_view text) { return Value::String(std::string(text)); }

Value Texts(std::initializer_list<std::string_view> texts) {
  std::vector<Value> items;
  for (const std::string_view text : texts) items.push_back(Text(text));
  return Value::Array(std::move(items));
}

Value Format(std::string_view type, std::vector<json::Member> fields) {
  fields.insert(fields.begin(), {"type", Text(type)});
  return Value::Object(std::move(fields));
}

Value ConstString(std::string_view text) { return Format("const_string", {{"value", Text(text)}}); }

Value Sequence(std::vector<Value> elements) {
  return Format("sequence", {{"elements", Value::Array(std::move(elements))}});
}

Value Tag(std::string_view begin, Value content, std::string_view end) {
  return Format("tag",
                {{"begin", Text(begin)}, {"content", std::move(content)}, {"end", Text(end)}});
}

const Value* FunctionOf(const Value& tool) {
  const Value* function = tool.Find("function");
  return function != nullptr ? function : &tool;
}

// The schema that a call's parameters follow.
Value ParametersOf(const Value& function) {
  const Value* strict = function.Find("strict");
  const bool is_free = strict != nullptr && strict->is_bool() && !strict->AsBool();
  const Value* parameters = function.Find("parameters");
  if (!is_free && parameters != nullptr && parameters->is_object() &&
      !parameters->members().empty()) {
    return *parameters;
  }
  return Value::Object({{"type", Text("object")}});
}

// <｜DSML｜invoke name="N"> … </｜DSML｜invoke> and the line break after it.
Value Invoke(const Value& tool) {
  const Value* function = FunctionOf(tool);
  const Value* name = function->Find("name");
  const std::string begin = "<｜DSML｜invoke name=\"" + name->AsString() + "\">\n";
  Value parameters = Format("json_schema", {{"json_schema", ParametersOf(*function)},
                                            {"style", Text("deepseek_xml")},
                                            {"max_whitespace_cnt", Value::Number(kMaxCallSpaces)},
                                            {"excludes", Texts({"<｜DSML｜", "</｜DSML｜"})}});
  return Tag(begin, std::move(parameters), "</｜DSML｜invoke>\n");
}

// What stands between the tags of a block of calls.
Value Invokes(const ToolCallFormat& calls) {
  std::vector<Value> tags;
  for (const Value& tool : calls.tools.items()) tags.push_back(Invoke(tool));
  return Format("tags_with_separator", {{"tags", Value::Array(std::move(tags))},
                                        {"separator", Text("")},
                                        {"at_least_one", Value::Bool(true)},
                                        {"stop_after_first", Value::Bool(!calls.parallel)}});
}

Value BlockOfCalls(const ToolCallFormat& calls) {
  return Sequence({ConstString("\n\n" + std::string(kCallsBegin) + "\n"), Invokes(calls),
                   ConstString(kCallsEnd)});
}

// Any text, which may end in a block of calls.
Value TextAndCalls(const ToolCallFormat& calls) {
  Value block = Tag(std::string(kCallsBegin) + "\n", Invokes(calls), kCallsEnd);
  return Format("triggered_tags", {{"triggers", Texts({kCallsBegin})},
                                   {"tags", Value::Array({std::move(block)})},
                                   {"excludes", Texts({kThinkBeginToken, kThinkEndToken})},
                                   {"stop_after_first", Value::Bool(true)}});
}

Value AnyText() {
  return Format("any_text", {{"excludes", Texts({kThinkBeginToken, kThinkEndToken})}});
}

Value AfterReasoning(const OutputFormat& format) {
  if (!format.calls) return format.content ? *format.content : AnyText();
  if (format.calls->is_required) return BlockOfCalls(*format.calls);
  if (!format.content) return TextAndCalls(*format.calls);
  return Format("or", {{"elements", Value::Array({*format.content, BlockOfCalls(*format.calls)})}});
}

}  // namespace

Value JsonSchemaFormat(const Value& schema) {
  return Format("json_schema",
                {{"json_schema", schema}, {"max_whitespace_cnt", Value::Number(kMaxJsonSpaces)}});
}

Value JsonObjectFormat() { return JsonSchemaFormat(Value::Object({{"type", Text("object")}})); }

Value RegexFormat(const std::string& pattern) {
  return Format("regex", {{"pattern", Text(pattern)}});
}

Value ChoiceFormat(const std::vector<std::string>& choices) {
  std::vector<Value> elements;
  for (const std::string& choice : choices) elements.push_back(ConstString(choice));
  return Format("or", {{"elements", Value::Array(std::move(elements))}});
}

Value EbnfFormat(const std::string& grammar) {
  return Format("grammar", {{"grammar", Text(grammar)}});
}

std::string StructuralTag(const OutputFormat& format) {
  Value rest = AfterReasoning(format);
  if (format.in_reasoning) {
    Value reasoning = Format("any_text", {{"excludes", Texts({kCallsBegin, kThinkBeginToken})}});
    rest = Sequence({Tag("", std::move(reasoning), kThinkEndToken), std::move(rest)});
  }
  return json::Dump(Value::Object({{"type", Text("structural_tag")}, {"format", std::move(rest)}}));
}

}  // namespace fathom::text
