#include "runtime/logit_edits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace fathom::runtime {
namespace {

using testing::ElementsAre;

constexpr float kOut = -std::numeric_limits<float>::infinity();
constexpr int32_t kEos = 1;

struct Edited {
  Status status;
  std::vector<float> logits;
};

Edited Edit(const request::SamplingParams& params, std::vector<float> logits,
            std::vector<int32_t> prompt = {}, std::vector<int32_t> output = {},
            std::vector<uint32_t> mask = {}) {
  std::vector<int32_t> counts(logits.size());
  const std::vector<int32_t> eos = {kEos};
  const Status status = EditLogits(params, {prompt, output}, eos, mask, logits, counts);
  EXPECT_EQ(std::count(counts.begin(), counts.end(), 0), static_cast<int64_t>(counts.size()));
  return {status, logits};
}

TEST(LogitEdits, DefaultsEditNothing) {
  request::SamplingParams params;
  EXPECT_TRUE(EditsNothing(params, 0));
  params.min_tokens = 3;
  EXPECT_FALSE(EditsNothing(params, 2));
  EXPECT_TRUE(EditsNothing(params, 3));
}

TEST(LogitEdits, AllowedTokenIdsRuleOutTheRest) {
  request::SamplingParams params;
  params.allowed_token_ids = {3, 1, 99};
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}).logits, ElementsAre(kOut, 6, kOut, 8));
}

TEST(LogitEdits, TheGrammarsMaskRulesOutTheRest) {
  std::vector<float> logits(40, 1.0f);
  const auto edited = Edit({}, logits, {}, {}, {0x5u, 0x80u});
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(edited.logits[i], i == 0 || i == 2 || i == 39 ? 1.0f : kOut) << i;
  }
}

TEST(LogitEdits, BadWordsRuleOutTheTokenThatWouldCompleteThem) {
  request::SamplingParams params;
  params.bad_words = {{0}, {2, 3}, {2, 2, 1}, {}};
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}, {2}, {}).logits, ElementsAre(kOut, 6, 7, 8));
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}, {}, {0, 2}).logits, ElementsAre(kOut, 6, 7, kOut));
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}, {}, {2, 2}).logits, ElementsAre(kOut, kOut, 7, kOut));
}

TEST(LogitEdits, LogitBiasIsAdded) {
  request::SamplingParams params;
  params.logit_bias = {{0, -100.0f}, {2, 1.5f}, {77, 1.0f}};
  EXPECT_THAT(Edit(params, {5, 6, 7}).logits, ElementsAre(-95, 6, 8.5f));
}

TEST(LogitEdits, MinTokensRuleOutEndAndStopIdsUntilThere) {
  request::SamplingParams params;
  params.min_tokens = 2;
  params.stop_token_ids = {3, kEos};
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}, {0}, {2}).logits, ElementsAre(5, kOut, 7, kOut));
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}, {0}, {2, 2}).logits, ElementsAre(5, 6, 7, 8));
  params.ignore_eos = true;  // then no id stops
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}, {0}, {}).logits, ElementsAre(5, 6, 7, 8));
}

TEST(LogitEdits, MinTokensGiveWayToAGrammarThatAllowsOnlyTheEnd) {
  request::SamplingParams params;
  params.min_tokens = 2;
  params.stop_token_ids = {kEos};
  EXPECT_THAT(Edit(params, {5, 6, 7, 8}, {}, {}, {1u << kEos}).logits,
              ElementsAre(kOut, 6, kOut, kOut));
}

TEST(LogitEdits, RepetitionPenaltyTakesEachTokenOfPromptAndOutputOnce) {
  request::SamplingParams params;
  params.repetition_penalty = 2;
  EXPECT_THAT(Edit(params, {4, -4, 4, 0}, {0, 1}, {1, 0, 0}).logits, ElementsAre(2, -8, 4, 0));
}

TEST(LogitEdits, FrequencyPenaltyCountsTheOutputAndPresencePenaltyLooks) {
  request::SamplingParams params;
  params.frequency_penalty = 0.5;
  params.presence_penalty = 1;
  EXPECT_THAT(Edit(params, {4, 4, 4, 4}, {3, 3}, {0, 1, 0}).logits, ElementsAre(2, 2.5f, 4, 4));
}

TEST(LogitEdits, RulingOutAllIsTheRequestsError) {
  request::SamplingParams params;
  params.allowed_token_ids = {2};
  params.bad_words = {{2}};
  EXPECT_EQ(Edit(params, {5, 6, 7, 8}).status.code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace fathom::runtime
