// Exact replay: a turn that comes back is encoded as it was sampled, whatever its client did to it.
#include <gtest/gtest.h>

#include "api/api_test_server.h"
#include "api/replay/reasoning_seal.h"
#include "api/replay/replay_store.h"
#include "api/replay/restore.h"

namespace fathom::api {
namespace {

using json::Value;

ReplayRecord Record(const std::string& content, size_t num_ids = 4) {
  ReplayRecord record;
  record.turn.token_ids.assign(num_ids, 7);
  record.message.content = content;
  return record;
}

TEST(ReplayStore, FindsByEveryKeyWithinItsScopeOnly) {
  ReplayStore store(1 << 20);
  store.Put("alice", {"call_1", "resp_1"}, Record("x"));
  EXPECT_EQ(store.Find("alice", "call_1")->message.content, "x");
  EXPECT_EQ(store.Find("alice", "call_1"), store.Find("alice", "resp_1"));
  EXPECT_EQ(store.Find("alice", "call_2"), nullptr);
  EXPECT_EQ(store.Find("bob", "call_1"), nullptr);
  EXPECT_EQ(store.Find("alic", "ecall_1"), nullptr);
}

TEST(ReplayStore, ForgetsTheLeastRecentlyUsedWhenItIsFull) {
  ReplayStore store(16 << 10);
  store.Put("s", {"first"}, Record("x", 1000));
  store.Put("s", {"second"}, Record("x", 1000));
  store.Put("s", {"third"}, Record("x", 1000));
  EXPECT_NE(store.Find("s", "first"), nullptr);
  store.Put("s", {"fourth"}, Record("x", 1000));
  EXPECT_NE(store.Find("s", "first"), nullptr);
  EXPECT_EQ(store.Find("s", "second"), nullptr);
  EXPECT_NE(store.Find("s", "fourth"), nullptr);
  EXPECT_LE(store.num_bytes(), size_t{16} << 10);
  store.Put("s", {"huge"}, Record("x", 100'000));
  EXPECT_EQ(store.Find("s", "huge"), nullptr);
  EXPECT_NE(store.Find("s", "fourth"), nullptr);
}

TEST(ReplayStore, ReplacesARecordOfTheSameKey) {
  ReplayStore store(1 << 20);
  store.Put("s", {"a", "b"}, Record("old"));
  store.Put("s", {"b"}, Record("new"));
  EXPECT_EQ(store.Find("s", "b")->message.content, "new");
  const size_t one = store.num_bytes();
  store.Put("s", {"b"}, Record("new"));
  EXPECT_EQ(store.num_bytes(), one);
}

TEST(ReasoningSeal, KnowsItsOwnSignaturesOfTheTextOrOfNone) {
  const ReasoningSeal seal("");
  const std::string id = ReasoningSeal::NewId();
  const std::string signature = seal.Sign("alice", id, "I think.");
  EXPECT_LT(signature.size(), 100u);
  EXPECT_EQ(seal.Sign("alice", id, std::string(100'000, 'x')).size(), signature.size());
  EXPECT_EQ(seal.VerifiedId("alice", signature, "I think."), id);
  EXPECT_EQ(seal.VerifiedId("alice", signature, ""), id);
  EXPECT_FALSE(seal.VerifiedId("alice", signature, "I thought."));
  EXPECT_FALSE(seal.VerifiedId("bob", signature, "I think."));
  EXPECT_FALSE(ReasoningSeal("").VerifiedId("alice", signature, "I think."));
  std::string damaged = signature;
  damaged[5] = damaged[5] == 'A' ? 'B' : 'A';
  for (const std::string& text : {damaged, std::string(), std::string("abc"), std::string("====")})
    EXPECT_FALSE(seal.VerifiedId("alice", text, "")) << text;
}

TEST(ReasoningSeal, OpensWhatWasSealedForTheSameScopeBySameSecret) {
  const ReasoningSeal seal("secret");
  const std::string id = ReasoningSeal::NewId();
  const std::string token = seal.Seal("alice", {id, "I think. \u00e9"});
  EXPECT_EQ(token.find("think"), std::string::npos);
  const auto opened = ReasoningSeal("secret").Open("alice", token);
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->id, id);
  EXPECT_EQ(opened->text, "I think. \u00e9");
  EXPECT_FALSE(seal.Open("bob", token));
  EXPECT_FALSE(ReasoningSeal("other").Open("alice", token));
  for (size_t i = 0; i + 4 < token.size(); i += 5) {
    std::string damaged = token;
    damaged[i] = damaged[i] == 'A' ? 'B' : 'A';
    EXPECT_FALSE(seal.Open("alice", damaged)) << i;
    EXPECT_FALSE(seal.Open("alice", token.substr(0, i))) << i;
  }
}

// Restoring, with one remembered call get_weather({"city": "Paris", "days": 2}) after reasoning.

struct Restored {
  bool is_exact = false;
  std::string reasoning;
};

Restored Restore(const std::string& assistant, const std::string& scope = "s") {
  ReplayStore store(1 << 20);
  ReplayRecord record = Record("I look.");
  record.message.reasoning = "Hm.";
  record.message.tool_calls = {{"get_weather", R"({"city": "Paris", "days": 2})", true}};
  store.Put("s", {"call_1"}, record);
  Value messages = Value::Array({*json::Parse(assistant)});
  const text::SampledTurns turns = RestoreSampledTurns(store, scope, &messages);
  const Value* reasoning = messages.items()[0].Find("reasoning");
  return {turns.size() == 1 && messages.items()[0].Find("sampled") != nullptr,
          reasoning == nullptr ? "" : reasoning->AsString()};
}

std::string Turn(const std::string& content, const std::string& arguments,
                 const std::string& more = "") {
  Value function = Value::Object(
      {{"name", Value::String("get_weather")}, {"arguments", Value::String(arguments)}});
  Value call = Value::Object({{"id", Value::String("call_1")}, {"function", function}});
  return R"({"role":"assistant","content":)" + json::Quote(content) + R"(,"tool_calls":[)" +
         json::Dump(call) + "]" + more + "}";
}

TEST(RestoreSampledTurns, RestoresATurnThatSaysTheSame) {
  const std::string arguments = R"({"city": "Paris", "days": 2})";
  EXPECT_TRUE(Restore(Turn("I look.", arguments)).is_exact);
  EXPECT_TRUE(Restore(Turn("I look.", arguments, R"(,"reasoning":"rewritten")")).is_exact);
  EXPECT_TRUE(Restore(Turn(" I\n look.\n\n", R"({"days":2.0,"city":"Paris"})")).is_exact);
}

TEST(RestoreSampledTurns, LeavesATurnThatWasChangedButForItsMissingReasoning) {
  const Restored changed = Restore(Turn("I look.", R"({"city": "Rome", "days": 2})"));
  EXPECT_FALSE(changed.is_exact);
  EXPECT_EQ(changed.reasoning, "Hm.");
  const Restored reworded =
      Restore(Turn("I peek.", R"({"city": "Paris", "days": 2})", R"(,"reasoning":"mine")"));
  EXPECT_FALSE(reworded.is_exact);
  EXPECT_EQ(reworded.reasoning, "mine");
}

TEST(RestoreSampledTurns, KnowsNothingOfAnotherScope) {
  const Restored other = Restore(Turn("I look.", R"({"city": "Paris", "days": 2})"), "t");
  EXPECT_FALSE(other.is_exact);
  EXPECT_EQ(other.reasoning, "");
}

// Through the API, with a model that samples every character as a token of its own.

constexpr char kTools[] =
    R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"string"}}}}}])";
constexpr char kThinking[] = R"("chat_template_kwargs":{"thinking":true})";

// Text one character at a time: never what the tokenizer would make of it.
std::vector<int32_t> Spelled(const std::string& text) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < text.size();) {
    const std::string control = [&]() -> std::string {
      for (const std::string token : {"</think>", "｜DSML｜"}) {
        if (text.compare(i, token.size(), token) == 0) return token;
      }
      return "";
    }();
    const std::string piece = control.empty() ? text.substr(i, 1) : control;
    for (const int32_t id : Ids(piece)) ids.push_back(id);
    i += piece.size();
  }
  return ids;
}

const std::string kAnswer =
    "Let me see.</think>I call.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
    "<｜DSML｜parameter name=\"x\" string=\"true\">abc</｜DSML｜parameter>\n"
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

bool StartsWithIds(const std::vector<int32_t>& ids, const std::vector<int32_t>& head) {
  return ids.size() >= head.size() && std::equal(head.begin(), head.end(), ids.begin());
}

// Asks, answers the call without giving the reasoning back, and returns both prompts.
std::vector<request::Request> TwoTurns(bool stream, const std::string& second_headers = "",
                                       const std::string& arguments = "") {
  ApiTestServer test([](const request::Request&) { return Spelled(kAnswer); });
  const std::string fields = std::string(",") + kTools + "," + kThinking;
  std::string id;
  if (stream) {
    for (const Value& chunk : test.ChatStream(fields)) {
      const Value& call = Reply::Walk(chunk, "choices.0.delta.tool_calls.0.id");
      if (call.is_string()) id = call.AsString();
    }
  } else {
    id = test.Chat(fields).At("choices.0.message.tool_calls.0.id").AsString();
  }
  const std::string given = arguments.empty() ? R"({"x": "abc"})" : arguments;
  test.Post(
      "/v1/chat/completions",
      R"({"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"I call.",)"
      R"("tool_calls":[{"id":")" +
          id + R"(","type":"function","function":{"name":"f","arguments":)" + json::Quote(given) +
          R"(}}]},{"role":"tool","tool_call_id":")" + id + R"(","content":"done"}],)" + kTools +
          "," + kThinking + "}",
      second_headers);
  return test.engine.submitted();
}

TEST(Replay, EncodesAnAnswerThatComesBackAsItWasSampled) {
  for (const bool stream : {false, true}) {
    const auto requests = TwoTurns(stream);
    ASSERT_EQ(requests.size(), 2u);
    std::vector<int32_t> sampled = requests[0].prompt_token_ids;
    for (const int32_t id : Spelled(kAnswer)) sampled.push_back(id);
    sampled.push_back(TestSpecialTokens().eos);
    EXPECT_TRUE(StartsWithIds(requests[1].prompt_token_ids, sampled)) << "stream " << stream;
  }
}

TEST(Replay, IsNotSharedBetweenKeys) {
  const auto requests = TwoTurns(false, "Authorization: Bearer other\r\n");
  ASSERT_EQ(requests.size(), 2u);
  const std::string text = TestTokenizer().Decode(requests[1].prompt_token_ids, false);
  EXPECT_EQ(text.find("Let me see."), std::string::npos);
}

TEST(Replay, TakesTheClientsArgumentsWhenTheyWereChanged) {
  const auto requests = TwoTurns(false, "", R"({"x": "changed"})");
  ASSERT_EQ(requests.size(), 2u);
  const std::string text = TestTokenizer().Decode(requests[1].prompt_token_ids, false);
  EXPECT_NE(text.find("changed"), std::string::npos);
  EXPECT_NE(text.find("<think>Let me see.</think>"), std::string::npos) << "reasoning is put back";
}

}  // namespace
}  // namespace fathom::api
