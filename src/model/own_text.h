// A model's own text, and how close another one's log-probabilities are on it. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "model/testing.h"

namespace fathom::model {

inline double LogProbability(const std::vector<float>& logits, size_t token) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(double{x} - max);
  return logits[token] - max - std::log(sum);
}
inline size_t Best(const std::vector<float>& logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Drawn from its distribution, token by token.
inline TestSequence OwnText(TestModel& model, int length, uint32_t seed) {
  TestSequence s =
      model.Add(std::vector<int32_t>(static_cast<size_t>(length), model.config().bos_token_id));
  TestSequence* const sequences[] = {&s};
  std::mt19937 random(seed);
  for (int i = 0; i < length; ++i) {
    const int one[] = {1};
    model.Step(sequences, one);
    if (i + 1 == length) break;
    double left = static_cast<double>(random()) * 0x1p-32;
    size_t token = 0;
    const std::vector<float>& logits = s.logits.back();
    const double first = LogProbability(logits, 0);
    while (token + 1 < logits.size()) {
      left -= std::exp(double{logits[token]} - logits[0] + first);
      if (left < 0) break;
      ++token;
    }
    s.token_ids[static_cast<size_t>(i) + 1] = static_cast<int32_t>(token);
  }
  return s;
}

// Of the likeliest token, on one's own text.
inline void ExpectClose(const TestSequence& expected, const TestSequence& actual,
                        const char* what) {
  ASSERT_EQ(expected.logits.size(), actual.logits.size());
  std::vector<double> differences;
  for (size_t i = 0; i < expected.logits.size(); ++i) {
    const size_t best = Best(expected.logits[i]);
    differences.push_back(std::fabs(LogProbability(expected.logits[i], best) -
                                    LogProbability(actual.logits[i], best)));
  }
  std::sort(differences.begin(), differences.end());
  const auto at = [&](size_t percent) { return differences[differences.size() * percent / 100]; };
  std::printf("%s: median %.5f, p90 %.5f, p99 %.5f, largest %.5f\n", what, at(50), at(90), at(99),
              differences.back());
  EXPECT_LE(at(50), 0.02) << what;
  EXPECT_LE(at(99), 0.2) << what;
}

}  // namespace fathom::model
