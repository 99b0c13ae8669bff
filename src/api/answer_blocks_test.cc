#include "api/answer_blocks.h"

#include <gtest/gtest.h>

namespace fathom::api {
namespace {

using Kind = AnswerBlock::Kind;

// Parses `text` in pieces of `step` bytes; every block as "kind:text" (a call's with its name), and
// what was announced must be what stays.
class Seen final : public AnswerBlocks::Listener {
 public:
  Seen(const std::string& text, size_t step, bool is_natural = true, bool with_reasoning = true)
      : blocks(this, with_reasoning) {
    text::ToolCallParser parser({.in_reasoning = true, .tools = {}});
    for (size_t at = 0; at < text.size(); at += step) {
      std::vector<text::OutputEvent> events;
      parser.Push(std::string_view(text).substr(at, step), &events);
      blocks.Add(events);
    }
    std::vector<text::OutputEvent> events;
    parser.Finish(is_natural, &events);
    blocks.Add(events);
    blocks.Finish();
  }
  void OnBlockBegin(size_t idx, const AnswerBlock& block) override {
    EXPECT_EQ(idx, out.size()) << "blocks follow one another";
    EXPECT_FALSE(open);
    EXPECT_EQ(block.text, "");
    open = true;
    const char* names[] = {"reasoning", "text", "call "};
    out.push_back(names[static_cast<int>(block.kind)] + block.name + ":");
  }
  void OnBlockText(size_t idx, const AnswerBlock&, const std::string& piece) override {
    EXPECT_TRUE(open);
    EXPECT_FALSE(piece.empty());
    out[idx] += piece;
  }
  void OnBlockEnd(size_t idx, const AnswerBlock& block) override {
    EXPECT_TRUE(out[idx].ends_with(":" + block.text));
    open = false;
    if (!block.is_complete) out[idx] += " (cut)";
  }

  std::vector<std::string> out;
  bool open = false;
  AnswerBlocks blocks;
};

std::vector<std::string> Blocks(const std::string& text, bool is_natural = true,
                                bool with_reasoning = true) {
  const std::vector<std::string> whole =
      Seen(text, text.size() + 1, is_natural, with_reasoning).out;
  for (const size_t step : {1, 2, 5, 13}) {
    EXPECT_EQ(Seen(text, step, is_natural, with_reasoning).out, whole) << "in pieces of " << step;
  }
  return whole;
}

const std::string kCall =
    "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"x\" "
    "string=\"true\">a</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

TEST(AnswerBlocks, FollowOneAnother) {
  EXPECT_EQ(Blocks("Hm.</think>So:" + kCall),
            (std::vector<std::string>{"reasoning:Hm.", "text:So:", "call f:{\"x\": \"a\"}"}));
  EXPECT_EQ(Blocks("</think>So:" + kCall + "After" + kCall),
            (std::vector<std::string>{"text:So:", "call f:{\"x\": \"a\"}", "text:After",
                                      "call f:{\"x\": \"a\"}"}));
}

TEST(AnswerBlocks, AreNotMadeOfWhiteSpaceAlone) {
  EXPECT_EQ(Blocks("Hm.</think>\n\n \n" + kCall),
            (std::vector<std::string>{"reasoning:Hm.", "call f:{\"x\": \"a\"}"}));
  EXPECT_EQ(Blocks("Hm.</think>\n\n"), std::vector<std::string>{"reasoning:Hm."});
  EXPECT_EQ(Blocks("Hm.</think>\n\n a \n"),
            (std::vector<std::string>{"reasoning:Hm.", "text:\n\n a \n"}));
}

TEST(AnswerBlocks, AreNeverNone) {
  EXPECT_EQ(Blocks(""), std::vector<std::string>{"text:"});
  EXPECT_EQ(Blocks("Hm.</think>", true, false), std::vector<std::string>{"text:"});
}

TEST(AnswerBlocks, TellACallThatWasCut) {
  EXPECT_EQ(Blocks("</think>" + kCall.substr(0, kCall.find("</｜DSML｜parameter>")), false),
            std::vector<std::string>{"call f:{\"x\": \"a (cut)"});
}

}  // namespace
}  // namespace fathom::api
