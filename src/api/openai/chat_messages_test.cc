#include "api/openai/chat_messages.h"

#include <gtest/gtest.h>

namespace fathom::api::openai {
namespace {

// The encoder's messages as JSON, or the error's text.
std::string Read(const std::string& messages, bool continue_final_message = false) {
  const json::Value value = *json::Parse(messages);
  const Parsed<ChatMessages> result = ReadMessages(&value, continue_final_message, {});
  return result.ok() ? json::Dump(result->messages) : result.error().message;
}

TEST(ChatMessages, PassesPlainTurns) {
  const std::string text = R"([{"role":"system","content":"s"},{"role":"user","content":"u"}])";
  EXPECT_EQ(Read(text), text);
}

TEST(ChatMessages, ReadsDeveloperAsSystem) {
  EXPECT_EQ(
      Read(R"([{"role":"developer","content":"s"},{"role":"user","content":"u","name":"x"}])"),
      R"([{"role":"system","content":"s"},{"role":"user","content":"u"}])");
}

TEST(ChatMessages, JoinsTextParts) {
  EXPECT_EQ(
      Read(
          R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])"),
      R"([{"role":"user","content":"a\n\nb"}])");
}

TEST(ChatMessages, MergesAssistantTurnsInARow) {
  EXPECT_EQ(
      Read(R"([{"role":"user","content":"u"},
                     {"role":"assistant","content":"a","reasoning_content":"r"},
                     {"role":"assistant","content":"b","reasoning":"s",
                      "tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},
                     {"role":"tool","tool_call_id":"1","content":null}])"),
      R"([{"role":"user","content":"u"},)"
      R"({"role":"assistant","content":"ab","reasoning":"rs",)"
      R"("tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},)"
      R"({"role":"tool","content":"","tool_call_id":"1"}])");
}

TEST(ChatMessages, MakesArgumentsTheTextOfAnObject) {
  const auto arguments = [](const std::string& json) {
    const json::Value value = *json::Parse(
        R"([{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f")" + json +
        R"(}}]},{"role":"user","content":"u"}])");
    const Parsed<ChatMessages> result = ReadMessages(&value, false, {});
    return result->messages.items()[0]
        .Find("tool_calls")
        ->items()[0]
        .Find("function")
        ->Find("arguments")
        ->AsString();
  };
  EXPECT_EQ(arguments(R"(,"arguments":"{\"x\":1.0}")"), R"({"x":1.0})");
  EXPECT_EQ(arguments(R"(,"arguments":{"z":1,"a":2})"), R"({"z":1,"a":2})");
  EXPECT_EQ(arguments(R"(,"arguments":null)"), "{}");
  EXPECT_EQ(arguments(R"(,"arguments":"")"), "{}");
  EXPECT_EQ(arguments(""), "{}");
  EXPECT_EQ(arguments(R"(,"arguments":"[1]")"), "[1]");
}

TEST(ChatMessages, MarksAPrefixForContinuation) {
  const std::string expected =
      R"([{"role":"user","content":"u"},{"role":"assistant","content":"a","wo_eos":true}])";
  EXPECT_EQ(
      Read(R"([{"role":"user","content":"u"},{"role":"assistant","content":"a","prefix":true}])"),
      expected);
  EXPECT_EQ(Read(R"([{"role":"user","content":"u"},{"role":"assistant","content":"a"}])", true),
            expected);
}

TEST(ChatMessages, GivesAConversationThatEndsWithAnInstructionATurnToAnswer) {
  EXPECT_EQ(Read(R"([{"role":"system","content":"s"}])"),
            R"([{"role":"system","content":"s"},{"role":"user","content":""}])");
}

TEST(ChatMessages, RefusesWhatHasNoMeaning) {
  EXPECT_EQ(Read("[]"), "messages must be an array of at least one message");
  EXPECT_EQ(Read("\"hi\""), "messages must be an array of at least one message");
  EXPECT_EQ(Read("[1]"), "messages[0] must be an object");
  EXPECT_EQ(Read(R"([{"role":"user","content":null}])"),
            "messages[0].content is required for role user");
  EXPECT_EQ(Read(R"([{"role":"user"}])"), "messages[0].content is required for role user");
  EXPECT_EQ(Read(R"([{"role":"user","content":5}])"),
            "messages[0].content must be a string or an array of parts, got a number");
  EXPECT_EQ(
      Read(R"([{"role":"function","content":"x"}])"),
      "messages[0].role must be system, developer, user, assistant or tool, got \"function\"");
  EXPECT_EQ(Read(R"([{"content":"x"}])"),
            "messages[0].role must be system, developer, user, assistant or tool, got nothing");
  EXPECT_EQ(Read(R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}])"),
            "image content is not supported by this model: send text");
  EXPECT_EQ(Read(R"([{"role":"user","content":[{"type":"input_audio"}]}])"),
            "audio content is not supported by this model: send text");
  EXPECT_EQ(Read(R"([{"role":"user","content":[{"type":"smell"}]}])"),
            "messages[0].content[0].type \"smell\" is not known: send text");
  EXPECT_EQ(Read(R"([{"role":"user","content":"u","task":"query"}])"),
            "messages[0].task is not served");
  EXPECT_EQ(
      Read(
          R"([{"role":"assistant","tool_calls":[{"function":{}}]},{"role":"user","content":"u"}])"),
      "messages[0].tool_calls[0].function.name is required");
  EXPECT_EQ(Read(R"([{"role":"user","content":"u"},{"role":"assistant","content":"a"}])"),
            "the last message must be from user or tool; to continue an assistant message set "
            "prefix: true on it");
  EXPECT_EQ(Read(R"([{"role":"user","content":"u"}])", true),
            "continue_final_message needs an assistant message at the end");
}

}  // namespace
}  // namespace fathom::api::openai
