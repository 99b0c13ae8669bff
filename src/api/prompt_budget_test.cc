#include "api/prompt_budget.h"

#include <gtest/gtest.h>

namespace fathom::api {
namespace {

TEST(PromptBudget, GivesWhatIsAskedOrWhatTheContextLeaves) {
  std::vector<int32_t> prompt(10, 1);
  EXPECT_EQ(*FitPrompt({.max_tokens = 5, .max_model_len = 100}, &prompt), 5);
  EXPECT_EQ(*FitPrompt({.max_model_len = 100}, &prompt), 90);
  EXPECT_EQ(*FitPrompt({.default_max_tokens = 16, .max_model_len = 100}, &prompt), 16);
  EXPECT_EQ(*FitPrompt({.max_tokens = 95, .max_model_len = 100}, &prompt), 90);
  EXPECT_EQ(*FitPrompt({.max_tokens = 95, .max_model_len = 11}, &prompt), 1);
}

TEST(PromptBudget, RefusesAPromptThatFillsTheContext) {
  std::vector<int32_t> prompt(100, 1);
  const Parsed<int> result = FitPrompt({.max_tokens = 7, .max_model_len = 100}, &prompt);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().message,
            "This model's maximum context length is 100 tokens. However, you requested 107 tokens "
            "(100 in "
            "the messages, 7 in the completion). Please reduce the length of the messages or "
            "completion.");
  EXPECT_EQ(result.error().param, "messages");
  EXPECT_EQ(result.error().code, "context_length_exceeded");
}

TEST(PromptBudget, KeepsTheEndOfAPromptThatMayBeCut) {
  std::vector<int32_t> prompt = {1, 2, 3, 4, 5};
  EXPECT_EQ(*FitPrompt({.truncate_prompt_tokens = 2, .max_model_len = 10}, &prompt), 8);
  EXPECT_EQ(prompt, (std::vector<int32_t>{4, 5}));
  prompt = {1, 2, 3, 4, 5};
  EXPECT_EQ(*FitPrompt({.truncate_prompt_tokens = -1, .max_model_len = 4}, &prompt), 1);
  EXPECT_EQ(prompt, (std::vector<int32_t>{3, 4, 5}));
}

}  // namespace
}  // namespace fathom::api
