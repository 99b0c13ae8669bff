// The API as its clients meet it: over a socket, with the real tokenizer and encoder, and a
// scripted engine.
#include "api/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "api/api_test_server.h"

namespace fathom::api {
namespace {

using namespace std::chrono_literals;
using json::Value;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// All of one delta field, put together.
std::string Joined(const std::vector<Value>& chunks, std::string_view field,
                   size_t choice_idx = 0) {
  std::string out;
  for (const Value& chunk : chunks) {
    const Value& choice = Reply::Walk(chunk, "choices.0");
    if (choice.is_null() ||
        Reply::Walk(choice, "index").ToInt64() != static_cast<int64_t>(choice_idx))
      continue;
    const Value& text = Reply::Walk(choice, field);
    if (text.is_string()) out += text.AsString();
  }
  return out;
}

template <typename Condition>
bool Eventually(const Condition& condition) {
  for (int i = 0; i < 6000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

TEST(Models, ListsWhatIsServed) {
  const ApiTestServer test;
  for (const std::string path : {"/v1/models", "/models", "/v1/models/?x=1", "//v1/models"}) {
    const Reply reply = test.Get(path);
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.At("object").AsString(), "list");
    EXPECT_EQ(reply.At("data.0.id").AsString(), "tiny");
    EXPECT_EQ(reply.At("data.0.max_model_len").ToInt64(), 4096);
    EXPECT_EQ(reply.At("data.0.root").AsString(), "/models/tiny");
    EXPECT_EQ(reply.At("data.1.id").AsString(), "alias/tiny");
  }
  EXPECT_EQ(test.Get("/v1/models/alias/tiny").At("id").AsString(), "alias/tiny");
  EXPECT_EQ(test.Get("/v1/models/alias%2Ftiny").At("id").AsString(), "alias/tiny");
  EXPECT_EQ(test.Get("/v1/models/%ff").At("error.message").AsString(),
            "The model '…' does not exist; this server answers to 'tiny', 'alias/tiny'.");
  const Reply missing = test.Get("/v1/models/other");
  EXPECT_EQ(missing.status, 404);
  EXPECT_EQ(missing.At("error.code").AsString(), "model_not_found");
}

TEST(Probes, AnswerWithoutAKey) {
  ApiOptions options;
  options.api_keys = {"secret"};
  const ApiTestServer test("x", options);
  for (const std::string path : {"/health", "/health/live", "/health/ready", "/ping", "/"}) {
    EXPECT_EQ(test.Get(path).status, 200) << path;
  }
  for (const std::string path : {"/v1/models", "/metrics", "/version", "/nowhere"}) {
    const Reply reply = test.Get(path);
    EXPECT_EQ(reply.status, 401) << path;
    EXPECT_EQ(reply.At("error.code").AsString(), "invalid_api_key");
    EXPECT_THAT(reply.head, HasSubstr("WWW-Authenticate: Bearer\r\n"));
    EXPECT_NE(test.Get(path, "Authorization: Bearer secret\r\n").status, 401) << path;
    EXPECT_NE(test.Get(path, "x-api-key: secret\r\n").status, 401) << path;
  }
}

TEST(Version, IsTold) {
  const ApiTestServer test;
  EXPECT_TRUE(test.Get("/version").At("version").is_string());
}

TEST(Metrics, CountExchanges) {
  const ApiTestServer test;
  test.Chat();
  test.Get("/nowhere");
  EXPECT_TRUE(Eventually([&] {
    const std::string text = test.Get("/metrics").body;
    return text.find(
               R"(http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1)") !=
               text.npos &&
           text.find(R"(http_requests_total{handler="none",method="GET",status="4xx"} 1)") !=
               text.npos;
  }));
}

TEST(RequestIds, AreEchoedWhenTheyArePlain) {
  const ApiTestServer test;
  EXPECT_THAT(test.Get("/v1/models", "X-Request-Id: abc-1\r\n").head,
              HasSubstr("x-request-id: abc-1\r\n"));
  EXPECT_THAT(test.Get("/v1/models", "X-Request-Id: a b\r\n").head,
              HasSubstr("x-request-id: req_"));
  EXPECT_THAT(test.Get("/nowhere").head, HasSubstr("x-request-id: req_"));
  EXPECT_EQ(test.Chat(R"(,"request_id":"mine")").At("id").AsString(), "chatcmpl-mine");
}

TEST(Chat, AnswersWhole) {
  const ApiTestServer test("Hello there.");
  const Reply reply = test.Chat(R"(,"model":"tiny")");
  EXPECT_EQ(reply.status, 200);
  EXPECT_THAT(reply.At("id").AsString(), StartsWith("chatcmpl-"));
  EXPECT_EQ(reply.At("object").AsString(), "chat.completion");
  EXPECT_EQ(reply.At("model").AsString(), "tiny");
  EXPECT_EQ(reply.At("choices.0.message.role").AsString(), "assistant");
  EXPECT_EQ(reply.At("choices.0.message.content").AsString(), "Hello there.");
  EXPECT_EQ(reply.At("choices.0.message").Find("reasoning"), nullptr);
  EXPECT_EQ(reply.At("choices.0.finish_reason").AsString(), "stop");
  EXPECT_TRUE(reply.At("choices.0.stop_reason").is_null());
  const auto prompt = static_cast<int64_t>(
      Ids("<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>").size());
  const auto completion = static_cast<int64_t>(Ids("Hello there.").size()) + 1;
  EXPECT_EQ(reply.At("usage.prompt_tokens").ToInt64(), prompt);
  EXPECT_EQ(reply.At("usage.completion_tokens").ToInt64(), completion);
  EXPECT_EQ(reply.At("usage.total_tokens").ToInt64(), prompt + completion);
  EXPECT_EQ(reply.At("usage.completion_tokens_details.reasoning_tokens").ToInt64(), 0);
  EXPECT_EQ(reply.At("usage.prompt_cache_miss_tokens").ToInt64(), prompt);
}

TEST(Chat, EncodesThePromptAsTheModelExpects) {
  ApiTestServer test;
  test.Post(
      "/chat/completions",
      R"({"messages":[{"role":"system","content":"S"},{"role":"user","content":"<｜User｜>"}]})");
  test.Chat(R"(,"chat_template_kwargs":{"thinking":true})");
  const std::vector<request::Request> submitted = test.engine.submitted();
  ASSERT_EQ(submitted.size(), 2u);
  std::vector<int32_t> plain;
  TestTokenizer().Encode("<｜User｜>", text::Tokenizer::AddedTokens::kAsPlain, &plain);
  std::vector<int32_t> expected = Ids("<｜begin▁of▁sentence｜>S<｜User｜>");
  expected.insert(expected.end(), plain.begin(), plain.end());
  for (const int32_t id : Ids("<｜Assistant｜></think>")) expected.push_back(id);
  EXPECT_EQ(submitted[0].prompt_token_ids, expected);
  EXPECT_EQ(submitted[1].prompt_token_ids,
            Ids("<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>"));
}

TEST(Chat, Streams) {
  const ApiTestServer test("Hello there.");
  const std::vector<Value> chunks = test.ChatStream();
  ASSERT_GE(chunks.size(), 3u);
  EXPECT_EQ(json::Dump(Reply::Walk(chunks.front(), "choices.0.delta")),
            R"({"role":"assistant","content":""})");
  EXPECT_EQ(Joined(chunks, "delta.content"), "Hello there.");
  EXPECT_EQ(Reply::Walk(chunks.back(), "choices.0.finish_reason").AsString(), "stop");
  EXPECT_EQ(json::Dump(Reply::Walk(chunks.back(), "choices.0.delta")), "{}");
  for (const Value& chunk : chunks) {
    EXPECT_EQ(chunk.Find("object")->AsString(), "chat.completion.chunk");
    EXPECT_EQ(chunk.Find("id")->AsString(), chunks[0].Find("id")->AsString());
    EXPECT_EQ(chunk.Find("usage"), nullptr);
  }
}

TEST(Chat, StreamsUsageWhenAsked) {
  const ApiTestServer test;
  const std::vector<Value> chunks = test.ChatStream(R"(,"stream_options":{"include_usage":true})");
  EXPECT_EQ(json::Dump(*chunks.back().Find("choices")), "[]");
  EXPECT_GT(Reply::Walk(chunks.back(), "usage.completion_tokens").ToInt64(), 0);
  for (size_t i = 0; i + 1 < chunks.size(); ++i) EXPECT_TRUE(chunks[i].Find("usage")->is_null());
}

TEST(Chat, StreamsRunningUsageWhenAsked) {
  const ApiTestServer test;
  const std::vector<Value> chunks =
      test.ChatStream(R"(,"stream_options":{"include_usage":true,"continuous_usage_stats":true})");
  int64_t before = 0;
  for (const Value& chunk : chunks) {
    const int64_t now = *Reply::Walk(chunk, "usage.completion_tokens").ToInt64();
    EXPECT_GE(now, before);
    before = now;
  }
  EXPECT_GT(before, 1);
}

TEST(Chat, SplitsReasoning) {
  const ApiTestServer test("I think.</think>Hello");
  const std::string thinking = R"(,"chat_template_kwargs":{"thinking":true})";
  const Reply reply = test.Chat(thinking);
  EXPECT_EQ(reply.At("choices.0.message.reasoning").AsString(), "I think.");
  EXPECT_EQ(reply.At("choices.0.message.reasoning_content").AsString(), "I think.");
  EXPECT_EQ(reply.At("choices.0.message.content").AsString(), "Hello");
  EXPECT_GT(reply.At("usage.completion_tokens_details.reasoning_tokens").ToInt64(), 0);
  const std::vector<Value> chunks = test.ChatStream(thinking);
  EXPECT_EQ(Joined(chunks, "delta.reasoning"), "I think.");
  EXPECT_EQ(Joined(chunks, "delta.reasoning_content"), "I think.");
  EXPECT_EQ(Joined(chunks, "delta.content"), "Hello");
  EXPECT_EQ(Joined(test.ChatStream(thinking + R"(,"include_reasoning":false)"), "delta.reasoning"),
            "");
}

TEST(Chat, GivesReasoningOnlyWhenCutInsideIt) {
  const ApiTestServer test("I think a lot about it.</think>Hello");
  const Reply reply = test.Chat(R"(,"reasoning_effort":"high","max_tokens":3)");
  EXPECT_TRUE(reply.At("choices.0.message.content").is_null());
  EXPECT_FALSE(reply.At("choices.0.message.reasoning").AsString().empty());
  EXPECT_EQ(reply.At("choices.0.finish_reason").AsString(), "length");
}

TEST(Chat, StopsAtAStopStringAndCancelsTheRest) {
  ApiTestServer test("one END two three four five six");
  const Reply reply = test.Chat(R"(,"stop":["END"])");
  EXPECT_EQ(reply.At("choices.0.message.content").AsString(), "one ");
  EXPECT_EQ(reply.At("choices.0.finish_reason").AsString(), "stop");
  EXPECT_EQ(reply.At("choices.0.stop_reason").AsString(), "END");
  EXPECT_TRUE(Eventually([&] { return test.engine.num_active() == 0; }));
  EXPECT_EQ(Joined(test.ChatStream(R"(,"stop":"END")"), "delta.content"), "one ");
  EXPECT_EQ(test.Chat(R"(,"stop":"END","include_stop_str_in_output":true)")
                .At("choices.0.message.content")
                .AsString(),
            "one END");
}

TEST(Chat, GivesSeveralChoices) {
  ApiTestServer test("Hello");
  const Reply reply = test.Chat(R"(,"n":3,"seed":7)");
  EXPECT_EQ(reply.At("choices").items().size(), 3u);
  EXPECT_EQ(reply.At("choices.2.index").ToInt64(), 2);
  EXPECT_EQ(reply.At("usage.completion_tokens").ToInt64(),
            3 * static_cast<int64_t>(Ids("Hello").size() + 1));
  EXPECT_EQ(test.engine.submitted()[0].sampling.seed, 7u);
  EXPECT_EQ(test.engine.submitted()[2].sampling.seed, 9u);
  const std::vector<Value> chunks = test.ChatStream(R"(,"n":2)");
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(Joined(chunks, "delta.content", i), "Hello");
    EXPECT_EQ(Joined(chunks, "finish_reason", i), "stop");
  }
}

TEST(Chat, ShowsLogprobsWhoseBytesAreTheContent) {
  const ApiTestServer test("Hello 😀 there.");
  const std::string fields = R"(,"logprobs":true,"top_logprobs":3)";
  const Reply reply = test.Chat(fields);
  const auto bytes_of = [](const Value& entries) {
    std::string bytes;
    for (const Value& entry : entries.items()) {
      for (const Value& byte : Reply::Walk(entry, "bytes").items())
        bytes += static_cast<char>(*byte.ToInt64());
      EXPECT_EQ(Reply::Walk(entry, "top_logprobs").items().size(), 3u);
      EXPECT_EQ(Reply::Walk(entry, "logprob").ToDouble(), -0.5);
    }
    return bytes;
  };
  EXPECT_EQ(bytes_of(reply.At("choices.0.logprobs.content")), "Hello 😀 there.");
  std::string streamed;
  for (const Value& chunk : test.ChatStream(fields)) {
    const Value& entries = Reply::Walk(chunk, "choices.0.logprobs.content");
    if (entries.is_array()) streamed += bytes_of(entries);
  }
  EXPECT_EQ(streamed, "Hello 😀 there.");
}

TEST(Chat, ReturnsTokenIdsWhenAsked) {
  const ApiTestServer test("Hello");
  const Reply reply = test.Chat(R"(,"return_token_ids":true,"prompt_logprobs":1)");
  EXPECT_EQ(reply.At("choices.0.token_ids").items().size(), Ids("Hello").size() + 1);
  EXPECT_EQ(reply.At("prompt_token_ids.0").ToInt64(), TestSpecialTokens().bos);
  EXPECT_TRUE(reply.At("prompt_logprobs.0").is_null());
  EXPECT_EQ(reply.At("prompt_logprobs").items().size(),
            reply.At("prompt_token_ids").items().size());
  const std::vector<Value> chunks = test.ChatStream(R"(,"return_token_ids":true)");
  EXPECT_NE(chunks[0].Find("choices")->items()[0].Find("prompt_token_ids"), nullptr);
  EXPECT_EQ(chunks[1].Find("choices")->items()[0].Find("prompt_token_ids"), nullptr);
}

TEST(Chat, ContinuesAPrefixWithoutThinking) {
  ApiTestServer test("lo");
  const Reply reply = test.Post("/beta/chat/completions",
                                R"({"messages":[{"role":"user","content":"Hi"},
                                   {"role":"assistant","content":"Hel","prefix":true}],
                                   "thinking":{"type":"enabled"},"echo":true})");
  EXPECT_EQ(reply.At("choices.0.message.content").AsString(), "Hello");
  std::vector<int32_t> expected =
      Ids("<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Hel");
  EXPECT_EQ(test.engine.submitted()[0].prompt_token_ids, expected);
}

TEST(Chat, TheHeaderOfADataRankGoesToTheEngine) {
  ApiTestServer test;
  for (const char* header : {"", "X-data-parallel-rank: 3\r\n", "x-data-parallel-rank: two\r\n"}) {
    EXPECT_EQ(test.Post("/v1/chat/completions", ApiTestServer::ChatBody(), header).status, 200);
  }
  const std::vector<request::Request> submitted = test.engine.submitted();
  EXPECT_EQ(submitted[0].data_rank, std::nullopt);
  EXPECT_EQ(submitted[1].data_rank, 3);
  EXPECT_EQ(submitted[2].data_rank, -1) << "which an engine refuses";
}

TEST(Chat, PassesSamplingOn) {
  ApiOptions options;
  options.allow_priority = options.allow_routed_experts = true;
  ApiTestServer test("x", options);
  const int32_t last = TestTokenizer().vocab_size() - 1;
  const Reply reply = test.Chat(
      R"(,"temperature":0.5,"top_p":0.25,"top_k":-1,"min_p":0.125,"presence_penalty":-1,"frequency_penalty":2,)"
      R"("repetition_penalty":1.5,"max_tokens":5,"max_completion_tokens":3,"min_tokens":2,"ignore_eos":true,)"
      R"("stop_token_ids":[5],"allowed_token_ids":[6,7],"seed":-1,"cache_salt":"s/+ =","bad_words":["a"],"priority":-5,)"
      R"("return_routed_experts":true,"routed_experts_prompt_start":1,)"
      R"("unknown_field":{"x":1},"stop":null,"logit_bias":{")" +
      std::to_string(last) + R"(":-100})");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const request::Request request = test.engine.submitted()[0];
  const request::SamplingParams& sampling = request.sampling;
  EXPECT_EQ(sampling.temperature, 0.5);
  EXPECT_EQ(sampling.top_p, 0.25);
  EXPECT_EQ(sampling.top_k, 0);
  EXPECT_EQ(sampling.min_p, 0.125);
  EXPECT_EQ(sampling.presence_penalty, -1);
  EXPECT_EQ(sampling.frequency_penalty, 2);
  EXPECT_EQ(sampling.repetition_penalty, 1.5);
  EXPECT_EQ(sampling.max_tokens, 3);
  EXPECT_EQ(sampling.min_tokens, 2);
  EXPECT_TRUE(sampling.ignore_eos);
  EXPECT_EQ(sampling.stop_token_ids[0], 5);
  EXPECT_EQ(sampling.allowed_token_ids, (std::vector<int32_t>{6, 7}));
  EXPECT_EQ(sampling.seed, ~uint64_t{0});
  EXPECT_EQ(sampling.bad_words.size(), 2u);
  EXPECT_EQ(sampling.logit_bias, (std::vector<std::pair<int32_t, float>>{{last, -100.0f}}));
  EXPECT_EQ(request.cache_salt, "s/+ =");
  EXPECT_EQ(request.priority, -5);
  EXPECT_EQ(request.routed_experts_start, 1);
}

TEST(Chat, ShowsToolsToTheModel) {
  ApiTestServer test;
  const Reply reply = test.Chat(
      R"(,"tools":[{"type":"function","function":{"name":"f","description":null,"parameters":{"z":1,"a":2},"x":1}}])");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const std::string prompt =
      TestTokenizer().Decode(test.engine.submitted()[0].prompt_token_ids, false);
  EXPECT_THAT(prompt, StartsWith("<｜begin▁of▁sentence｜>\n\n## Tools"));
  EXPECT_THAT(prompt, HasSubstr("\n{\"name\": \"f\", \"parameters\": {\"z\": 1, \"a\": 2}}\n"));
}

constexpr char kToolAnswer[] =
    "Sure.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
    "<｜DSML｜parameter name=\"x\" string=\"true\">a\"b</｜DSML｜parameter>\n"
    "<｜DSML｜parameter name=\"y\" string=\"false\">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
    "<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
constexpr char kTools[] =
    R"(,"tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}])";

TEST(Chat, GivesToolCalls) {
  const ApiTestServer test(kToolAnswer);
  const Reply reply = test.Chat(kTools);
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.At("choices.0.message.content").AsString(), "Sure.");
  EXPECT_EQ(reply.At("choices.0.finish_reason").AsString(), "tool_calls");
  ASSERT_EQ(reply.At("choices.0.message.tool_calls").items().size(), 2u);
  EXPECT_EQ(reply.At("choices.0.message.tool_calls.0.function.name").AsString(), "f");
  EXPECT_EQ(reply.At("choices.0.message.tool_calls.0.function.arguments").AsString(),
            R"({"x": "a\"b", "y": [1, 2]})");
  EXPECT_EQ(reply.At("choices.0.message.tool_calls.1.function.arguments").AsString(), "{}");
  EXPECT_THAT(reply.At("choices.0.message.tool_calls.0.id").AsString(), StartsWith("call_"));
  EXPECT_NE(reply.At("choices.0.message.tool_calls.0.id").AsString(),
            reply.At("choices.0.message.tool_calls.1.id").AsString());
}

TEST(Chat, StreamsToolCallsAsTheyAreWritten) {
  const ApiTestServer test(kToolAnswer);
  const std::vector<Value> chunks = test.ChatStream(kTools);
  EXPECT_EQ(Joined(chunks, "delta.content"), "Sure.");
  EXPECT_EQ(Joined(chunks, "finish_reason"), "tool_calls");
  std::vector<std::string> arguments(2), names(2);
  size_t num_ids = 0;
  for (const Value& chunk : chunks) {
    const Value& call = Reply::Walk(chunk, "choices.0.delta.tool_calls.0");
    if (call.is_null()) continue;
    const auto idx = static_cast<size_t>(*Reply::Walk(call, "index").ToInt64());
    arguments[idx] += Reply::Walk(call, "function.arguments").AsString();
    if (Reply::Walk(call, "function.name").is_string())
      names[idx] = Reply::Walk(call, "function.name").AsString();
    if (Reply::Walk(call, "id").is_string()) ++num_ids;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"f", "g"}));
  EXPECT_EQ(arguments, (std::vector<std::string>{R"({"x": "a\"b", "y": [1, 2]})", "{}"}));
  EXPECT_EQ(num_ids, 2u);
}

TEST(Chat, LeavesToolMarkupAloneWithoutToolsOrWithToolChoiceNone) {
  const ApiTestServer test(kToolAnswer);
  for (const std::string& fields :
       {std::string(), std::string(kTools) + R"(,"tool_choice":"none")"}) {
    const Reply reply = test.Chat(fields);
    EXPECT_EQ(reply.At("choices.0.message.content").AsString(), kToolAnswer);
    EXPECT_EQ(reply.At("choices.0.finish_reason").AsString(), "stop");
  }
}

TEST(Chat, KeepsOneCallWhenCallsAreNotParallel) {
  const ApiTestServer test(kToolAnswer);
  const Reply reply = test.Chat(std::string(kTools) + R"(,"parallel_tool_calls":false)");
  EXPECT_EQ(reply.At("choices.0.message.tool_calls").items().size(), 1u);
}

struct BadField {
  const char* fields;
  const char* param;
  const char* message;
};

TEST(Chat, RefusesBadFields) {
  const ApiTestServer test;
  const BadField cases[] = {
      {R"(,"max_tokens":-1)", "max_tokens", "max_tokens must be at least 1, got -1"},
      {R"(,"max_tokens":0)", "max_tokens", "max_tokens must be at least 1, got 0"},
      {R"(,"max_tokens":1.5)", "max_tokens", "max_tokens must be an integer, got 1.5"},
      {R"(,"max_tokens":1e3)", "max_tokens", "max_tokens must be an integer, got 1e3"},
      {R"(,"max_tokens":"5")", "max_tokens", "max_tokens must be an integer, got \"5\""},
      {R"(,"max_tokens":99999999999999999999)", "max_tokens",
       "max_tokens must be an integer, got 99999999999999999999"},
      {R"(,"temperature":-0.1)", "temperature", "temperature must be between 0 and 2, got -0.1"},
      {R"(,"temperature":2.1)", "temperature", "temperature must be between 0 and 2, got 2.1"},
      {R"(,"temperature":1e99999)", "temperature", nullptr},
      {R"(,"temperature":"1")", "temperature", "temperature must be a number, got \"1\""},
      {R"(,"top_p":0)", "top_p", "top_p must be greater than 0"},
      {R"(,"top_p":1.1)", "top_p", "top_p must be between 0 and 1, got 1.1"},
      {R"(,"top_k":-2)", "top_k", "top_k must be at least -1, got -2"},
      {R"(,"presence_penalty":2.5)", "presence_penalty", nullptr},
      {R"(,"repetition_penalty":0)", "repetition_penalty", nullptr},
      {R"(,"repetition_penalty":1e-9)", "repetition_penalty", nullptr},
      {R"(,"n":0)", "n", "n must be at least 1, got 0"},
      {R"(,"n":1000)", "n", "n must be at most 64, got 1000"},
      {R"(,"min_tokens":9,"max_tokens":3)", "min_tokens", nullptr},
      {R"(,"top_logprobs":5)", "top_logprobs", "top_logprobs needs logprobs: true"},
      {R"(,"logprobs":true,"top_logprobs":21)", "top_logprobs",
       "top_logprobs must be at most 20, got 21"},
      {R"(,"prompt_logprobs":1,"stream":true)", "prompt_logprobs", nullptr},
      {R"(,"stream_options":{"include_usage":true})", "stream_options",
       "stream_options is only allowed when stream is true"},
      {R"(,"stop":[])"
       R"(,"logit_bias":{"999999":1})",
       "logit_bias", nullptr},
      {R"(,"logit_bias":{"5":101})", "logit_bias", nullptr},
      {R"(,"logit_bias":{"x":1})", "logit_bias", nullptr},
      {R"(,"stop":"")", "stop", "stop must be strings of 1 to 256 bytes"},
      {R"(,"stop":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"])",
       "stop", "stop may have at most 16 strings, got 17"},
      {R"(,"allowed_token_ids":[-1])", "allowed_token_ids", nullptr},
      {R"(,"cache_salt":"")", "cache_salt", nullptr},
      {R"(,"priority":5)", "priority", nullptr},
      {R"(,"return_routed_experts":true)", "return_routed_experts",
       "return_routed_experts needs a server that was started with "
       "--enable-return-routed-experts"},
      {R"(,"chat_template":"x")", "chat_template", nullptr},
      {R"(,"continue_final_message":true,"add_generation_prompt":true)", "continue_final_message",
       nullptr},
      {R"(,"thinking":{"type":"bogus"})", "thinking", nullptr},
      {R"(,"reasoning_effort":"banana")", "reasoning_effort", nullptr},
      {R"(,"response_format":{"type":"json_schema"})", "response_format.schema",
       "response_format.schema is required"},
      {R"(,"response_format":{"type":"xml"})", "response_format",
       "response_format.type must be text, json_object, json_schema or structural_tag, got "
       "\"xml\""},
      {R"(,"response_format":{"type":"json_schema","json_schema":{"schema":{"not":{}}}})",
       "response_format.json_schema.schema",
       "response_format.json_schema.schema: the keyword 'not' is not supported"},
      {R"(,"structured_outputs":{"regex":"a","choice":["b"]})", "structured_outputs",
       "structured_outputs must have exactly one of json, regex, choice, grammar, json_object and "
       "structural_tag"},
      {R"(,"structured_outputs":{"regex":"a"},"response_format":{"type":"json_object"})",
       "structured_outputs", "response_format and structured_outputs cannot be sent together"},
      {R"(,"guided_choice":[])", "guided_choice",
       "guided_choice must be a list of 1 to 5000 strings that are not empty"},
      {R"(,"guided_regex":"*a")", "",
       "the output format cannot be compiled: EBNF parser error at line 1, column 10: Expect "
       "element, but got *"},
      {R"(,"tool_choice":"auto")", "tool_choice",
       "tool_choice is only allowed when tools are given"},
      {R"(,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"always")",
       "tool_choice", "tool_choice must be none, auto, required or a function, got \"always\""},
      {R"(,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":)"
       R"({"type":"function","function":{"name":"g"}})",
       "tool_choice", "tool_choice names 'g', which is not among the tools"},
      {R"(,"tools":[{"type":"function","function":{"name":"a b"}}])", "tools[0].function.name",
       nullptr},
      {R"(,"tools":[{"type":"web_search"}])", "tools[0]", nullptr},
      {R"(,"user":5)", "user", nullptr},
  };
  for (const BadField& bad : cases) {
    const Reply reply = test.Chat(bad.fields);
    EXPECT_EQ(reply.status, 400) << bad.fields;
    EXPECT_EQ(reply.At("error.type").is_string() ? reply.At("error.type").AsString() : "",
              "invalid_request_error")
        << bad.fields;
    if (reply.At("error.param").is_string()) {
      EXPECT_EQ(reply.At("error.param").AsString(), bad.param) << bad.fields;
    }
    if (bad.message != nullptr) {
      EXPECT_EQ(reply.Message(), bad.message) << bad.fields;
    }
  }
}

TEST(Chat, RefusesBadBodies) {
  const ApiTestServer test;
  const std::string path = "/v1/chat/completions";
  EXPECT_EQ(test.Post(path, "").Message(), "The body is empty; a JSON object is expected");
  EXPECT_THAT(test.Post(path, "{bad json").Message(),
              StartsWith("The body is invalid JSON at byte 1: "));
  EXPECT_EQ(test.Post(path, "[]").Message(), "The body must be a JSON object, got an array");
  EXPECT_EQ(test.Post(path, R"({"messages":[{"role":"user","content":"\ud83d"}]})").status, 400);
  EXPECT_EQ(test.Post(path, "{\"messages\":\"\xff\"}").Message(),
            "The body is not UTF-8, as JSON has to be");
  EXPECT_EQ(test.Post(path, "\xef\xbb\xbf{}").Message(),
            "The body begins with a byte order mark; send it without one");
  EXPECT_EQ(test.Post(path, std::string(10'000, '[')).status, 400);
  EXPECT_EQ(test.Post(path, "{}").At("error.param").AsString(), "messages");
  EXPECT_EQ(test.Post(path, "{}", "Content-Type: text/plain\r\n").status, 415);
  EXPECT_EQ(test.Post(path, ApiTestServer::ChatBody(),
                      "Content-Type: application/json; charset=utf-8\r\n")
                .status,
            200);
  const Reply unknown = test.Chat(R"(,"model":"gpt-4")");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.Message(),
            "The model 'gpt-4' does not exist; this server answers to 'tiny', 'alias/tiny'.");
  EXPECT_EQ(unknown.At("error.code").AsString(), "model_not_found");
  const Reply wrong_method = test.Get(path);
  EXPECT_EQ(wrong_method.status, 405);
  EXPECT_THAT(wrong_method.head, HasSubstr("Allow: OPTIONS, POST\r\n"));
  EXPECT_TRUE(wrong_method.At("error.message").is_string());
  EXPECT_EQ(test.Post("/nowhere", "{}").At("error.type").AsString(), "invalid_request_error");
}

TEST(Chat, KeepsTheConnectionAfterBadJson) {
  const ApiTestServer test;
  http::RawClient client(test.server->port());
  client.Send("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n{bad");
  EXPECT_THAT(client.ReadUntil("}}"), StartsWith("HTTP/1.1 400 "));
  client.Send("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(client.ReadUntil("]}"), StartsWith("HTTP/1.1 200 "));
}

TEST(Chat, RefusesAPromptThatFillsTheContext) {
  const ApiTestServer test("x", {}, 10);
  const std::string words(200, 'a');
  const Reply reply = test.Post("/v1/chat/completions",
                                R"({"messages":[{"role":"user","content":")" + words + R"("}]})");
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.At("error.code").AsString(), "context_length_exceeded");
  EXPECT_EQ(reply.At("error.param").AsString(), "messages");
  EXPECT_THAT(
      reply.Message(),
      StartsWith("This model's maximum context length is 10 tokens. However, you requested "));
}

TEST(Chat, ClampsMaxTokensToTheContext) {
  ApiTestServer test("x", {}, 100);
  EXPECT_EQ(test.Chat(R"(,"max_tokens":32000)").status, 200);
  const request::Request request = test.engine.submitted()[0];
  EXPECT_EQ(request.sampling.max_tokens, 100 - static_cast<int>(request.prompt_token_ids.size()));
}

TEST(Chat, SaysWhenTheQueueIsFull) {
  ApiTestServer test;
  test.engine.Hold(true);
  test.engine.set_capacity(1);
  for (const std::string& fields :
       {std::string(R"(,"n":2)"), std::string(R"(,"n":2,"stream":true)")}) {
    const Reply reply = test.Chat(fields);
    EXPECT_EQ(reply.status, 429);
    EXPECT_THAT(reply.head, HasSubstr("Retry-After: 1\r\n"));
    EXPECT_EQ(reply.At("error.type").AsString(), "rate_limit_error");
    EXPECT_TRUE(Eventually([&] { return test.engine.num_active() == 0; }))
        << "the first choice stayed behind";
  }
}

class Disconnect : public testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(Disconnect, FreesTheRequestInEveryPhase) {
  const auto [held, stream] = GetParam();
  ApiTestServer test("word ");
  test.engine.Hold(held);
  test.engine.set_step_time(5ms);
  http::RawClient client(test.server->port());
  client.Send(ApiTestServer::RequestText(
      "POST", "/v1/chat/completions",
      ApiTestServer::ChatBody(std::string(R"(,"ignore_eos":true,"max_tokens":4000,"n":2)") +
                              (stream ? R"(,"stream":true)" : ""))));
  ASSERT_TRUE(Eventually([&] { return test.engine.num_active() == 2; }));
  if (stream && !held) client.ReadUntil("word");
  client.Close();
  EXPECT_TRUE(Eventually([&] { return test.engine.num_active() == 0; }));
  EXPECT_EQ(test.Get("/v1/models").status, 200);
}

INSTANTIATE_TEST_SUITE_P(Phases, Disconnect, testing::Combine(testing::Bool(), testing::Bool()));

TEST(Chat, CancelsASlowReader) {
  ApiOptions options;
  options.http_limits.max_write_buffer_bytes = 10'000;
  ApiTestServer test("word ", options, 100'000'000);
  http::RawClient client;
  client.SetReceiveBuffer(2048);
  ASSERT_TRUE(client.Connect(test.server->port()));
  client.Send(ApiTestServer::RequestText(
      "POST", "/v1/chat/completions",
      ApiTestServer::ChatBody(R"(,"ignore_eos":true,"max_tokens":99000000,"stream":true)")));
  ASSERT_TRUE(Eventually([&] { return !test.engine.submitted().empty(); }));
  EXPECT_TRUE(Eventually([&] { return test.engine.num_active() == 0; }));
}

TEST(Chat, SendsCommentsWhileItWaits) {
  ApiOptions options;
  options.keep_alive_interval = 30ms;
  ApiTestServer test("Hello", options);
  test.engine.Hold(true);
  http::RawClient client(test.server->port());
  client.Send(ApiTestServer::RequestText("POST", "/v1/chat/completions",
                                         ApiTestServer::ChatBody(R"(,"stream":true)")));
  EXPECT_THAT(client.ReadUntil(": keep-alive\n\n"), HasSubstr(": keep-alive\n\n"));
  EXPECT_THAT(client.ReadUntil(": keep-alive\n\n"), Not(HasSubstr("data:")));
  test.engine.Hold(false);
  EXPECT_THAT(client.ReadToClose(), HasSubstr("[DONE]"));
}

TEST(Stop, LetsRunningAnswersFinishAndRefusesNewOnes) {
  ApiTestServer test("one two three four five six seven eight nine ten");
  test.engine.Hold(true);
  http::RawClient client(test.server->port());
  client.Send(ApiTestServer::RequestText("POST", "/v1/chat/completions",
                                         ApiTestServer::ChatBody(R"(,"stream":true)")));
  ASSERT_TRUE(Eventually([&] { return test.engine.num_active() == 1; }));
  std::thread stopper([&] { test.server->Stop(60s); });
  EXPECT_TRUE(Eventually([&] { return test.Get("/health/ready").status == 503; }));
  EXPECT_EQ(test.Chat().status, 503);
  test.engine.Hold(false);
  EXPECT_THAT(client.ReadToClose(), HasSubstr("[DONE]"));
  stopper.join();
  EXPECT_FALSE(http::RawClient().Connect(test.server->port()));
}

TEST(Stop, EndsAnswersThatOutlastTheDrainWithAnError) {
  ApiTestServer test;
  test.engine.Hold(true);
  http::RawClient stream(test.server->port());
  stream.Send(ApiTestServer::RequestText("POST", "/v1/chat/completions",
                                         ApiTestServer::ChatBody(R"(,"stream":true)")));
  http::RawClient whole(test.server->port());
  whole.Send(ApiTestServer::RequestText("POST", "/v1/chat/completions", ApiTestServer::ChatBody()));
  ASSERT_TRUE(Eventually([&] { return test.engine.num_active() == 2; }));
  test.server->Stop(50ms);
  const std::vector<std::string> events = Events(stream.ReadToClose());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(Reply::Walk(*json::Parse(events[0]), "error.code").AsString(), "cancelled");
  EXPECT_EQ(events[1], "[DONE]");
  EXPECT_EQ(ParseReply(whole.ReadToClose()).status, 503);
}

TEST(Completions, AnswersTextAndTokenIds) {
  ApiTestServer test("Hello");
  const Reply text = test.Post("/v1/completions", R"({"prompt":"Once"})");
  EXPECT_EQ(text.At("object").AsString(), "text_completion");
  EXPECT_THAT(text.At("id").AsString(), StartsWith("cmpl-"));
  EXPECT_EQ(text.At("choices.0.text").AsString(), "Hello");
  EXPECT_EQ(text.At("choices.0.finish_reason").AsString(), "stop");
  EXPECT_EQ(
      test.Post("/v1/completions", R"({"prompt":[5,6,7]})").At("usage.prompt_tokens").ToInt64(), 3);
  EXPECT_EQ(
      test.Post("/beta/completions", R"({"prompt":"<｜begin▁of▁sentence｜>Once","max_tokens":2})")
          .status,
      200);
  EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":"Once","add_special_tokens":false})").status,
            200);
  const std::vector<request::Request> submitted = test.engine.submitted();
  EXPECT_EQ(submitted[0].prompt_token_ids, Ids("<｜begin▁of▁sentence｜>Once"));
  EXPECT_EQ(submitted[0].sampling.max_tokens, 16);
  EXPECT_EQ(submitted[1].prompt_token_ids, (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(submitted[2].prompt_token_ids, submitted[0].prompt_token_ids);
  EXPECT_EQ(submitted[2].sampling.max_tokens, 2);
  EXPECT_EQ(submitted[3].prompt_token_ids, Ids("Once"));
}

TEST(Completions, AnswersBatchesInOrder) {
  const ApiTestServer test("Hello");
  const Reply reply = test.Post("/v1/completions", R"({"prompt":["a","b",[5]],"n":2,"echo":true})");
  ASSERT_EQ(reply.At("choices").items().size(), 6u);
  EXPECT_EQ(reply.At("choices.1.text").AsString(), "aHello");
  EXPECT_EQ(reply.At("choices.2.text").AsString(), "bHello");
  EXPECT_EQ(reply.At("choices.5.index").ToInt64(), 5);
  EXPECT_EQ(reply.At("usage.prompt_tokens").ToInt64(), 2 + 2 + 1);
}

TEST(Completions, EchoesLogprobsOfThePrompt) {
  const ApiTestServer test("Hello");
  const Reply reply =
      test.Post("/v1/completions", R"({"prompt":[5,6,7],"echo":true,"logprobs":2,"max_tokens":1})");
  const Value& logprobs = reply.At("choices.0.logprobs");
  ASSERT_EQ(Reply::Walk(logprobs, "tokens").items().size(), 4u);
  EXPECT_TRUE(Reply::Walk(logprobs, "token_logprobs.0").is_null());
  EXPECT_TRUE(Reply::Walk(logprobs, "top_logprobs.0").is_null());
  EXPECT_EQ(Reply::Walk(logprobs, "token_logprobs.1").ToDouble(), -0.5);
  EXPECT_EQ(Reply::Walk(logprobs, "text_offset.0").ToInt64(), 0);
  EXPECT_EQ(Reply::Walk(logprobs, "text_offset").items().size(), 4u);
}

TEST(Completions, Streams) {
  const ApiTestServer test("Hello there");
  const std::vector<Value> chunks = test.StreamOf(
      "/v1/completions",
      R"({"prompt":["a","b"],"stream":true,"echo":true,"stream_options":{"include_usage":true}})");
  EXPECT_EQ(Joined(chunks, "text", 0), "aHello there");
  EXPECT_EQ(Joined(chunks, "text", 1), "bHello there");
  EXPECT_EQ(Joined(chunks, "finish_reason", 1), "stop");
  EXPECT_TRUE(Reply::Walk(chunks.back(), "usage.total_tokens").is_number());
}

TEST(Completions, FillInTheMiddle) {
  ApiTestServer test;
  test.Post("/beta/completions", R"({"prompt":"a","suffix":"b"})");
  EXPECT_EQ(test.engine.submitted()[0].prompt_token_ids,
            Ids("<｜begin▁of▁sentence｜><｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"));
}

TEST(Completions, RefusesBadPrompts) {
  const ApiTestServer test;
  const std::string vocab_size = std::to_string(TestTokenizer().vocab_size());
  const std::string bad[] = {R"({})",
                             R"({"prompt":5})",
                             R"({"prompt":[]})",
                             R"({"prompt":[[]]})",
                             R"({"prompt":["a",5]})",
                             R"({"prompt":[5,"a"]})",
                             R"({"prompt":[-1]})",
                             R"({"prompt":[1.5]})",
                             R"({"prompt":[)" + vocab_size + "]}",
                             R"({"prompt":"","add_special_tokens":false})",
                             R"({"prompt":["a","b"],"n":40})",
                             R"({"prompt":"a","best_of":2})",
                             R"({"prompt":[5],"suffix":"b"})",
                             R"({"prompt":"a","logprobs":21})"};
  for (const std::string& body : bad)
    EXPECT_EQ(test.Post("/v1/completions", body).status, 400) << body;
  EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":""})").status, 200);
}

TEST(Tokenize, RoundTrips) {
  const ApiTestServer test;
  const Reply text = test.Post("/tokenize", R"({"prompt":"Hello","return_token_strs":true})");
  EXPECT_EQ(text.At("count").ToInt64(), static_cast<int64_t>(Ids("Hello").size()) + 1);
  EXPECT_EQ(text.At("max_model_len").ToInt64(), 4096);
  EXPECT_EQ(text.At("token_strs.0").AsString(), "<｜begin▁of▁sentence｜>");
  const Reply plain = test.Post("/tokenize", R"({"prompt":"Hello","add_special_tokens":false})");
  EXPECT_EQ(test.Post("/detokenize", R"({"tokens":)" + json::Dump(plain.At("tokens")) + "}")
                .At("prompt")
                .AsString(),
            "Hello");
  const Reply chat = test.Post("/tokenize", ApiTestServer::ChatBody());
  EXPECT_EQ(chat.At("count").ToInt64(), test.Chat().At("usage.prompt_tokens").ToInt64());
  EXPECT_EQ(test.Post("/tokenize", "{}").status, 400);
  EXPECT_EQ(test.Post("/detokenize", "{}").status, 400);
  EXPECT_EQ(test.Post("/detokenize", R"({"tokens":[99999999]})").status, 400);
}

TEST(Start, RefusesBadOptions) {
  const ApiTestServer test;
  MetricsRegistry metrics;
  const auto start = [&](ApiOptions options) {
    return StartApiServer(std::move(options), const_cast<ScriptedEngine&>(test.engine),
                          TestTokenizer(), {}, metrics)
        .status()
        .message();
  };
  ApiOptions options;
  EXPECT_EQ(start(options), "a served model name is required");
  options.served_model_names = {"m"};
  options.port = test.server->port();
  EXPECT_THAT(start(options), HasSubstr("already in use"));
  options.default_chat_template_kwargs = *json::Parse(R"({"thinking":"yes"})");
  EXPECT_THAT(start(options),
              HasSubstr("--default-chat-template-kwargs: thinking must be true or false"));
}

}  // namespace
}  // namespace fathom::api
