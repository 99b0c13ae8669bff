#include "api/responses/response_store.h"

#include <gtest/gtest.h>

namespace fathom::api::responses {
namespace {

using json::Value;

StoredResponse Stored(const std::string& item_id, const std::string& text = "x") {
  const std::string item = R"([{"id":")" + item_id + R"(","text":")" + text + "\"}]";
  StoredResponse stored;
  stored.input = Value::Array();
  stored.response = Value::Object({{"output", *json::Parse(item)}});
  return stored;
}

TEST(ResponseStore, FindsResponsesAndItemsWithinTheirScope) {
  ResponseStore store(1 << 20);
  store.Put("alice", "resp_1", Stored("msg_1"));
  EXPECT_NE(store.Find("alice", "resp_1"), nullptr);
  EXPECT_EQ(store.Find("bob", "resp_1"), nullptr);
  EXPECT_EQ(store.FindItem("alice", "msg_1").Find("text")->AsString(), "x");
  EXPECT_TRUE(store.FindItem("bob", "msg_1").is_null());
  EXPECT_TRUE(store.FindItem("alice", "msg_2").is_null());
}

TEST(ResponseStore, ForgetsAResponseWithItsItems) {
  ResponseStore store(1 << 20);
  store.Put("s", "resp_1", Stored("msg_1"));
  EXPECT_TRUE(store.Delete("s", "resp_1"));
  EXPECT_FALSE(store.Delete("s", "resp_1"));
  EXPECT_EQ(store.Find("s", "resp_1"), nullptr);
  EXPECT_TRUE(store.FindItem("s", "msg_1").is_null());
}

TEST(ResponseStore, ForgetsTheLeastRecentlyUsedWhenItIsFull) {
  ResponseStore store(40'000);
  const std::string text(10'000, 'x');
  for (const char* n : {"1", "2", "3"})
    store.Put("s", std::string("resp_") + n, Stored(std::string("msg_") + n, text));
  EXPECT_NE(store.Find("s", "resp_1"), nullptr);
  store.Put("s", "resp_4", Stored("msg_4", text));
  EXPECT_NE(store.Find("s", "resp_1"), nullptr);
  EXPECT_EQ(store.Find("s", "resp_2"), nullptr);
  EXPECT_TRUE(store.FindItem("s", "msg_2").is_null());
  store.Put("s", "resp_5", Stored("msg_5", std::string(100'000, 'x')));
  EXPECT_EQ(store.Find("s", "resp_5"), nullptr) << "larger than the store";
  EXPECT_NE(store.Find("s", "resp_4"), nullptr);
}

TEST(ResponseStore, KeepsAnItemThatALaterResponseNamesAgain) {
  ResponseStore store(1 << 20);
  store.Put("s", "resp_1", Stored("msg_1", "old"));
  store.Put("s", "resp_2", Stored("msg_1", "new"));
  store.Delete("s", "resp_1");
  EXPECT_EQ(store.FindItem("s", "msg_1").Find("text")->AsString(), "new");
}

}  // namespace
}  // namespace fathom::api::responses
