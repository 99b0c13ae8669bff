#include "http/router.h"

#include <gtest/gtest.h>

namespace fathom::http {
namespace {

class RouterTest : public testing::Test {
 protected:
  RouterTest() {
    for (const char* pattern : {"/", "/v1/models", "/v1/models/*"}) {
      router_.Add("GET", pattern, [](Request, std::shared_ptr<ResponseWriter>) {});
    }
    router_.Add("POST", "/v1/models", [](Request, std::shared_ptr<ResponseWriter>) {});
  }
  // The pattern that `target` finds, or "none".
  std::string Find(const std::string& target) {
    request_ = {};
    if (!SplitTarget(target, &request_.path, &request_.query)) return "malformed";
    const Router::Route* route = router_.Find(&request_);
    return route ? route->pattern : "none";
  }

  Router router_;
  Request request_;
};

TEST_F(RouterTest, FindsExactPathsWhateverTheSlashesAndTheQuery) {
  EXPECT_EQ(Find("/"), "/");
  EXPECT_EQ(Find("//"), "/");
  EXPECT_EQ(Find("/v1/models"), "/v1/models");
  EXPECT_EQ(Find("//v1//models/?beta=true"), "/v1/models");
  EXPECT_EQ(request_.query, "beta=true");
  EXPECT_EQ(Find("/v2/models"), "none");
  EXPECT_EQ(Find("v1/models"), "malformed");
}

TEST_F(RouterTest, GivesTheTailOfAPrefixDecoded) {
  EXPECT_EQ(Find("/v1/models/deepseek-ai/DeepSeek-V4"), "/v1/models/*");
  EXPECT_EQ(request_.path_tail, "deepseek-ai/DeepSeek-V4");
  EXPECT_EQ(Find("/v1/models/deepseek-ai%2FDeepSeek%zz"), "/v1/models/*");
  EXPECT_EQ(request_.path_tail, "deepseek-ai/DeepSeek%zz");
}

TEST_F(RouterTest, KnowsTheMethods) {
  Find("/v1/models");
  const Router::Route* route = router_.Find(&request_);
  EXPECT_NE(route->FindHandler("HEAD"), nullptr);
  EXPECT_EQ(route->FindHandler("DELETE"), nullptr);
  EXPECT_EQ(route->AllowedMethods(), "OPTIONS, GET, HEAD, POST");
}

}  // namespace
}  // namespace fathom::http
