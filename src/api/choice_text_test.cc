#include "api/choice_text.h"

#include <gtest/gtest.h>

#include "api/test_tokenizer.h"

namespace fathom::api {
namespace {

using request::FinishReason;
using request::TokenEvent;

// What a client sees of a whole answer.
struct Seen {
  text::OutputMessage message;
  ChoiceFinish finish;
  int num_tokens = 0;
  int num_reasoning_tokens = 0;
};

const text::ToolCallParser::Options kThinking{.in_reasoning = true, .tools = {}};
const text::ToolCallParser::Options kChat{.tools = {}};

std::string ContentOf(const ChoiceDelta& delta) {
  text::OutputMessage message;
  message.Add(delta.events);
  return message.content;
}

TokenEvent Event(std::vector<int32_t> ids) {
  TokenEvent event;
  event.token_ids = std::move(ids);
  return event;
}

// Sends `ids` in events of `step` tokens, then end-of-text. Whatever the step, the same is seen.
Seen Send(const ChoiceText::Options& options, const std::vector<int32_t>& ids, size_t step) {
  ChoiceText text(TestTokenizer(), options);
  Seen seen;
  const auto push = [&](TokenEvent event) {
    ChoiceDelta delta = text.Push(std::move(event));
    seen.message.Add(delta.events);
    if (delta.finish) seen.finish = *delta.finish;
    return delta.finish.has_value();
  };
  bool over = false;
  for (size_t i = 0; i < ids.size() && !over; i += step) {
    over = push(Event({ids.begin() + static_cast<std::ptrdiff_t>(i),
                       ids.begin() + static_cast<std::ptrdiff_t>(std::min(i + step, ids.size()))}));
  }
  if (!over) {
    TokenEvent end = Event({TestSpecialTokens().eos});
    end.finish_reason = FinishReason::kStop;
    end.stop_token_id = TestSpecialTokens().eos;
    EXPECT_TRUE(push(std::move(end)));
  }
  seen.num_tokens = text.num_tokens();
  seen.num_reasoning_tokens = text.num_reasoning_tokens();
  return seen;
}

Seen SendAllWays(const ChoiceText::Options& options, const std::string& text) {
  const std::vector<int32_t> ids = Ids(text);
  const Seen first = Send(options, ids, 1);
  for (size_t step = 2; step <= ids.size(); ++step) {
    const Seen again = Send(options, ids, step);
    EXPECT_EQ(again.message.reasoning, first.message.reasoning) << "in events of " << step;
    EXPECT_EQ(again.message.content, first.message.content) << "in events of " << step;
    EXPECT_EQ(again.num_tokens, first.num_tokens) << "in events of " << step;
  }
  return first;
}

TEST(ChoiceText, SplitsReasoningFromContent) {
  const Seen seen = SendAllWays({.parser = kThinking}, "I think.</think>Hello");
  EXPECT_EQ(seen.message.reasoning, "I think.");
  EXPECT_EQ(seen.message.content, "Hello");
  EXPECT_EQ(seen.num_reasoning_tokens, static_cast<int>(Ids("I think.").size()));
  EXPECT_FALSE(seen.finish.stop_string);
}

TEST(ChoiceText, LeavesTagsOfATextCompletionAlone) {
  EXPECT_EQ(SendAllWays({}, "a</think>b").message.content, "a</think>b");
}

TEST(ChoiceText, EndsAtAStopStringAndCountsNothingBehindIt) {
  const Seen seen = SendAllWays({.stop = {"END"}}, "one END two three");
  EXPECT_EQ(seen.message.content, "one ");
  EXPECT_EQ(seen.finish.stop_string, "END");
  EXPECT_LE(seen.num_tokens, static_cast<int>(Ids("one END ").size()));
}

TEST(ChoiceText, LooksForStopStringsInTheContentOnly) {
  const Seen seen = SendAllWays({.parser = kThinking, .stop = {"x"}}, "axb</think>cxd");
  EXPECT_EQ(seen.message.reasoning, "axb");
  EXPECT_EQ(seen.message.content, "c");
}

TEST(ChoiceText, KeepsTheStopStringWhenAsked) {
  EXPECT_EQ(
      SendAllWays({.stop = {"END"}, .include_stop_string = true}, "one END two").message.content,
      "one END");
}

TEST(ChoiceText, LetsNoStopStringEndItBeforeTheLeastLength) {
  const std::vector<int32_t> ids = Ids("a. b. c.");
  EXPECT_EQ(Send({.stop = {"."}, .min_tokens = 2}, ids, 1).message.content, "a. b");
}

TEST(ChoiceText, HidesControlTokens) {
  const text::SpecialTokens special = TestSpecialTokens();
  std::vector<int32_t> ids = Ids("a");
  ids.push_back(special.eos);
  ids.push_back(special.user);
  for (const int32_t id : Ids("b")) ids.push_back(id);
  EXPECT_EQ(Send({.hidden_ids = {special.eos, special.user}}, ids, 1).message.content, "ab");
  EXPECT_EQ(Send({}, ids, 1).message.content, "a<｜end▁of▁sentence｜><｜User｜>b");
}

TEST(ChoiceText, GivesWholeCharactersOnly) {
  const std::vector<int32_t> ids = Ids("a😀b");
  ASSERT_GT(ids.size(), 3u) << "the emoji should be several tokens";
  ChoiceText text(TestTokenizer(), {});
  std::string all;
  for (const int32_t id : ids) {
    const std::string delta = ContentOf(text.Push(Event({id})));
    EXPECT_EQ(delta, text::SanitizeUtf8(delta, nullptr));
    all += delta;
  }
  EXPECT_EQ(all, "a😀b");
}

TEST(ChoiceText, ShowsAnIncompleteCharacterAtTheEndOnce) {
  std::vector<int32_t> ids = Ids("😀");
  ids.pop_back();
  EXPECT_EQ(Send({}, ids, 1).message.content, "\uFFFD");
}

TEST(ChoiceText, ReleasesWhatWasHeldBackAtTheEnd) {
  EXPECT_EQ(SendAllWays({.parser = kChat, .stop = {"abcd"}}, "xabc").message.content, "xabc");
  EXPECT_EQ(SendAllWays({.parser = kChat}, "x</thi").message.content, "x</thi");
}

TEST(ChoiceText, TellsLengthFromStop) {
  ChoiceText text(TestTokenizer(), {});
  TokenEvent event = Event(Ids("a"));
  event.finish_reason = FinishReason::kLength;
  const ChoiceDelta delta = text.Push(std::move(event));
  EXPECT_TRUE(delta.finish->is_length);
  EXPECT_EQ(ContentOf(delta), "a");
}

}  // namespace
}  // namespace fathom::api
