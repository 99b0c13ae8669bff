#include "text/reasoning_splitter.h"

#include <gtest/gtest.h>

#include <vector>

namespace fathom::text {
namespace {

using Parts = std::vector<std::string>;

SplitText Split(const Parts& parts, bool in_reasoning) {
  ReasoningSplitter splitter(in_reasoning);
  SplitText all;
  const auto add = [&all](const SplitText& text) {
    all.reasoning += text.reasoning;
    all.content += text.content;
  };
  for (const std::string& part : parts) add(splitter.Push(part));
  add(splitter.Flush());
  return all;
}

TEST(ReasoningSplitter, ReasoningEndsAtItsTag) {
  const SplitText text = Split({"R</think>A"}, true);
  EXPECT_EQ(text.reasoning, "R");
  EXPECT_EQ(text.content, "A");
}

TEST(ReasoningSplitter, ChatModeIsAllContent) {
  const SplitText text = Split({"A"}, false);
  EXPECT_EQ(text.reasoning, "");
  EXPECT_EQ(text.content, "A");
}

TEST(ReasoningSplitter, CutInsideThinkingLeavesReasoningOnly) {
  const SplitText text = Split({"R and </thi"}, true);
  EXPECT_EQ(text.reasoning, "R and </thi");
  EXPECT_EQ(text.content, "");
}

TEST(ReasoningSplitter, KeepsWhitespaceAroundTheTag) {
  const SplitText text = Split({"R\n", "</think>\n\nA\n"}, true);
  EXPECT_EQ(text.reasoning, "R\n");
  EXPECT_EQ(text.content, "\n\nA\n");
}

TEST(ReasoningSplitter, StrayAndRepeatedTagsAreSwallowed) {
  EXPECT_EQ(Split({"<think>R"}, true).reasoning, "R");
  EXPECT_EQ(Split({"a</think>b"}, false).content, "ab");
  const SplitText reopened = Split({"a<think>b</think>c"}, false);
  EXPECT_EQ(reopened.reasoning, "b");
  EXPECT_EQ(reopened.content, "ac");
}

TEST(ReasoningSplitter, TextThatIsNoTagIsReleasedAtOnce) {
  ReasoningSplitter splitter(false);
  EXPECT_EQ(splitter.Push("a <").content, "a ");
  EXPECT_EQ(splitter.Push(" b").content, "< b");
  EXPECT_EQ(splitter.Push("</thin").content, "");
  EXPECT_EQ(splitter.Push("g>").content, "</thing>");
  EXPECT_EQ(splitter.Push("<<").content, "<");
  EXPECT_EQ(splitter.Flush().content, "<");
}

TEST(ReasoningSplitter, TheSameForEverySplit) {
  const std::string text = "r<</think</think>a<b<think>x</think></think>中<think";
  const SplitText whole = Split({text}, true);
  EXPECT_EQ(whole.reasoning, "r<</thinkx");
  EXPECT_EQ(whole.content, "a<b中<think");
  for (size_t i = 0; i <= text.size(); ++i) {
    for (size_t j = i; j <= text.size(); ++j) {
      const SplitText cut = Split({text.substr(0, i), text.substr(i, j - i), text.substr(j)}, true);
      EXPECT_EQ(cut.reasoning, whole.reasoning) << i << " " << j;
      EXPECT_EQ(cut.content, whole.content) << i << " " << j;
    }
  }
}

}  // namespace
}  // namespace fathom::text
