// ApiTestServer: the real API over a scripted engine, and a client that speaks JSON to it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "api/scripted_engine.h"
#include "api/server.h"
#include "api/test_tokenizer.h"
#include "http/raw_client.h"
#include "json/json.h"

namespace fathom::api {

struct Reply {
  int status = 0;
  std::string head;
  std::string body;
  json::Value json;  // of the body, if it is JSON

  // The value at "a.b.0.c"; null when there is none.
  const json::Value& At(std::string_view path) const { return Walk(json, path); }
  std::string Message() const {
    const json::Value& message = At("error.message");
    return message.is_string() ? message.AsString() : body;
  }

  static const json::Value& Walk(const json::Value& root, std::string_view path) {
    static const json::Value kNone;
    const json::Value* at = &root;
    while (!path.empty() && at != nullptr) {
      const std::string key(path.substr(0, path.find('.')));
      path.remove_prefix(std::min(path.size(), key.size() + 1));
      if (at->is_array()) {
        const size_t idx = std::stoul(key);
        at = idx < at->items().size() ? &at->items()[idx] : nullptr;
      } else {
        at = at->Find(key);
      }
    }
    return at == nullptr ? kNone : *at;
  }
};

inline Reply ParseReply(const std::string& text) {
  Reply reply;
  const size_t end = text.find("\r\n\r\n");
  if (end == std::string::npos) return reply;
  reply.head = text.substr(0, end + 2);
  reply.body = text.substr(end + 4);
  reply.status = std::stoi(reply.head.substr(9, 3));
  if (auto value = json::Parse(reply.body); value.ok()) reply.json = *std::move(value);
  return reply;
}

// The data of the events in a chunked stream.
inline std::vector<std::string> Events(const std::string& text) {
  std::vector<std::string> events;
  for (size_t at = text.find("data: "); at != std::string::npos; at = text.find("data: ", at + 1)) {
    events.push_back(text.substr(at + 6, text.find("\n\n", at) - at - 6));
  }
  return events;
}

class ApiTestServer {
 public:
  // Every request is answered with `answer` (control tokens' text becomes their ids).
  explicit ApiTestServer(const std::string& answer = "Hello there.", ApiOptions options = {},
                         int64_t max_model_len = 4096)
      : ApiTestServer([ids = Ids(answer)](const request::Request&) { return ids; },
                      std::move(options), max_model_len) {}
  // Every request is answered as the script says.
  explicit ApiTestServer(ScriptedEngine::Script script, ApiOptions options = {},
                         int64_t max_model_len = 4096)
      : engine(std::move(script), TestSpecialTokens().eos, max_model_len) {
    options.port = 0;
    if (options.served_model_names.empty()) options.served_model_names = {"tiny", "alias/tiny"};
    auto started =
        StartApiServer(std::move(options), engine, TestTokenizer(),
                       {.root = "/models/tiny", .special_tokens = TestSpecialTokens()}, metrics);
    EXPECT_TRUE(started.ok()) << started.status().message();
    server = *std::move(started);
  }

  static std::string RequestText(const std::string& method, const std::string& path,
                                 const std::string& body, const std::string& headers = "") {
    return method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  Reply Get(const std::string& path, const std::string& headers = "") const {
    http::RawClient client(server->port());
    client.Send(RequestText("GET", path, "", headers));
    return ParseReply(client.ReadToClose());
  }
  Reply Post(const std::string& path, const std::string& body,
             const std::string& headers = "") const {
    http::RawClient client(server->port());
    client.Send(RequestText("POST", path, body, headers));
    return ParseReply(client.ReadToClose());
  }
  // A chat whose only message is "Hi", with more fields: `, "key": value …`.
  static std::string ChatBody(const std::string& fields = "") {
    return R"({"messages":[{"role":"user","content":"Hi"}])" + fields + "}";
  }
  Reply Chat(const std::string& fields = "") const {
    return Post("/v1/chat/completions", ChatBody(fields));
  }
  std::vector<json::Value> ChatStream(const std::string& fields = "") const {
    return StreamOf("/v1/chat/completions", ChatBody(R"(,"stream":true)" + fields));
  }
  // The chunks of a stream; the last event must be [DONE].
  std::vector<json::Value> StreamOf(const std::string& path, const std::string& body) const {
    const Reply reply = Post(path, body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    std::vector<std::string> events = Events(reply.body);
    EXPECT_FALSE(events.empty());
    if (events.empty()) return {};
    EXPECT_EQ(events.back(), "[DONE]");
    events.pop_back();
    std::vector<json::Value> chunks;
    for (const std::string& event : events) chunks.push_back(*json::Parse(event));
    return chunks;
  }

  MetricsRegistry metrics;
  ScriptedEngine engine;
  std::unique_ptr<ApiServer> server;
};

}  // namespace fathom::api
