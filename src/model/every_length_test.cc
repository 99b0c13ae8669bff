// No length is special: for every length from 1 to 1,100 the last tokens of a sequence, computed as
// one chunk that ends there, alone or beside others, have the bits of one long run.
#include <gtest/gtest.h>

#include "model/testing.h"

namespace fathom::model {
namespace {

using config::Numerics;

constexpr int kWholeUpTo = 140;  // lengths that are computed from their first token
constexpr int kBegins = 61;  // longer ones begin at a multiple of this: at every remainder of 4 …
constexpr int kBatch = 3;    // … and not at the cache's boundaries

// All three layer kinds, both routings, an indexer that has to choose; little else.
config::ModelConfig NarrowConfig() {
  config::ModelConfig c = SmallConfig();
  c.vocab_size = 64;
  c.hidden_size = 128;
  c.num_layers = 3;
  c.compress_ratios = {4, 128, 0};
  c.num_heads = 2;
  c.o_groups = 1;
  c.index_num_heads = 2;
  c.num_experts = 4;
  c.num_experts_per_token = 1;
  c.num_hash_layers = 1;
  return c;
}

struct Case {
  Numerics numerics;
  int max_length;
};

class EveryLengthTest : public testing::TestWithParam<Case> {
 protected:
  EveryLengthTest()
      : max_length_(GetParam().max_length),
        model_(NarrowConfig(), GetParam().numerics, 2, kBatch + 2, max_length_),
        ids_(RandomTokens(model_.config(), max_length_, 21)),
        whole_(model_.Add(ids_)),
        base_(model_.Add(ids_)) {
    model_.RunInChunks(whole_, max_length_);
    for (int i = 0; i < kBatch; ++i) batch_.push_back(model_.Add(ids_));
  }

  // Runs the lengths first..last in one step, each on from where base_ is.
  void RunTogether(int first, int last) {
    std::vector<TestSequence*> sequences;
    std::vector<int> counts;
    for (int length = first; length <= last; ++length) {
      TestSequence& sequence = batch_[static_cast<size_t>(length - first)];
      sequence.logits.clear();
      model_.CopyCache(model_, base_, sequence);
      sequences.push_back(&sequence);
      counts.push_back(length - base_.num_computed);
    }
    model_.Step(sequences, counts);
    for (const TestSequence* sequence : sequences) {
      const size_t begin = static_cast<size_t>(base_.num_computed);
      for (size_t i = 0; i < sequence->logits.size(); ++i) {
        ASSERT_EQ(sequence->logits[i], whole_.logits[begin + i])
            << "token " << begin + i << " of length " << sequence->num_computed;
      }
    }
  }

  int max_length_;
  TestModel model_;
  std::vector<int32_t> ids_;
  TestSequence whole_, base_;
  std::vector<TestSequence> batch_;
};

TEST_P(EveryLengthTest, EndsWithTheBitsOfALongerRun) {
  int num_lengths = 0;
  for (int length = 1; length <= max_length_;) {
    const int begin = length <= kWholeUpTo ? 0 : (length - 1) / kBegins * kBegins;
    if (base_.num_computed < begin) {
      TestSequence* const sequences[] = {&base_};
      const int counts[] = {begin - base_.num_computed};
      model_.Step(sequences, counts);
    }
    // Lengths that begin at the same token: sometimes one alone, sometimes up to three together.
    const int end = length <= kWholeUpTo ? kWholeUpTo : std::min(begin + kBegins, max_length_);
    const int last = std::min(length + num_lengths % kBatch, end);
    RunTogether(length, last);
    if (HasFatalFailure()) return;
    num_lengths += last - length + 1;
    length = last + 1;
  }
  EXPECT_EQ(num_lengths, max_length_);
}

INSTANTIATE_TEST_SUITE_P(BothNumerics, EveryLengthTest,
                         testing::Values(Case{Numerics::kOfficial, 1100},
                                         Case{Numerics::kFp32, 300}),
                         [](const auto& param_info) {
                           const bool official = param_info.param.numerics == Numerics::kOfficial;
                           return official ? "Official" : "Fp32";
                         });

}  // namespace
}  // namespace fathom::model
