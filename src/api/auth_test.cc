#include "api/auth.h"

#include <gtest/gtest.h>

namespace fathom::api {
namespace {

bool Allows(const ApiKeys& keys, std::vector<http::Header> headers) {
  http::Request request;
  request.headers = std::move(headers);
  return keys.Allow(request);
}

TEST(ApiKeys, LetsEverythingPassWhenNoneIsSet) { EXPECT_TRUE(Allows(ApiKeys({}), {})); }

TEST(ApiKeys, TakesAnyOfTheKeysInEitherHeader) {
  const ApiKeys keys({"one", "two"});
  EXPECT_TRUE(Allows(keys, {{"Authorization", "Bearer one"}}));
  EXPECT_TRUE(Allows(keys, {{"authorization", "bearer two"}}));
  EXPECT_TRUE(Allows(keys, {{"X-Api-Key", "two"}}));
  EXPECT_FALSE(Allows(keys, {}));
  EXPECT_FALSE(Allows(keys, {{"x-api-key", ""}}));
  EXPECT_FALSE(Allows(keys, {{"x-api-key", "on"}}));
  EXPECT_FALSE(Allows(keys, {{"Authorization", "Bearer one "}}));
  EXPECT_FALSE(Allows(keys, {{"Authorization", "Basic one"}}));
}

TEST(ApiKeys, AnEmptyKeyOpensNothing) {
  const ApiKeys keys({""});
  EXPECT_FALSE(Allows(keys, {}));
  EXPECT_FALSE(Allows(keys, {{"x-api-key", ""}}));
  EXPECT_FALSE(Allows(keys, {{"Authorization", "Bearer "}}));
}

TEST(ApiKeys, LooksAtAuthorizationFirst) {
  const ApiKeys keys({"one"});
  EXPECT_FALSE(Allows(keys, {{"Authorization", "Bearer wrong"}, {"x-api-key", "one"}}));
}

}  // namespace
}  // namespace fathom::api
