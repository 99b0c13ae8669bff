// Two bytes of options and cuts, then a text in short: a byte below 32 stands for a piece of
// markup, one above 127 for a letter of two bytes. However the text is cut, the parser gives one
// result, and complete calls have a JSON object for arguments.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "json/json.h"
#include "text/tool_call_parser.h"

namespace {

using namespace fathom::text;
namespace json = fathom::json;

constexpr std::string_view kPieces[] = {"<think>",
                                        "</think>",
                                        "\n\n<｜DSML｜tool_calls>",
                                        "<｜DSML｜tool_calls>\n",
                                        "</｜DSML｜tool_calls>",
                                        "<｜DSML｜invoke name=\"f\">\n",
                                        "<｜DSML｜invoke name=\"g\">",
                                        "</｜DSML｜invoke>\n",
                                        "<｜DSML｜invoke ",
                                        "<｜DSML｜parameter name=\"a\" string=\"true\">",
                                        "<｜DSML｜parameter name=\"b\" string=\"false\">",
                                        "\n",
                                        "<｜DSML｜parameter name=\"a\">",
                                        "</｜DSML｜parameter>\n",
                                        "<｜DSML｜parameter name=\"arguments\" string=\"false\">",
                                        "<｜DSML｜parameter name=\"input\" string=\"true\">",
                                        "<｜DSML｜",
                                        "</｜DSML｜",
                                        "｜DSML｜",
                                        "{\"a\": \"x\", \"b\": 1}",
                                        "[1, {\"c\": null}]",
                                        "true",
                                        "1e5",
                                        "\"",
                                        "\\",
                                        "name=\"",
                                        "<",
                                        "parameter",
                                        "tool_calls>",
                                        "\t",
                                        "string=\"true\"",
                                        "\x01"};

std::string Expand(const uint8_t* data, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    if (data[i] < 32) {
      text += kPieces[data[i]];
    } else if (data[i] < 128) {
      text += static_cast<char>(data[i]);
    } else {
      text += {'\xc3', static_cast<char>(0x80 | (data[i] & 0x3f))};
    }
  }
  return text;
}

bool StartsCharacter(char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }

// Cuts of about `step` bytes, between characters.
OutputMessage Parse(const ToolCallParser::Options& options, const std::string& text, size_t step,
                    bool is_natural) {
  ToolCallParser parser(options);
  OutputMessage message;
  std::vector<OutputEvent> events;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(begin + step, text.size());
    while (end < text.size() && !StartsCharacter(text[end])) ++end;
    parser.Push(std::string_view(text).substr(begin, end - begin), &events);
    begin = end;
  }
  parser.Finish(is_natural, &events);
  message.Add(events);
  return message;
}

void CheckSame(const OutputMessage& a, const OutputMessage& b) {
  CHECK_EQ(a.reasoning, b.reasoning);
  CHECK_EQ(a.content, b.content);
  CHECK_EQ(a.tool_calls.size(), b.tool_calls.size());
  for (size_t i = 0; i < a.tool_calls.size(); ++i) {
    CHECK_EQ(a.tool_calls[i].name, b.tool_calls[i].name);
    CHECK_EQ(a.tool_calls[i].arguments, b.tool_calls[i].arguments);
    CHECK_EQ(a.tool_calls[i].is_complete, b.tool_calls[i].is_complete);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const ToolCallParser::Options options{
      .in_reasoning = (data[0] & 1) != 0,
      .parse_tool_calls = (data[0] & 2) == 0,
      .parallel = (data[0] & 4) == 0,
      .tools = {{"f", {{"a", true}, {"b", false}}}, {"g", {{"input", false}}}}};
  const bool is_natural = (data[0] & 8) == 0;
  const std::string text = Expand(data + 2, size - 2);
  const OutputMessage whole = Parse(options, text, text.size() + 1, is_natural);
  for (const OutputMessage::ToolCall& call : whole.tool_calls) {
    if (!call.is_complete) continue;
    const auto arguments = json::Parse(call.arguments);
    CHECK(arguments.ok());
    CHECK(arguments->is_object());
  }
  CheckSame(whole, Parse(options, text, 1, is_natural));
  CheckSame(whole, Parse(options, text, 2 + data[1] % 61, is_natural));
  return 0;
}
