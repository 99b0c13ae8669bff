#include "api/thinking_mode.h"

#include <gtest/gtest.h>

namespace fathom::api {
namespace {

using text::Effort;
using text::EffortProfile;
using text::ThinkingMode;

// "chat", "think" and the effort, or the error's text.
std::string Read(const std::string& request, const std::string& defaults = "{}",
                 EffortProfile profile = EffortProfile::kOfficial) {
  const json::Value object = *json::Parse(request);
  const json::Value default_kwargs = *json::Parse(defaults);
  FieldReader fields(object);
  const ThinkingChoice choice = ReadThinking(&fields, default_kwargs, profile);
  if (!fields.ok()) return fields.error()->message;
  if (choice.mode == ThinkingMode::kChat) return "chat";
  switch (choice.effort) {
    case Effort::kUnset:
      return "think";
    case Effort::kLow:
      return "think low";
    case Effort::kHigh:
      return "think high";
    case Effort::kMax:
      return "think max";
  }
  return "";
}

TEST(ThinkingMode, IsOffUnlessSomethingTurnsItOn) {
  EXPECT_EQ(Read("{}"), "chat");
  EXPECT_EQ(Read("{}", R"({"thinking":true})"), "think");
  EXPECT_EQ(Read("{}", R"({"thinking":true,"reasoning_effort":"max"})"), "think max");
  EXPECT_EQ(Read("{}", R"({"reasoning_effort":"max"})"), "chat");
}

TEST(ThinkingMode, FollowsTheMostExplicitSource) {
  EXPECT_EQ(Read(R"({"thinking":{"type":"enabled"}})"), "think");
  EXPECT_EQ(Read(R"({"thinking":{"type":"adaptive"}})"), "think");
  EXPECT_EQ(Read(R"({"thinking":{"type":"disabled"},"reasoning_effort":"high"})"), "chat");
  EXPECT_EQ(Read(R"({"thinking":{"type":"disabled"},"chat_template_kwargs":{"thinking":true}})"),
            "chat");
  EXPECT_EQ(Read(R"({"chat_template_kwargs":{"thinking":true}})"), "think");
  EXPECT_EQ(Read(R"({"chat_template_kwargs":{"enable_thinking":true,"thinking":false}})"), "think");
  EXPECT_EQ(Read(R"({"chat_template_kwargs":{"thinking":false}})", R"({"thinking":true})"), "chat");
  EXPECT_EQ(Read(R"({"chat_template_kwargs":{"thinking":false},"reasoning_effort":"high"})"),
            "chat");
  EXPECT_EQ(Read(R"({"reasoning_effort":"high"})"), "think high");
  EXPECT_EQ(Read(R"({"reasoning_effort":"none"})", R"({"thinking":true})"), "chat");
  EXPECT_EQ(Read(R"({"thinking":{"type":"enabled"},"reasoning_effort":"none"})"), "chat");
}

TEST(ThinkingMode, MapsEffortsByProfile) {
  const char* names[] = {"minimal", "low", "medium", "high", "xhigh", "max", "ultra"};
  const char* official[] = {"think low",  "think low", "think high", "think high",
                            "think high", "think max", "think max"};
  const char* preview[] = {"think high", "think high", "think high", "think high",
                           "think max",  "think max",  "think max"};
  for (size_t i = 0; i < std::size(names); ++i) {
    const std::string request = R"({"reasoning_effort":")" + std::string(names[i]) + "\"}";
    EXPECT_EQ(Read(request, "{}", EffortProfile::kOfficial), official[i]);
    EXPECT_EQ(Read(request, "{}", EffortProfile::kPreview), preview[i]);
  }
  EXPECT_EQ(Read(R"({"chat_template_kwargs":{"thinking":true,"reasoning_effort":"max"}})"),
            "think max");
}

TEST(ThinkingMode, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(Read(R"({"reasoning_effort":"banana"})"),
            "reasoning_effort must be none, minimal, low, medium, high, xhigh, max or ultra, got "
            "\"banana\"");
  EXPECT_EQ(Read(R"({"thinking":{"type":"bogus"}})"),
            "thinking.type must be enabled, adaptive or disabled");
  EXPECT_EQ(Read(R"({"thinking":true})"), "thinking must be an object, got true");
  EXPECT_EQ(Read(R"({"chat_template_kwargs":{"thinking":"yes"}})"),
            "chat_template_kwargs.thinking must be true or false, got \"yes\"");
  EXPECT_TRUE(ValidateThinkingDefaults(*json::Parse(R"({"reasoning_effort":"x"})"),
                                       EffortProfile::kPreview));
  EXPECT_FALSE(ValidateThinkingDefaults(*json::Parse(R"({"thinking":true,"custom":1})"),
                                        EffortProfile::kPreview));
}

}  // namespace
}  // namespace fathom::api
