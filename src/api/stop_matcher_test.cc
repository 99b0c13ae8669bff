#include "api/stop_matcher.h"

#include <gtest/gtest.h>

namespace fathom::api {
namespace {

struct Outcome {
  std::string text;
  std::string stop;
  bool operator==(const Outcome&) const = default;
};

// What comes out when `text` is pushed in two parts at every place, and byte by byte; all must
// agree.
Outcome Match(const std::vector<std::string>& stops, const std::string& text,
              bool include = false) {
  const auto run = [&](const std::vector<std::string>& parts) {
    StopMatcher matcher(stops, include);
    Outcome outcome;
    for (const std::string& part : parts) outcome.text += matcher.Push(part);
    if (!matcher.matched()) outcome.text += matcher.Flush();
    outcome.stop = matcher.matched().value_or("");
    return outcome;
  };
  const Outcome whole = run({text});
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(run({text.substr(0, cut), text.substr(cut)}), whole) << "cut at " << cut;
  }
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  EXPECT_EQ(run(bytes), whole) << "byte by byte";
  return whole;
}

TEST(StopMatcher, TrimsTheTextAtTheMatch) {
  EXPECT_EQ(Match({"END"}, "onENDtwo"), (Outcome{"on", "END"}));
  EXPECT_EQ(Match({"END"}, "no match EN"), (Outcome{"no match EN", ""}));
  EXPECT_EQ(Match({}, "abc"), (Outcome{"abc", ""}));
}

TEST(StopMatcher, FindsAMatchThatBeginsInsideAFailedOne) {
  EXPECT_EQ(Match({"ab"}, "aab"), (Outcome{"a", "ab"}));
  EXPECT_EQ(Match({"aabaaa"}, "aabaabaaab"), (Outcome{"aab", "aabaaa"}));
}

TEST(StopMatcher, TakesTheMatchThatEndsFirstAndOfThoseTheLongest) {
  EXPECT_EQ(Match({"abcd", "bc"}, "xabcd"), (Outcome{"xa", "bc"}));
  EXPECT_EQ(Match({"c", "abc"}, "xabcd"), (Outcome{"x", "abc"}));
}

TEST(StopMatcher, KeepsTheMatchWhenToldTo) {
  EXPECT_EQ(Match({"END"}, "onENDtwo", true), (Outcome{"onEND", "END"}));
}

TEST(StopMatcher, MatchesCharactersOfManyBytes) {
  EXPECT_EQ(Match({"。"}, "你好。再见"), (Outcome{"你好", "。"}));
}

TEST(StopMatcher, HoldsBackNoMoreThanItMust) {
  StopMatcher matcher({"STOP", "\n\n"}, false);
  EXPECT_EQ(matcher.Push("a\n"), "a");
  EXPECT_EQ(matcher.Push("b"), "\nb");
  EXPECT_EQ(matcher.Push("ST"), "");
  EXPECT_EQ(matcher.Push("S"), "ST");
  EXPECT_EQ(matcher.Push("TOP more"), "");
  EXPECT_EQ(matcher.matched(), "STOP");
  EXPECT_EQ(matcher.Push("later"), "");
}

TEST(StopMatcher, LetsGoWhenItIsToldNotToLook) {
  StopMatcher matcher({"ab"}, false);
  EXPECT_EQ(matcher.Push("a"), "");
  EXPECT_EQ(matcher.PushUnmatched("b"), "ab");
  EXPECT_EQ(matcher.Push("ab"), "");
  EXPECT_EQ(matcher.matched(), "ab");
}

}  // namespace
}  // namespace fathom::api
