#include "scheduler/step_pacer.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fathom::scheduler {
namespace {

constexpr int64_t kMany = 100000;

// A device: what a step takes.
struct Device {
  double fixed = 0.015, per_decode = 0.0003, per_prefill_token = 0.0001;
  double Seconds(int num_decodes, int64_t num_prefill_tokens) const {
    return fixed + per_decode * num_decodes +
           per_prefill_token * static_cast<double>(num_prefill_tokens);
  }
};

// Runs a step with as many prompt tokens as the pacer allows; what it took.
double RunStep(StepPacer& pacer, const Device& device, int num_decodes, int64_t wanted = kMany) {
  const int64_t num_tokens = pacer.PrefillTokens(num_decodes, wanted);
  const double seconds = device.Seconds(num_decodes, num_tokens);
  pacer.OnStep(num_decodes, num_tokens, seconds);
  return seconds;
}

TEST(StepPacer, WithoutDecodesOrWithoutAFloorPromptsTakeAllTheyWant) {
  const StepPacer pacer(0.7);
  EXPECT_EQ(pacer.PrefillTokens(0, 8192), 8192);
  const StepPacer without_floor(0);
  EXPECT_EQ(without_floor.PrefillTokens(10, 8192), 8192);
}

TEST(StepPacer, MeasuresDecodesAloneBeforePromptsJoin) {
  const Device device;
  StepPacer pacer(0.7);
  pacer.OnStep(0, 8192, device.Seconds(0, 8192));
  EXPECT_EQ(pacer.PrefillTokens(10, kMany), 0);
  RunStep(pacer, device, 10);
  EXPECT_EQ(pacer.PrefillTokens(10, kMany), 0);
  RunStep(pacer, device, 10);
  EXPECT_GT(pacer.PrefillTokens(10, kMany), 0);
  EXPECT_DOUBLE_EQ(pacer.DecodeSeconds(10), device.Seconds(10, 0));
  EXPECT_LT(pacer.DecodeSeconds(30), 0) << "nothing like it was run";
}

TEST(StepPacer, NoStepIsLongerThanTheFloorAllowsAndPromptsGetTheRest) {
  const Device device;
  for (const double floor : {0.5, 0.7, 0.9}) {
    StepPacer pacer(floor);
    pacer.OnStep(0, 8192, device.Seconds(0, 8192));
    for (int i = 0; i < 50; ++i) RunStep(pacer, device, 10);
    const double solo = device.Seconds(10, 0);
    double total = 0;
    for (int i = 0; i < 1000; ++i) {
      const double seconds = RunStep(pacer, device, 10);
      EXPECT_LE(seconds, solo / floor * 1.001);
      total += seconds;
    }
    EXPECT_LE(total, 1000 * solo / floor * 1.001);
    EXPECT_GE(total, 1000 * solo * (1 + 0.85 * (1 / floor - 1)))
        << "prompts are held up for nothing";
  }
}

TEST(StepPacer, FindsTheCostOfPromptsWhenASmallChunkCostsMoreThanItsShareOfALargeOne) {
  Device device;
  StepPacer pacer(0.7);
  pacer.OnStep(0, 8192, device.Seconds(0, 8192));
  device.per_prefill_token = 0.0005;  // what so few tokens cost beside decodes
  double total = 0;
  for (int i = 0; i < 2; ++i) RunStep(pacer, device, 10);
  for (int i = 0; i < 200; ++i) total += RunStep(pacer, device, 10);
  EXPECT_LE(total, 200 * device.Seconds(10, 0) / 0.7 * 1.01);
}

TEST(StepPacer, ATokenDearerThanAStepsShareRunsEverySoOften) {
  Device device;
  device.per_prefill_token = 0.02;  // as on a CPU: a share of 7.7 ms
  StepPacer pacer(0.7);
  pacer.OnStep(0, 100, device.Seconds(0, 100));
  double total = 0;
  int64_t num_tokens = 0;
  for (int i = 0; i < 1000; ++i) {
    num_tokens += pacer.PrefillTokens(10, kMany);
    EXPECT_LE(pacer.PrefillTokens(10, kMany), 1);
    total += RunStep(pacer, device, 10);
  }
  EXPECT_LE(total, 1000 * device.Seconds(10, 0) / 0.7 * 1.01);
  EXPECT_GT(num_tokens, 300);
}

TEST(StepPacer, AStallHoldsPromptsUpForAFewStepsOnly) {
  const Device device;
  StepPacer pacer(0.7);
  for (int i = 0; i < 5; ++i) RunStep(pacer, device, 10);
  pacer.OnStep(10, 50, 30);
  int num_steps = 0;
  while (pacer.PrefillTokens(10, kMany) < 20) {
    RunStep(pacer, device, 10);
    ASSERT_LT(++num_steps, 200);
  }
}

TEST(StepPacer, DecodesThatBecomeSlowerAreMeasuredAnew) {
  Device device;
  StepPacer pacer(0.7);
  for (int i = 0; i < 10; ++i) RunStep(pacer, device, 10);
  const int64_t before = pacer.PrefillTokens(10, kMany);
  device.fixed = 0.060;
  for (int i = 0; i < 5000; ++i) RunStep(pacer, device, 10);
  int64_t after = 0;
  for (int i = 0; i < 70; ++i) {
    after = std::max(after, pacer.PrefillTokens(10, kMany));
    RunStep(pacer, device, 10);
  }
  EXPECT_GT(after, 2 * before);
}

}  // namespace
}  // namespace fathom::scheduler
