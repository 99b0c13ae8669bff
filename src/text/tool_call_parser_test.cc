#include "text/tool_call_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/chat_encoder.h"
#include "text/test_files.h"

namespace fathom::text {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Options = ToolCallParser::Options;
using Parts = std::vector<std::string>;

constexpr char kTools[] = R"([{"type":"function","function":{"name":"f","parameters":{
    "type":"object","properties":{"s":{"type":"string"},"n":{"type":"integer"},"o":{},
    "t":{"type":["string"]}}}}},{"name":"g"}])";

Options WithTools() { return {.tools = ReadToolSchemas(ParseTestJson(kTools))}; }

OutputMessage Parse(const Parts& parts, const Options& options, bool is_natural = true) {
  ToolCallParser parser(options);
  OutputMessage message;
  for (const std::string& part : parts) {
    std::vector<OutputEvent> events;
    parser.Push(part, &events);
    message.Add(events);
  }
  std::vector<OutputEvent> events;
  parser.Finish(is_natural, &events);
  message.Add(events);
  return message;
}

OutputMessage Parse(const std::string& text) { return Parse(Parts{text}, WithTools()); }

std::string Parameter(const std::string& name, const std::string& is_string,
                      const std::string& value) {
  return "<｜DSML｜parameter name=\"" + name + "\" string=\"" + is_string + "\">" + value +
         "</｜DSML｜parameter>\n";
}

std::string Invoke(const std::string& name, const std::string& parameters) {
  return "<｜DSML｜invoke name=\"" + name + "\">\n" + parameters + "</｜DSML｜invoke>\n";
}

std::string Block(const std::string& invokes) {
  return "\n\n<｜DSML｜tool_calls>\n" + invokes + "</｜DSML｜tool_calls>";
}

// The arguments of the one call that is in a block of one invoke of f with these parameters.
std::string Arguments(const std::string& parameters) {
  const OutputMessage message = Parse(Block(Invoke("f", parameters)));
  EXPECT_THAT(message.tool_calls, SizeIs(1));
  EXPECT_EQ(message.content, "");
  if (message.tool_calls.size() != 1) return "";
  EXPECT_TRUE(message.tool_calls[0].is_complete);
  const auto arguments = json::Parse(message.tool_calls[0].arguments);
  EXPECT_TRUE(arguments.ok() && arguments->is_object()) << message.tool_calls[0].arguments;
  return message.tool_calls[0].arguments;
}

TEST(ToolCallParser, SplitsReasoningFromContent) {
  Options options = WithTools();
  options.in_reasoning = true;
  const OutputMessage message = Parse({"R\n</think>A"}, options);
  EXPECT_EQ(message.reasoning, "R\n");
  EXPECT_EQ(message.content, "A");
  EXPECT_EQ(Parse({"cut off"}, options, false).reasoning, "cut off");
  EXPECT_EQ(Parse("A</think>B").content, "AB");
  EXPECT_EQ(Parse("A<think>B").reasoning, "B");
}

TEST(ToolCallParser, ReadsParallelCalls) {
  const OutputMessage message =
      Parse("Let me see." +
            Block(Invoke("f", Parameter("s", "true", "x") + Parameter("n", "false", "1")) +
                  Invoke("g", "")) +
            "after");
  EXPECT_EQ(message.content, "Let me see.after");
  ASSERT_THAT(message.tool_calls, SizeIs(2));
  EXPECT_EQ(message.tool_calls[0].name, "f");
  EXPECT_EQ(message.tool_calls[0].arguments, R"({"s": "x", "n": 1})");
  EXPECT_EQ(message.tool_calls[1].name, "g");
  EXPECT_EQ(message.tool_calls[1].arguments, "{}");
}

TEST(ToolCallParser, EventsComeAsTheTextDoes) {
  ToolCallParser parser(WithTools());
  std::vector<OutputEvent> events;
  const auto push = [&](const std::string& text) {
    events.clear();
    parser.Push(text, &events);
    Parts texts;
    for (const OutputEvent& event : events) texts.push_back(event.text);
    return texts;
  };
  EXPECT_THAT(push("\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">"), ElementsAre("f"));
  EXPECT_EQ(events[0].kind, OutputEvent::Kind::kToolCallBegin);
  EXPECT_EQ(events[0].tool_call_idx, 0);
  EXPECT_THAT(push("\n<｜DSML｜parameter name=\"s\" string=\"true\">a\"b"),
              ElementsAre("{\"s\": \"a\\\"b"));
  EXPECT_THAT(push("c</｜DSML"), ElementsAre("c"));
  EXPECT_THAT(push("｜param</"), ElementsAre("</｜DSML｜param"));
  EXPECT_THAT(push("｜DSML｜parameter>"), ElementsAre("\""));
  EXPECT_THAT(push("<｜DSML｜parameter name=\"n\" string=\"false\">4"), IsEmpty());
  EXPECT_THAT(push("2</｜DSML｜parameter>"), ElementsAre(", \"n\": 42"));
  EXPECT_THAT(push("</｜DSML｜invoke>"), ElementsAre("}", ""));
  EXPECT_EQ(events[1].kind, OutputEvent::Kind::kToolCallEnd);
  EXPECT_EQ(parser.num_tool_calls(), 1);
}

TEST(ToolCallParser, HoldsBackOnlyWhatMayBecomeMarkup) {
  ToolCallParser parser(WithTools());
  OutputMessage message;
  const auto content_after = [&](const std::string& text) {
    std::vector<OutputEvent> events;
    parser.Push(text, &events);
    message.Add(events);
    return message.content;
  };
  EXPECT_EQ(content_after("a <"), "a ");
  EXPECT_EQ(content_after(" b\n\n"), "a < b");
  EXPECT_EQ(content_after("\n"), "a < b\n");
  EXPECT_EQ(content_after("<｜DSML｜tool"), "a < b\n");
  EXPECT_EQ(content_after("box"), "a < b\n\n\n<｜DSML｜toolbox");
}

TEST(ToolCallParser, StripsOneBlankLineBeforeTheBlock) {
  EXPECT_EQ(Parse("x\n" + Block(Invoke("g", ""))).content, "x\n");
  EXPECT_EQ(Parse("x\n<｜DSML｜tool_calls>" + Invoke("g", "") + "</｜DSML｜tool_calls>").content,
            "x\n");
  EXPECT_EQ(Parse("x\n\n").content, "x\n\n");
}

TEST(ToolCallParser, WithoutToolsTheMarkupIsContent) {
  Options options;
  options.parse_tool_calls = false;
  const std::string text = "x" + Block(Invoke("f", ""));
  const OutputMessage message = Parse({text}, options);
  EXPECT_EQ(message.content, text);
  EXPECT_THAT(message.tool_calls, IsEmpty());
}

TEST(ToolCallParser, ABlockInsideThinkingEndsIt) {
  Options options = WithTools();
  options.in_reasoning = true;
  const OutputMessage message = Parse({"R" + Block(Invoke("g", "")) + "C"}, options);
  EXPECT_EQ(message.reasoning, "R");
  EXPECT_EQ(message.content, "C");
  EXPECT_THAT(message.tool_calls, SizeIs(1));
}

TEST(ToolCallParser, TextParametersBecomeJsonStrings) {
  const std::string value = "a\"b\\c\nd\te\u0001f/😀<g></h>";
  const auto arguments = json::Parse(Arguments(Parameter("s", "true", value)));
  ASSERT_TRUE(arguments.ok());
  EXPECT_EQ(arguments->Find("s")->AsString(), value);
}

TEST(ToolCallParser, FragmentsOfTagsInTextParametersAreText) {
  EXPECT_EQ(Arguments(Parameter("s", "true", "x</｜DSML｜param y <｜DSML｜ </think>")),
            R"({"s": "x</｜DSML｜param y <｜DSML｜ </think>"})");
}

TEST(ToolCallParser, OtherParametersAreJson) {
  for (const char* value : {"true", "null", "1e5", "-0.0", "123456789012345678901234567890",
                            R"([1,{"a": []}])", R"({"k":"v"})"}) {
    EXPECT_EQ(Arguments(Parameter("o", "false", value)), std::string("{\"o\": ") + value + "}");
  }
  EXPECT_EQ(Arguments(Parameter("o", "false", "\n [1]\n")), R"({"o": [1]})");
}

TEST(ToolCallParser, WhatIsNoJsonBecomesAString) {
  EXPECT_EQ(Arguments(Parameter("o", "false", "{bad")), R"({"o": "{bad"})");
  EXPECT_EQ(Arguments(Parameter("o", "false", "NaN")), R"({"o": "NaN"})");
  EXPECT_EQ(Arguments(Parameter("o", "false", "")), R"({"o": ""})");
}

TEST(ToolCallParser, TheSchemaDecidesForTextsOnly) {
  EXPECT_EQ(Arguments(Parameter("s", "false", "12")), R"({"s": "12"})");
  EXPECT_EQ(Arguments(Parameter("t", "false", "12")), R"({"t": "12"})");
  EXPECT_EQ(Arguments(Parameter("s", "false", "\"x\"")), R"({"s": "x"})");
  EXPECT_EQ(Arguments(Parameter("n", "true", "12")), R"({"n": "12"})");
}

TEST(ToolCallParser, WithoutTheStringAttributeTheSchemaThenJsonDecide) {
  EXPECT_EQ(Arguments("<｜DSML｜parameter name=\"n\">12</｜DSML｜parameter>"), R"({"n": 12})");
  EXPECT_EQ(Arguments("<｜DSML｜parameter name=\"s\">12</｜DSML｜parameter>"), R"({"s": "12"})");
  EXPECT_EQ(Arguments("<｜DSML｜parameter name=\"o\">x y</｜DSML｜parameter>"), R"({"o": "x y"})");
}

TEST(ToolCallParser, AttributesMayStandApartAndInAnyOrder) {
  EXPECT_EQ(Arguments("<｜DSML｜parameter \n string=\"true\"\t name=\"s\" >v</｜DSML｜parameter>"),
            R"({"s": "v"})");
  EXPECT_EQ(Arguments("<｜DSML｜parameter name=\"a>b\" string=\"true\">v</｜DSML｜parameter>"),
            R"({"a>b": "v"})");
}

TEST(ToolCallParser, NoParametersGiveAnEmptyObject) {
  EXPECT_EQ(Arguments(""), "{}");
  EXPECT_EQ(Arguments("\n"), "{}");
  const std::string one_line =
      "<｜DSML｜tool_calls><｜DSML｜invoke name=\"g\"></｜DSML｜invoke>"
      "</｜DSML｜tool_calls>";
  ASSERT_THAT(Parse(one_line).tool_calls, SizeIs(1));
  EXPECT_EQ(Parse(one_line).tool_calls[0].arguments, "{}");
}

TEST(ToolCallParser, UnwrapsArgumentsThatCameInOneParameter) {
  EXPECT_EQ(Arguments(Parameter("arguments", "false", R"({"s":"x","n":1})")),
            R"({"s": "x", "n": 1})");
  EXPECT_EQ(Arguments(Parameter("input", "true", R"({"n":1})")), R"({"n": 1})");
}

TEST(ToolCallParser, KeepsAParameterThatIsNoWrapper) {
  EXPECT_EQ(Arguments(Parameter("arguments", "false", R"({"other":1})")),
            R"({"arguments": {"other":1}})");
  EXPECT_EQ(Arguments(Parameter("arguments", "true", "text")), R"({"arguments": "text"})");
  EXPECT_EQ(Arguments(Parameter("arguments", "false", R"({"n":1})") + Parameter("s", "true", "x")),
            R"({"arguments": {"n":1}, "s": "x"})");
  EXPECT_EQ(Arguments(Parameter("s", "true", "x") + Parameter("arguments", "false", R"({"n":1})")),
            R"({"s": "x", "arguments": {"n":1}})");
  // A tool that nobody described has no schema to unwrap by.
  const OutputMessage unknown =
      Parse(Block(Invoke("mystery", Parameter("arguments", "false", R"({"n":1})"))));
  ASSERT_THAT(unknown.tool_calls, SizeIs(1));
  EXPECT_EQ(unknown.tool_calls[0].name, "mystery");
  EXPECT_EQ(unknown.tool_calls[0].arguments, R"({"arguments": {"n":1}})");
}

TEST(ToolCallParser, AParameterEndsWhereTheNextBegins) {
  EXPECT_EQ(
      Arguments("<｜DSML｜parameter name=\"s\" string=\"true\">x" + Parameter("n", "false", "1")),
      R"({"s": "x", "n": 1})");
  EXPECT_EQ(Arguments("<｜DSML｜parameter name=\"n\" string=\"false\">1"), R"({"n": 1})");
}

TEST(ToolCallParser, OfAParameterGivenTwiceTheFirstIsKept) {
  EXPECT_EQ(Arguments(Parameter("s", "true", "x") + Parameter("s", "true", "y") +
                      Parameter("n", "false", "1")),
            R"({"s": "x", "n": 1})");
}

TEST(ToolCallParser, UnknownMarkupInABlockIsSkipped) {
  const OutputMessage message = Parse(
      Block("noise <｜DSML｜other> <｜DSML｜invoke> <｜DSML｜invoke name=\"\"> "
            "<｜DSML｜invoker name=\"x\">" +
            Invoke("f", "junk <b> <｜DSML｜parameter string=\"true\">lost</｜DSML｜parameter>" +
                            Parameter("n", "false", "1"))));
  EXPECT_EQ(message.content, "");
  ASSERT_THAT(message.tool_calls, SizeIs(1));
  EXPECT_EQ(message.tool_calls[0].arguments, R"({"n": 1})");
}

TEST(ToolCallParser, ABlockWithoutACallWasContent) {
  for (const std::string& block : {Block("no call"), Block(""), Block("<｜DSML｜invoke>")}) {
    EXPECT_EQ(Parse("x" + block + "y").content, "x" + block + "y");
  }
  const std::string open = "x\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke na";
  EXPECT_EQ(Parse({open}, WithTools(), true).content, open);
  EXPECT_EQ(Parse({open}, WithTools(), false).content, open);
}

TEST(ToolCallParser, AnInvokeEndsWhereTheNextBeginsOrTheBlockEnds) {
  const OutputMessage message =
      Parse(Block("<｜DSML｜invoke name=\"f\">" + Parameter("n", "false", "1") +
                  "<｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"s\" string=\"true\">x") +
            "y");
  EXPECT_EQ(message.content, "y");
  ASSERT_THAT(message.tool_calls, SizeIs(2));
  EXPECT_EQ(message.tool_calls[0].arguments, R"({"n": 1})");
  EXPECT_EQ(message.tool_calls[1].arguments, R"({"s": "x"})");
  EXPECT_TRUE(message.tool_calls[1].is_complete);
}

TEST(ToolCallParser, ACompleteCallNeedsNoEndOfTheBlock) {
  const OutputMessage message = Parse("<｜DSML｜tool_calls>" + Invoke("g", ""));
  ASSERT_THAT(message.tool_calls, SizeIs(1));
  EXPECT_TRUE(message.tool_calls[0].is_complete);
}

TEST(ToolCallParser, AnOpenCallIsClosedWhenTheModelStoppedByItself) {
  const auto arguments = [](const std::string& open) {
    const OutputMessage message = Parse("<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\">" + open);
    EXPECT_THAT(message.tool_calls, SizeIs(1));
    EXPECT_TRUE(message.tool_calls[0].is_complete);
    return message.tool_calls[0].arguments;
  };
  EXPECT_EQ(arguments(""), "{}");
  EXPECT_EQ(arguments("<｜DSML｜parameter name=\"s\" string=\"true\">x <"), R"({"s": "x <"})");
  EXPECT_EQ(arguments("<｜DSML｜parameter name=\"n\" string=\"false\">1"), R"({"n": 1})");
  EXPECT_EQ(arguments("<｜DSML｜parameter name=\"n\" str"), "{}");
}

TEST(ToolCallParser, ALimitLeavesTheArgumentsAsFarAsTheyCame) {
  const auto arguments = [](const std::string& open) {
    const OutputMessage message =
        Parse({"<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\">" + open}, WithTools(), false);
    EXPECT_THAT(message.tool_calls, SizeIs(1));
    EXPECT_FALSE(message.tool_calls[0].is_complete);
    return message.tool_calls[0].arguments;
  };
  EXPECT_EQ(arguments(""), "");
  EXPECT_EQ(arguments("<｜DSML｜parameter name=\"s\" string=\"true\">x</｜DS"), R"({"s": "x)");
  EXPECT_EQ(arguments(Parameter("n", "false", "1") + "<｜DSML｜parameter name=\"o\">2"),
            R"({"n": 1)");
  EXPECT_EQ(arguments(Parameter("input", "false", "{}")), R"({"input": {})");
}

TEST(ToolCallParser, OneCallWhenParallelCallsAreOff) {
  Options options = WithTools();
  options.parallel = false;
  const OutputMessage message =
      Parse({Block(Invoke("f", Parameter("n", "false", "1")) +
                   Invoke("f", Parameter("s", "true", "x") + Parameter("o", "false", "2"))) +
             "end"},
            options);
  ASSERT_THAT(message.tool_calls, SizeIs(1));
  EXPECT_EQ(message.tool_calls[0].arguments, R"({"n": 1})");
  EXPECT_EQ(message.content, "end");
}

TEST(ToolCallParser, TagsThatNeverEndAreDropped) {
  const std::string endless = "<｜DSML｜invoke name=\"" + std::string(5000, 'x') + "\">";
  const OutputMessage message = Parse(Block(endless + Invoke("g", "")));
  ASSERT_THAT(message.tool_calls, SizeIs(1));
  EXPECT_EQ(message.tool_calls[0].name, "g");
}

TEST(ToolCallParser, ReadsBackWhatTheEncoderWrites) {
  constexpr char kArguments[] =
      R"({"s": "a\"\n</｜DSML｜b>", "n": -1, "o": {"k": [true, null, 1.5]}, "é": "x"})";
  json::Value call = ParseTestJson(
      R"([{"role":"assistant","content":"c","wo_eos":true,"tool_calls":[
          {"function":{"name":"f"}},{"function":{"name":"g"}}]}])");
  call.items()[0]
      .Find("tool_calls")
      ->items()[0]
      .Find("function")
      ->Set("arguments", json::Value::String(kArguments));
  const auto pieces = EncodeMessages(call, {.mode = ThinkingMode::kChat, .num_context = 0});
  ASSERT_TRUE(pieces.ok());
  const std::string text = JoinPieces(*pieces).substr(pieces->front().text.size());
  const OutputMessage message = Parse(text);
  EXPECT_EQ(message.content, "c");
  ASSERT_THAT(message.tool_calls, SizeIs(2));
  EXPECT_EQ(message.tool_calls[0].arguments, kArguments);
  EXPECT_EQ(message.tool_calls[1].arguments, "{}");
}

bool Same(const OutputMessage& a, const OutputMessage& b) {
  const auto same_call = [](const auto& x, const auto& y) {
    return x.name == y.name && x.arguments == y.arguments && x.is_complete == y.is_complete;
  };
  return a.reasoning == b.reasoning && a.content == b.content &&
         std::equal(a.tool_calls.begin(), a.tool_calls.end(), b.tool_calls.begin(),
                    b.tool_calls.end(), same_call);
}

// Texts that pass through every state and its malformations.
Parts SplitTexts() {
  const std::string good =
      Invoke("f", Parameter("s", "true", "é\"<</｜DSML｜p\n") + Parameter("n", "false", " 1 "));
  return {
      "r<</think\n</think>a\n\n\n" + Block(good + Invoke("g", "")) + "\n\nb<think>x\n\n<",
      "r" + Block("<｜DSML｜invoke>x" + good) + Block("none") + "</｜DSML｜tool_calls>",
      Block(Invoke("f", Parameter("input", "true", R"({"n": 1})")) +
            Invoke("f", Parameter("input", "true", R"({"n": 1})") +
                            Parameter("input", "true", "y") + Parameter("o", "false", "{"))),
      Block("<｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"s\" string=\"true\">x"
            "<｜DSML｜parameter name=\"n\">1<｜DSML｜parameter name=\"s\">2</｜DSML｜invoke>"
            "<｜DSML｜invoke name=\"f\"><｜DSML｜invoke name=\"g\"  ><｜DSML｜parameter>"),
      "<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"s\" "
      "string=\"true\">x</｜D",
      "<｜DSML｜tool_calls><｜DSML｜invoke name=\"" + std::string(4090, 'x') + "\">",
  };
}

TEST(ToolCallParser, TheSameForEverySplitInTwo) {
  Options options = WithTools();
  options.in_reasoning = true;
  for (const std::string& text : SplitTexts()) {
    for (const bool is_natural : {true, false}) {
      const OutputMessage whole = Parse({text}, options, is_natural);
      for (size_t cut = 0; cut <= text.size(); ++cut) {
        EXPECT_TRUE(
            Same(Parse({text.substr(0, cut), text.substr(cut)}, options, is_natural), whole))
            << text << "\ncut at " << cut;
      }
    }
  }
}

TEST(ToolCallParser, TheSameByteByByte) {
  Options options = WithTools();
  options.in_reasoning = true;
  for (const std::string& text : SplitTexts()) {
    Parts bytes;
    for (const char c : text) bytes.emplace_back(1, c);
    EXPECT_TRUE(Same(Parse(bytes, options), Parse({text}, options))) << text;
  }
}

}  // namespace
}  // namespace fathom::text
