// The draws on a GPU against the Sampler's: the same tokens and log-probabilities for the same
// logits, whatever a request asks for. Where a draw differs, the random number or top_p must lie on
// the boundary between two tokens to the precision that kernels/sampling states.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "runtime/device_sampler.h"
#include "runtime/logit_edits.h"
#include "runtime/philox.h"
#include "runtime/sampler.h"

namespace fathom::runtime {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kEos = 1;

// A row and what it is drawn from.
struct Case {
  std::vector<float> logits;
  request::Request request;
  std::vector<int32_t> token_ids;
  std::vector<uint32_t> mask;
  size_t num_output() const { return token_ids.size() - request.prompt_token_ids.size(); }
};

class DeviceSamplerTest : public testing::Test {
 protected:
  void SetUp() override {
    auto gpu = device::MakeCudaDevice(0);
    if (!gpu.ok()) GTEST_SKIP() << gpu.status().message();
    gpu_ = std::move(*gpu);
    stream_ = std::move(gpu_->MakeStream().value());
  }

  std::vector<request::SequenceResult> OnDevice(const std::vector<Case>& cases, int place = 0) {
    const size_t vocab = cases[0].logits.size();
    auto sampler =
        DeviceSampler::Make(static_cast<int>(cases.size()), static_cast<int>(vocab), {kEos}, *gpu_);
    EXPECT_TRUE(sampler.ok());
    device::Buffer logits = std::move(
        gpu_->Allocate(static_cast<int64_t>(cases.size() * vocab * sizeof(float))).value());
    (*sampler)->Begin(place);
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      EXPECT_TRUE(stream_
                      ->Copy(logits.data() + i * vocab * sizeof(float), c.logits.data(),
                             static_cast<int64_t>(vocab * sizeof(float)))
                      .ok());
      EXPECT_TRUE((*sampler)->Add({.logits_row = static_cast<int32_t>(i),
                                   .request = &c.request,
                                   .all_token_ids = c.token_ids,
                                   .num_output_tokens = c.num_output(),
                                   .mask = c.mask}));
    }
    EXPECT_TRUE((*sampler)->Upload(*stream_).ok());
    (*sampler)->Draw(reinterpret_cast<float*>(logits.data()), *stream_);
    std::vector<int32_t> token_ids(cases.size());
    EXPECT_TRUE(stream_
                    ->Copy(token_ids.data(), (*sampler)->token_ids(),
                           static_cast<int64_t>(token_ids.size() * sizeof(int32_t)))
                    .ok());
    EXPECT_TRUE(stream_->Synchronize().ok());
    std::vector<request::SequenceResult> results(cases.size());
    for (size_t i = 0; i < cases.size(); ++i) {
      (*sampler)->Read(place, i, cases[i].request, results[i]);
      const auto& sampled = results[i].sampled_token_ids;
      EXPECT_EQ(token_ids[i], sampled.empty() ? 0 : sampled[0]);
    }
    return results;
  }

  static std::vector<request::SequenceResult> OnHost(const std::vector<Case>& cases) {
    Sampler sampler(static_cast<int>(cases[0].logits.size()), {kEos}, nullptr);
    std::vector<SampleRow> rows;
    std::vector<request::SequenceResult> results(cases.size());
    std::vector<request::SequenceResult*> pointers;
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      rows.push_back({c.logits, &c.request, c.token_ids, c.mask});
      pointers.push_back(&results[i]);
    }
    sampler.Sample(rows, pointers);
    return results;
  }

  // How far the draw, or the end of the nucleus, is from a boundary between tokens, in best
  // weights.
  static double DistanceFromBoundary(const Case& c) {
    std::vector<float> logits = c.logits;
    std::vector<int32_t> counts(logits.size());
    const size_t num_prompt = c.request.prompt_token_ids.size();
    const std::span<const int32_t> all(c.token_ids);
    EXPECT_TRUE(EditLogits(c.request.sampling, {all.first(num_prompt), all.subspan(num_prompt)},
                           std::vector<int32_t>{kEos}, c.mask, logits, counts)
                    .ok());
    double distance = kInfinity;
    request::SamplingParams params = c.request.sampling;
    const double uniform = UniformAt(params.seed, c.num_output());
    for (const bool nucleus : {true, false}) {
      params.top_p = nucleus ? 1 : c.request.sampling.top_p;
      std::vector<Candidate> candidates;
      CollectCandidates(params, logits, {}, candidates);
      if (nucleus) {
        std::sort(candidates.begin(), candidates.end(),
                  [](const Candidate& a, const Candidate& b) { return a.weight > b.weight; });
      }
      double sum = 0;
      for (const Candidate& candidate : candidates) sum += candidate.weight;
      const double target = sum * (nucleus ? c.request.sampling.top_p : uniform);
      sum = 0;
      for (const Candidate& candidate : candidates) {
        sum += candidate.weight;
        distance = std::min(distance, std::fabs(sum - target));
      }
    }
    return distance;
  }

  // Returns how many tokens differ.
  int ExpectSame(const std::vector<Case>& cases) {
    const auto device = OnDevice(cases), host = OnHost(cases);
    int num_different = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(device[i].status.message(), host[i].status.message());
      if (device[i].sampled_token_ids != host[i].sampled_token_ids) {
        ++num_different;
        EXPECT_LT(DistanceFromBoundary(cases[i]),
                  static_cast<double>(cases[i].logits.size()) * 0x1p-45);
        continue;
      }
      ExpectSameLogprobs(device[i].logprobs, host[i].logprobs);
    }
    return num_different;
  }

  static void ExpectSameLogprobs(const std::vector<request::TokenLogprobs>& device,
                                 const std::vector<request::TokenLogprobs>& host) {
    ASSERT_EQ(device.size(), host.size());
    for (size_t i = 0; i < host.size(); ++i) {
      EXPECT_EQ(device[i].rank, host[i].rank);
      EXPECT_FLOAT_EQ(device[i].chosen.logprob, host[i].chosen.logprob);
      ASSERT_EQ(device[i].top.size(), host[i].top.size());
      for (size_t n = 0; n < host[i].top.size(); ++n) {
        EXPECT_EQ(device[i].top[n].token_id, host[i].top[n].token_id);
        EXPECT_FLOAT_EQ(device[i].top[n].logprob, host[i].top[n].logprob);
      }
    }
  }

  // Logits as a model's: a bulk, some that stand out; every other row coarse, with many ties.
  static Case RandomCase(size_t vocab, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> bulk(0, 2.5f), tall(8, 4);
    Case c;
    for (size_t i = 0; i < vocab; ++i) {
      const float x = random() % 1000 < 3 ? tall(random) : bulk(random);
      c.logits.push_back(seed % 2 == 0 ? x : std::round(x * 8) / 8);
    }
    const auto token = [&] { return static_cast<int32_t>(random() % vocab); };
    for (int i = 0; i < 40; ++i) c.request.prompt_token_ids.push_back(token());
    c.token_ids = c.request.prompt_token_ids;
    // Tokens that are likely, so that penalties and bad words matter.
    const auto best =
        static_cast<int32_t>(std::max_element(c.logits.begin(), c.logits.end()) - c.logits.begin());
    for (int i = 0; i < 20; ++i) c.token_ids.push_back(i % 3 == 0 ? best : token());
    c.request.sampling.seed = seed * 7919;
    return c;
  }

  static request::SamplingParams RandomParams(size_t vocab, uint32_t seed) {
    std::mt19937 random(seed);
    const auto pick = [&](auto... values) {
      const std::common_type_t<decltype(values)...> all[] = {values...};
      return all[random() % sizeof...(values)];
    };
    request::SamplingParams p;
    p.seed = seed;
    p.temperature = pick(0.0, 0.3, 0.7, 1.0, 1.0, 3.0);
    p.top_k = pick(0, 0, 1, 5, 50, 1000, static_cast<int>(vocab));
    p.top_p = pick(1.0, 1.0, 0.95, 0.5, 0.01);
    p.min_p = pick(0.0, 0.0, 0.05, 1.0);
    if (random() % 2 == 0) return p;
    p.repetition_penalty = pick(1.0, 1.1, 0.8);
    p.frequency_penalty = pick(0.0, 0.7, -1.3);
    p.presence_penalty = pick(0.0, 0.4);
    for (uint32_t i = 0; i < random() % 300; ++i) {
      p.logit_bias.emplace_back(static_cast<int32_t>(i * 7 % vocab), pick(-100.f, 3.f, 0.25f));
    }
    std::sort(p.logit_bias.begin(), p.logit_bias.end());
    const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
    p.logit_bias.erase(std::unique(p.logit_bias.begin(), p.logit_bias.end(), same),
                       p.logit_bias.end());
    p.min_tokens = pick(0, 100);
    p.stop_token_ids = {3, 4};
    if (random() % 4 == 0) {
      for (size_t i = 0; i < vocab; i += 3) p.allowed_token_ids.push_back(static_cast<int32_t>(i));
    }
    return p;
  }

  std::unique_ptr<device::Device> gpu_;
  std::unique_ptr<device::Stream> stream_;
};

TEST_F(DeviceSamplerTest, DrawsTheTokensOfTheHost) {
  int num_different = 0, num_drawn = 0;
  for (const size_t vocab : {size_t{50}, size_t{4097}, size_t{129'280}}) {
    const uint32_t num_rows = vocab > 100'000 ? 48 : 200;
    std::vector<Case> cases;
    for (uint32_t i = 0; i < num_rows; ++i) {
      Case c = RandomCase(vocab, i + 1);
      c.request.sampling = RandomParams(vocab, i + 1);
      const auto& output = std::span(c.token_ids).subspan(c.request.prompt_token_ids.size());
      if (i % 5 == 0) c.request.sampling.bad_words = {{output[18], output[19], 5}, {output[0]}};
      if (i % 4 == 1) c.request.sampling.num_logprobs = static_cast<int>(i % 21);
      if (i % 7 == 2) {
        std::mt19937 random(i);
        c.mask.resize((vocab + 31) / 32);
        for (uint32_t& word : c.mask) word = random() & (random() % 3 == 0 ? 0u : random());
        if (vocab % 32 != 0) c.mask.back() &= (1u << vocab % 32) - 1;
      }
      cases.push_back(std::move(c));
    }
    num_different += ExpectSame(cases);
    num_drawn += static_cast<int>(num_rows);
  }
  std::printf("%d of %d tokens on a boundary\n", num_different, num_drawn);
  EXPECT_LE(num_different, 1);
}

// Many seeds on one row: draws everywhere in the distribution.
TEST_F(DeviceSamplerTest, DrawsTheTokensOfTheHostForEverySeed) {
  for (const double top_p : {1.0, 0.98}) {
    std::vector<Case> cases;
    for (uint32_t seed = 0; seed < 500; ++seed) {
      Case c = RandomCase(3000, 11);
      c.request.sampling = {};
      c.request.sampling.temperature = 2;
      c.request.sampling.top_p = top_p;
      c.request.sampling.seed = seed;
      cases.push_back(std::move(c));
    }
    EXPECT_EQ(ExpectSame(cases), 0);
  }
}

TEST_F(DeviceSamplerTest, EqualLogitsGoByTheirIds) {
  std::vector<Case> cases;
  for (uint32_t i = 0; i < 60; ++i) {
    Case c = RandomCase(5000, 2);
    std::fill(c.logits.begin(), c.logits.end(), i % 2 == 0 ? 0.0f : -3.5f);
    if (i % 2 == 0) c.logits[17] = -0.0f;
    c.request.sampling = {};
    c.request.sampling.temperature = i % 3 == 0 ? 0 : 1;
    c.request.sampling.top_p = i % 5 == 0 ? 0.3 : 1;
    c.request.sampling.top_k = i % 4 == 0 ? 100 : 0;
    c.request.sampling.seed = i;
    c.request.sampling.num_logprobs = 3;
    cases.push_back(std::move(c));
  }
  EXPECT_EQ(ExpectSame(cases), 0);
}

TEST_F(DeviceSamplerTest, ARowThatIsNoDistributionFailsAlone) {
  std::vector<Case> cases;
  for (uint32_t i = 0; i < 6; ++i) cases.push_back(RandomCase(1000, i));
  cases[1].logits[999] = NAN;
  cases[2].logits[3] = kInfinity;
  std::fill(cases[3].logits.begin(), cases[3].logits.end(), -kInfinity);
  std::fill(cases[4].logits.begin(), cases[4].logits.end() - 1, -kInfinity);
  cases[5].mask.assign(32, 0u);
  EXPECT_EQ(ExpectSame(cases), 0);
}

TEST_F(DeviceSamplerTest, StopsAreRuledOutUnlessNothingElseIsLeft) {
  std::vector<Case> cases(2, RandomCase(100, 4));
  for (Case& c : cases) {
    c.request.sampling = {};
    c.request.sampling.temperature = 0;
    c.request.sampling.min_tokens = 50;
    c.request.sampling.stop_token_ids = {7};
    c.logits[kEos] = c.logits[7] = 50;
    c.mask = {1u << kEos | 1u << 7, 0, 0, 0};
  }
  cases[0].mask[1] = 1u << 5;
  EXPECT_EQ(ExpectSame(cases), 0);
  EXPECT_EQ(OnDevice(cases)[0].sampled_token_ids[0], 37);
  EXPECT_EQ(OnDevice(cases, 1)[1].sampled_token_ids[0], kEos);
}

TEST_F(DeviceSamplerTest, ARowDependsOnItselfAlone) {
  std::vector<Case> cases;
  for (uint32_t i = 0; i < 40; ++i) {
    Case c = RandomCase(20'000, i);
    c.request.sampling = RandomParams(20'000, i);
    c.request.sampling.num_logprobs = 2;
    cases.push_back(std::move(c));
  }
  const auto together = OnDevice(cases);
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto alone = OnDevice({cases[i]});
    EXPECT_EQ(alone[0].sampled_token_ids, together[i].sampled_token_ids);
    ASSERT_EQ(alone[0].logprobs.size(), together[i].logprobs.size());
    if (alone[0].logprobs.empty()) continue;
    EXPECT_EQ(alone[0].logprobs[0].chosen.logprob, together[i].logprobs[0].chosen.logprob);
  }
}

}  // namespace
}  // namespace fathom::runtime
