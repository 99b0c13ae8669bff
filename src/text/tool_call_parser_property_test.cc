// What holds for every text: random answers in the model's own form read back as what was said, and
// random markup gives one result however it is cut. All random choices are seeded.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "text/test_files.h"
#include "text/tool_call_parser.h"

namespace fathom::text {
namespace {

using Random = std::mt19937;

size_t Below(Random& random, size_t n) { return random() % n; }

std::string Pick(Random& random, const std::vector<std::string>& from) {
  return from[Below(random, from.size())];
}

OutputMessage Parse(const ToolCallParser::Options& options, const std::string& text,
                    const std::vector<size_t>& cuts, bool is_natural = true) {
  ToolCallParser parser(options);
  std::vector<OutputEvent> events;
  size_t begin = 0;
  for (const size_t end : cuts) {
    parser.Push(std::string_view(text).substr(begin, end - begin), &events);
    begin = end;
  }
  parser.Push(std::string_view(text).substr(begin), &events);
  parser.Finish(is_natural, &events);
  OutputMessage message;
  message.Add(events);
  return message;
}

// Between all bytes that end a character: the parser is given valid UTF-8.
std::vector<size_t> EveryCut(const std::string& text) {
  std::vector<size_t> cuts;
  for (size_t i = 1; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) cuts.push_back(i);
  }
  return cuts;
}

std::vector<size_t> SomeCuts(Random& random, const std::string& text) {
  std::vector<size_t> cuts;
  const size_t density = 2 + Below(random, 30);
  for (const size_t cut : EveryCut(text)) {
    if (Below(random, density) == 0) cuts.push_back(cut);
  }
  return cuts;
}

std::string Described(const OutputMessage& message) {
  std::string text = "R " + message.reasoning + "\nC " + message.content;
  for (const OutputMessage::ToolCall& call : message.tool_calls) {
    text += "\n" + call.name + (call.is_complete ? " " : " … ") + call.arguments;
  }
  return text;
}

ToolCallParser::Options WithTools() {
  return {.in_reasoning = false,
          .parse_tool_calls = true,
          .parallel = true,
          .tools = {{"f", {{"s", true}, {"n", false}}}, {"g", {{"input", false}}}}};
}

// No sequence of them is a whole tag.
const std::vector<std::string> kWords = {"a",         " b",       "\n",   "\n\n", "<",    "</",
                                         "<think",    "é",        "😀",   "\"",   "\\",   "{}",
                                         "｜DSML｜",  "</｜DSML", "<｜",  "12",   "null", "\t",
                                         "parameter", "name=\"",  "\x01", " "};

std::string RandomText(Random& random, size_t max_words) {
  std::string text;
  for (size_t i = Below(random, max_words + 1); i > 0; --i) text += Pick(random, kWords);
  return text;
}

// An answer and the text in which the model's form says it.
struct Answer {
  OutputMessage message;
  std::string text;
};

void AddCall(Random& random, Answer* answer) {
  OutputMessage::ToolCall call{Pick(random, {"f", "g", "other"}), "{", true};
  answer->text += "<｜DSML｜invoke name=\"" + call.name + "\">\n";
  for (const char* name : {"s", "n", "x"}) {
    if (Below(random, 3) == 0) continue;
    const bool is_text = name[0] == 's' || Below(random, 2) == 0;
    const std::string value =
        is_text ? RandomText(random, 8) : Pick(random, {"1", "-2.5e3", "[1, \"<\"]", "null", "{}"});
    if (call.arguments.size() > 1) call.arguments += ", ";
    call.arguments += json::Quote(name) + ": " + (is_text ? json::Quote(value) : value);
    answer->text += "<｜DSML｜parameter name=\"" + std::string(name) + "\" string=\"" +
                    (is_text ? "true" : "false") + "\">" + value + "</｜DSML｜parameter>\n";
  }
  call.arguments += "}";
  if (call.arguments == "{}") answer->text += "\n";
  answer->text += "</｜DSML｜invoke>\n";
  answer->message.tool_calls.push_back(std::move(call));
}

Answer RandomAnswer(Random& random, bool in_reasoning) {
  Answer answer;
  if (in_reasoning) {
    answer.message.reasoning = RandomText(random, 10);
    answer.text = answer.message.reasoning + "</think>";
  }
  answer.message.content = RandomText(random, 10);
  answer.text += answer.message.content;
  const size_t num_calls = Below(random, 4);
  if (num_calls == 0) return answer;
  answer.text += "\n\n<｜DSML｜tool_calls>\n";
  for (size_t i = 0; i < num_calls; ++i) AddCall(random, &answer);
  answer.text += "</｜DSML｜tool_calls>";
  return answer;
}

TEST(ToolCallParserProperty, ReadsBackFiftyThousandAnswersHoweverTheyAreCut) {
  Random random(1);
  for (int i = 0; i < 50'000; ++i) {
    ToolCallParser::Options options = WithTools();
    options.in_reasoning = i % 2 == 0;
    const Answer answer = RandomAnswer(random, options.in_reasoning);
    const std::string expected = Described(answer.message);
    ASSERT_EQ(Described(Parse(options, answer.text, {})), expected) << answer.text;
    ASSERT_EQ(Described(Parse(options, answer.text, EveryCut(answer.text))), expected);
    ASSERT_EQ(Described(Parse(options, answer.text, SomeCuts(random, answer.text))), expected);
  }
}

const std::vector<std::string> kMarkup = {"<think>",
                                          "</think>",
                                          "\n\n<｜DSML｜tool_calls>",
                                          "<｜DSML｜tool_calls>\n",
                                          "</｜DSML｜tool_calls>",
                                          "<｜DSML｜invoke name=\"f\">\n",
                                          "<｜DSML｜invoke name=\"g\">",
                                          "<｜DSML｜invoke>",
                                          "<｜DSML｜invoke name=\"\">",
                                          "</｜DSML｜invoke>\n",
                                          "<｜DSML｜parameter name=\"s\" string=\"true\">",
                                          "<｜DSML｜parameter string=\"false\" name=\"n\">",
                                          "<｜DSML｜parameter name=\"x\">",
                                          "<｜DSML｜parameter name=\"input\" string=\"true\">",
                                          "<｜DSML｜parameter name=\"arguments\" string=\"false\">",
                                          "</｜DSML｜parameter>\n",
                                          "{\"s\": \"v\", \"n\": 1}",
                                          "<｜DSML｜function_calls>",
                                          "<｜DSML｜parameter name="};

TEST(ToolCallParserProperty, GivesOneResultForFiftyThousandMalformedTextsHoweverTheyAreCut) {
  Random random(2);
  for (int i = 0; i < 50'000; ++i) {
    ToolCallParser::Options options = WithTools();
    options.in_reasoning = i % 2 == 0;
    options.parse_tool_calls = i % 7 != 0;
    options.parallel = i % 5 != 0;
    const bool is_natural = i % 3 != 0;
    std::string text;
    for (size_t n = Below(random, 16); n > 0; --n) {
      text += Below(random, 3) == 0 ? RandomText(random, 3) : Pick(random, kMarkup);
    }
    const OutputMessage whole = Parse(options, text, {}, is_natural);
    const std::string expected = Described(whole);
    ASSERT_EQ(Described(Parse(options, text, EveryCut(text), is_natural)), expected) << text;
    ASSERT_EQ(Described(Parse(options, text, SomeCuts(random, text), is_natural)), expected);
    for (const OutputMessage::ToolCall& call : whole.tool_calls) {
      if (!call.is_complete) continue;
      const auto arguments = json::Parse(call.arguments);
      ASSERT_TRUE(arguments.ok() && arguments->is_object()) << call.arguments << "\n" << text;
    }
    const size_t max_calls = !options.parse_tool_calls ? 0 : options.parallel ? text.size() : 1;
    ASSERT_LE(whole.tool_calls.size(), max_calls);
  }
}

// Quadratic time would take minutes.
TEST(ToolCallParserProperty, TakesLinearTimeForMegabytesThatNeverEnd) {
  const std::string open = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n";
  const std::string parameter = "<｜DSML｜parameter name=\"s\" string=\"true\">";
  for (const auto& [start, piece] : std::vector<std::pair<std::string, std::string>>{
           {"", "<"},
           {"", "\n\n<｜DSML｜"},
           {"", "\n"},
           {"<｜DSML｜tool_calls>", "<｜DSML｜invoke name=\""},
           {"<｜DSML｜tool_calls>", "<｜DSML｜invoke "},
           {open, "<｜DSML｜parameter name=\"s\" "},
           {open + parameter, "</｜DSML｜para"},
           {open + "<｜DSML｜parameter name=\"n\" string=\"false\">", "[[\"<"}}) {
    std::string text = start;
    while (text.size() < (1 << 20)) text += piece;
    Parse(WithTools(), text, EveryCut(text));  // quadratic time would be hours
  }
}

}  // namespace
}  // namespace fathom::text
