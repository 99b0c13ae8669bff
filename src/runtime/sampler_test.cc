// The distribution of a million draws for each option, against probabilities that the test works
// out in the plainest way; and what a draw may and may not depend on. All seeds are fixed: nothing
// here is left to luck.
#include "runtime/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <random>

namespace fathom::runtime {
namespace {

constexpr int kVocab = 12;
constexpr int32_t kEos = 1;
constexpr int kDraws = 1'000'000;

const std::vector<float> kLogits = {1.0f,  0.5f, 2.0f, -1.0f, 0.0f, 1.5f,
                                    -0.5f, 2.0f, 0.2f, 1.1f,  0.7f, -2.0f};
const std::vector<int32_t> kPrompt = {0, 2, 4};
const std::vector<int32_t> kOutput = {7, 7, 5, 9};

request::Request MakeRequest(const request::SamplingParams& params) {
  request::Request request;
  request.prompt_token_ids = kPrompt;
  request.sampling = params;
  return request;
}

request::Request MakeGreedyRequest() {
  request::SamplingParams params;
  params.temperature = 0;
  return MakeRequest(params);
}

std::vector<int32_t> AllTokens() {
  std::vector<int32_t> all = kPrompt;
  all.insert(all.end(), kOutput.begin(), kOutput.end());
  return all;
}

// Counts of a million draws, one seed each.
std::vector<int64_t> DrawCounts(const request::SamplingParams& params) {
  constexpr int kRows = 1000;
  Sampler sampler(kVocab, {kEos}, nullptr);
  std::vector<request::Request> requests(kRows, MakeRequest(params));
  const std::vector<int32_t> all = AllTokens();
  std::vector<int64_t> counts(kVocab);
  for (int batch = 0; batch < kDraws / kRows; ++batch) {
    std::vector<SampleRow> rows;
    std::vector<request::SequenceResult> results(kRows);
    std::vector<request::SequenceResult*> pointers;
    for (int i = 0; i < kRows; ++i) {
      const auto index = static_cast<size_t>(i);
      requests[index].sampling.seed = static_cast<uint64_t>(batch) * kRows + index;
      rows.push_back({kLogits, &requests[index], all});
      pointers.push_back(&results[index]);
    }
    sampler.Sample(rows, pointers);
    for (const request::SequenceResult& result : results) {
      ++counts[static_cast<size_t>(result.sampled_token_ids.at(0))];
    }
  }
  return counts;
}

// The softmax at a temperature; then `keep` decides, best first, from (probability, rank, sum
// before).
template <typename Keep>
std::vector<double> Probabilities(std::vector<double> logits, double temperature, Keep keep) {
  std::vector<double> p(logits.size());
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += p[i] = std::exp(logits[i] / temperature);
  for (double& x : p) x /= sum;
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
  double before = 0, kept = 0;
  const double best = p[order[0]];
  for (size_t rank = 0; rank < order.size(); ++rank) {
    double& x = p[order[rank]];
    const double probability = x;
    if (!keep(x / best, rank, before)) x = 0;
    before += probability;
    kept += x;
  }
  for (double& x : p) x /= kept;
  return p;
}

std::vector<double> Logits() { return {kLogits.begin(), kLogits.end()}; }
bool KeepAll(double, size_t, double) { return true; }

double ChiSquare(const std::vector<int64_t>& counts, const std::vector<double>& p) {
  double chi_square = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " must never be drawn";
      continue;
    }
    const double expected = p[i] * kDraws;
    chi_square += std::pow(static_cast<double>(counts[i]) - expected, 2) / expected;
  }
  return chi_square;
}

// The value that chi-square exceeds with a chance of 1e-6 (Wilson and Hilferty).
double ChiSquareLimit(const std::vector<double>& p) {
  const double df =
      static_cast<double>(p.size()) - 1 - static_cast<double>(std::count(p.begin(), p.end(), 0.0));
  const double a = 2 / (9 * df);
  return df * std::pow(1 - a + 4.753 * std::sqrt(a), 3);
}

void ExpectDistribution(const request::SamplingParams& params, const std::vector<double>& p) {
  EXPECT_LT(ChiSquare(DrawCounts(params), p), ChiSquareLimit(p));
}

TEST(SamplerDistribution, PlainIsTheSoftmax) {
  const auto p = Probabilities(Logits(), 1, KeepAll);
  const auto counts = DrawCounts({});
  EXPECT_LT(ChiSquare(counts, p), ChiSquareLimit(p));
  // The test has the power to see one percent of temperature.
  EXPECT_GT(ChiSquare(counts, Probabilities(Logits(), 1.01, KeepAll)), ChiSquareLimit(p));
}

TEST(SamplerDistribution, TemperatureSharpensAndFlattens) {
  for (const double temperature : {0.5, 1.7}) {
    request::SamplingParams params;
    params.temperature = temperature;
    ExpectDistribution(params, Probabilities(Logits(), temperature, KeepAll));
  }
}

TEST(SamplerDistribution, TopKKeepsTheKBest) {
  request::SamplingParams params;
  params.top_k = 4;
  ExpectDistribution(
      params, Probabilities(Logits(), 1, [](double, size_t rank, double) { return rank < 4; }));
}

TEST(SamplerDistribution, TopPKeepsTheFewestThatReachP) {
  request::SamplingParams params;
  params.top_p = 0.7;
  ExpectDistribution(params, Probabilities(Logits(), 1, [](double, size_t, double before) {
                       return before < 0.7;
                     }));
}

TEST(SamplerDistribution, MinPKeepsThoseNearTheBest) {
  request::SamplingParams params;
  params.min_p = 0.3;
  ExpectDistribution(params, Probabilities(Logits(), 1, [](double of_best, size_t, double) {
                       return of_best >= 0.3;
                     }));
}

TEST(SamplerDistribution, TopPLooksAtWhatTopKLeft) {
  request::SamplingParams params;
  params.temperature = 1.3;
  params.top_k = 5;
  params.top_p = 0.6;
  auto after_top_k =
      Probabilities(Logits(), 1.3, [](double, size_t rank, double) { return rank < 5; });
  for (double& x : after_top_k) x = std::log(x);
  ExpectDistribution(params, Probabilities(after_top_k, 1, [](double, size_t, double before) {
                       return before < 0.6;
                     }));
}

TEST(SamplerDistribution, PenaltiesFollowTheHistory) {
  request::SamplingParams params;
  params.repetition_penalty = 1.4;
  params.frequency_penalty = 0.3;
  params.presence_penalty = -0.4;
  std::vector<double> logits = Logits();
  for (const size_t i : {0, 2, 4, 7, 5, 9})
    logits[i] = logits[i] > 0 ? logits[i] / 1.4 : logits[i] * 1.4;
  for (const int32_t i : kOutput) logits[static_cast<size_t>(i)] -= 0.3;
  for (const size_t i : {7, 5, 9}) logits[i] += 0.4;
  ExpectDistribution(params, Probabilities(logits, 1, KeepAll));
}

TEST(SamplerDistribution, LogitBiasMovesTokens) {
  request::SamplingParams params;
  params.logit_bias = {{2, -1.0f}, {11, 3.0f}};
  std::vector<double> logits = Logits();
  logits[2] -= 1;
  logits[11] += 3;
  ExpectDistribution(params, Probabilities(logits, 1, KeepAll));
}

TEST(SamplerDistribution, WhatIsRuledOutIsNeverDrawn) {
  request::SamplingParams params;
  params.allowed_token_ids = {0, 1, 2, 3, 5, 7};
  params.bad_words = {{0}, {9, 3}};  // the output ends with 9
  params.min_tokens = 100;
  std::vector<double> logits(kVocab, -INFINITY);
  for (const size_t i : {2, 5, 7}) logits[i] = kLogits[i];
  ExpectDistribution(params, Probabilities(logits, 1, KeepAll));
}

request::SequenceResult SampleOne(const request::Request& request, std::span<const float> logits) {
  Sampler sampler(static_cast<int>(logits.size()), {kEos}, nullptr);
  request::SequenceResult result;
  std::vector<request::SequenceResult*> results = {&result};
  const std::vector<SampleRow> rows = {{logits, &request, request.prompt_token_ids}};
  sampler.Sample(rows, results);
  return result;
}

TEST(Sampler, GreedyTakesTheBestAndOfEqualsTheLowestId) {
  request::Request request = MakeGreedyRequest();
  EXPECT_THAT(SampleOne(request, kLogits).sampled_token_ids, testing::ElementsAre(2));
  request.sampling.temperature = 1e-9;
  EXPECT_THAT(SampleOne(request, kLogits).sampled_token_ids, testing::ElementsAre(2));
}

TEST(Sampler, ATokenDependsOnSeedAndNumberAndNotOnTheBatch) {
  std::mt19937 random(5);
  constexpr int kRows = 64, kWide = 500;
  std::vector<std::vector<float>> logits(kRows, std::vector<float>(kWide));
  std::vector<request::Request> requests;
  std::vector<SampleRow> rows;
  for (size_t i = 0; i < kRows; ++i) {
    for (float& x : logits[i]) x = static_cast<float>(random() % 1000) / 250.0f;
    request::SamplingParams params;
    params.seed = i / 2;
    params.top_p = i % 3 == 0 ? 0.9 : 1.0;
    params.top_k = i % 5 == 0 ? 50 : 0;
    params.presence_penalty = i % 7 == 0 ? 1.0 : 0.0;
    requests.push_back(MakeRequest(params));
  }
  const std::vector<int32_t> all = AllTokens();
  for (size_t i = 0; i < kRows; ++i) rows.push_back({logits[i], &requests[i], all});
  ThreadPool pool(3);
  Sampler together(kWide, {kEos}, &pool), alone(kWide, {kEos}, nullptr);
  std::vector<request::SequenceResult> results(kRows);
  std::vector<request::SequenceResult*> pointers;
  for (request::SequenceResult& result : results) pointers.push_back(&result);
  together.Sample(rows, pointers);
  for (size_t i = 0; i < kRows; ++i) {
    request::SequenceResult result;
    std::vector<request::SequenceResult*> pointer = {&result};
    alone.Sample({&rows[i], 1}, pointer);
    EXPECT_EQ(result.sampled_token_ids, results[i].sampled_token_ids) << i;
  }
}

TEST(Sampler, TheTokensOfOneSeedAreDrawnAnew) {
  request::Request request = MakeRequest({});
  request.sampling.seed = 9;
  const std::vector<float> logits = {1.0f, 1.0f};
  Sampler sampler(2, {}, nullptr);
  std::vector<int32_t> all = kPrompt;
  int num_ones = 0, num_changes = 0;
  for (int i = 0; i < 2000; ++i) {
    request::SequenceResult result;
    std::vector<request::SequenceResult*> results = {&result};
    const std::vector<SampleRow> rows = {{logits, &request, all}};
    sampler.Sample(rows, results);
    const int32_t token_id = result.sampled_token_ids.at(0);
    num_ones += token_id;
    num_changes += token_id != all.back() ? 1 : 0;
    all.push_back(token_id);
  }
  // Five standard deviations of 2000 fair coins.
  EXPECT_NEAR(num_ones, 1000, 112);
  EXPECT_NEAR(num_changes, 1000, 112);
}

TEST(Sampler, ALargeFlatVocabularyGivesTopPItsWholeNucleus) {
  // More than the first sorted part; every second token a little better.
  std::vector<float> logits(5000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = i % 2 == 0 ? 0.001f : 0.0f;
  request::SamplingParams params;
  params.top_p = 0.5;
  std::vector<Candidate> candidates;
  CollectCandidates(params, logits, {}, candidates);
  EXPECT_EQ(candidates.size(), 2499u);  // the better half alone holds 0.50025
  for (const Candidate& c : candidates) EXPECT_EQ(c.token_id % 2, 0);
}

TEST(Sampler, ReportsRawLogprobsWhateverTheTemperature) {
  request::Request request = MakeGreedyRequest();
  request.sampling.num_logprobs = 3;
  request.sampling.logit_bias = {{2, -50.0f}};
  const auto result = SampleOne(request, kLogits);
  ASSERT_EQ(result.logprobs.size(), 1u);
  const auto p = Probabilities(Logits(), 1, KeepAll);
  EXPECT_EQ(result.logprobs[0].chosen.token_id, 7);
  EXPECT_NEAR(result.logprobs[0].chosen.logprob, std::log(p[7]), 1e-6);
  EXPECT_EQ(result.logprobs[0].rank, 2);
  EXPECT_EQ(result.logprobs[0].top[0].token_id, 2);
}

TEST(Sampler, LogitsThatAreNotFiniteFailTheirRequestOnly) {
  Sampler sampler(kVocab, {kEos}, nullptr);
  std::vector<float> bad = kLogits;
  bad[3] = NAN;
  const request::Request request = MakeRequest({});
  const std::vector<SampleRow> rows = {{bad, &request, kPrompt}, {kLogits, &request, kPrompt}};
  request::SequenceResult a, b;
  std::vector<request::SequenceResult*> results = {&a, &b};
  sampler.Sample(rows, results);
  EXPECT_EQ(a.status.code(), StatusCode::kInternal);
  EXPECT_TRUE(a.sampled_token_ids.empty());
  EXPECT_TRUE(b.status.ok());
  EXPECT_EQ(b.sampled_token_ids.size(), 1u);
}

request::SequenceResult SampleMasked(const request::SamplingParams& params, uint32_t mask) {
  Sampler sampler(kVocab, {kEos}, nullptr);
  const request::Request request = MakeRequest(params);
  const std::vector<SampleRow> rows = {
      {.logits = kLogits, .request = &request, .all_token_ids = kPrompt, .mask = {&mask, 1}}};
  request::SequenceResult result;
  std::vector<request::SequenceResult*> results = {&result};
  sampler.Sample(rows, results);
  return result;
}

TEST(Sampler, AGrammarsMaskDecides) {
  constexpr uint32_t kThreeAndEleven = 1u << 3 | 1u << 11;
  request::SamplingParams params;
  for (const double penalty : {0.0, 0.5}) {  // edited logits, and as they are
    params.presence_penalty = penalty;
    params.temperature = 0;
    EXPECT_THAT(SampleMasked(params, kThreeAndEleven).sampled_token_ids, testing::ElementsAre(3));
    params.temperature = 1;
    std::map<int32_t, int> counts;
    for (params.seed = 0; params.seed < 1000; ++params.seed) {
      ++counts[SampleMasked(params, kThreeAndEleven).sampled_token_ids.at(0)];
    }
    EXPECT_EQ(counts.size(), 2u);
    EXPECT_NEAR(counts[3], 731, 60);  // 1 / (1 + exp(-1)), four deviations
    EXPECT_GT(counts[11], 0);
  }
}

TEST(Sampler, AMaskThatAllowsNothingFailsTheRequest) {
  request::SamplingParams params;
  for (const double temperature : {0.0, 1.0}) {
    params.temperature = temperature;
    const auto result = SampleMasked(params, 0);
    EXPECT_EQ(result.status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(result.sampled_token_ids.empty());
  }
}

}  // namespace
}  // namespace fathom::runtime
