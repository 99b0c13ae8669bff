#include "runtime/grammar_masks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>

namespace fathom::runtime {
namespace {

constexpr int kVocab = 70;  // three words

// Allows the token after the last; everything after token 60. Refuses 13, breaks at 14.
class Counting final : public request::TokenConstraint {
 public:
  bool FillNextTokenMask(std::span<uint32_t> mask) override {
    const size_t next = accepted.empty() ? 0 : static_cast<size_t>(accepted.back()) + 1;
    if (next == 15) throw std::runtime_error("broken grammar");
    if (next == 61) return false;
    mask[next / 32] |= 1u << (next % 32);
    return true;
  }
  bool AcceptToken(int32_t token_id) override {
    if (token_id == 13) return false;
    accepted.push_back(token_id);
    return true;
  }
  void Rollback(int num_tokens) override {
    accepted.resize(accepted.size() - static_cast<size_t>(num_tokens));
  }
  int num_accepted() const override { return static_cast<int>(accepted.size()); }
  std::vector<int32_t> accepted;
};

class GrammarMasksTest : public testing::TestWithParam<int> {
 protected:
  GrammarMasks masks_{kVocab, GetParam()};

  GrammarMasks::Mask One(Counting& constraint, const std::vector<int32_t>& output) {
    const GrammarMasks::Sequence sequence{&constraint, output};
    masks_.Start({&sequence, 1});
    return masks_.Wait()[0];
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, GrammarMasksTest, testing::Values(1, 4));

TEST_P(GrammarMasksTest, FollowsTheOutputBeforeItFills) {
  Counting constraint;
  EXPECT_THAT(One(constraint, {}).words, testing::ElementsAre(1u, 0u, 0u));
  EXPECT_THAT(One(constraint, {31}).words, testing::ElementsAre(0u, 1u, 0u));
  EXPECT_THAT(One(constraint, {31, 5, 40}).words, testing::ElementsAre(0u, 1u << 9, 0u));
  EXPECT_THAT(constraint.accepted, testing::ElementsAre(31, 5, 40));
}

TEST_P(GrammarMasksTest, TakesBackWhatIsNoLongerOutput) {
  Counting constraint;
  for (const int32_t draft : {1, 2, 3}) constraint.AcceptToken(draft);
  EXPECT_THAT(One(constraint, {1}).words, testing::ElementsAre(4u, 0u, 0u));
}

TEST_P(GrammarMasksTest, HasNoMaskWhereAllIsAllowed) {
  Counting constraint;
  const auto mask = One(constraint, {60});
  EXPECT_TRUE(mask.status.ok());
  EXPECT_TRUE(mask.words.empty());
}

TEST_P(GrammarMasksTest, FailsOneSequenceOnly) {
  Counting refusing, breaking, well;
  const std::vector<int32_t> refused = {1, 13}, broken = {14}, fine = {7};
  const std::vector<GrammarMasks::Sequence> sequences = {
      {&refusing, refused}, {nullptr, {}}, {&breaking, broken}, {&well, fine}};
  masks_.Start(sequences);
  const auto masks = masks_.Wait();
  EXPECT_EQ(masks[0].status.message(), "the output's grammar refuses a token that it had allowed");
  EXPECT_TRUE(masks[1].status.ok() && masks[1].words.empty());
  EXPECT_EQ(masks[2].status.message(), "the output's grammar failed: broken grammar");
  EXPECT_THAT(masks[3].words, testing::ElementsAre(1u << 8, 0u, 0u));
}

TEST_P(GrammarMasksTest, ServesStepAfterStep) {
  std::vector<Counting> constraints(33);
  std::vector<std::vector<int32_t>> outputs(33);
  for (int32_t step = 0; step < 200; ++step) {
    std::vector<GrammarMasks::Sequence> sequences;
    for (size_t i = 0; i < constraints.size(); ++i) {
      sequences.push_back({&constraints[i], outputs[i]});
    }
    masks_.Start(sequences);
    for (const GrammarMasks::Mask& mask : masks_.Wait()) {
      ASSERT_EQ(mask.words[static_cast<size_t>(step % 10) / 32], 1u << (step % 10));
    }
    for (auto& output : outputs) {
      output.push_back(step % 10);
      if (step % 10 == 9) output.clear();
    }
  }
}

}  // namespace
}  // namespace fathom::runtime
