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

StepLoad Load(int num_decodes, int64_t num_prefill_tokens = 0) {
  return {.num_decodes = num_decodes,
          .num_prefill_tokens = num_prefill_tokens,
          .num_waiting_sessions = 1};
}

// Runs a step with as many prompt tokens as the pacer allows; what it took.
double RunStep(StepPacer& pacer, const Device& device, int num_decodes, int64_t wanted = kMany) {
  const int64_t num_tokens = pacer.PrefillTokens(Load(num_decodes), wanted);
  const double seconds = device.Seconds(num_decodes, num_tokens);
  pacer.OnStep(Load(num_decodes, num_tokens), seconds);
  return seconds;
}

TEST(StepPacer, WithoutDecodesOrWithoutAFloorPromptsTakeAllTheyWant) {
  const StepPacer pacer(0.7);
  EXPECT_EQ(pacer.PrefillTokens(Load(0), 8192), 8192);
  const StepPacer without_floor(0);
  EXPECT_EQ(without_floor.PrefillTokens(Load(10), 8192), 8192);
}

TEST(StepPacer, MeasuresDecodesAloneBeforePromptsJoin) {
  const Device device;
  StepPacer pacer(0.7);
  pacer.OnStep(Load(0, 8192), device.Seconds(0, 8192));
  EXPECT_EQ(pacer.PrefillTokens(Load(10), kMany), 0);
  EXPECT_LT(pacer.DecodeSeconds(10), 0);
  RunStep(pacer, device, 10);
  EXPECT_GT(pacer.PrefillTokens(Load(10), kMany), 0);
  for (const int num_decodes : {10, 30, 1}) {
    EXPECT_DOUBLE_EQ(pacer.DecodeSeconds(num_decodes), device.Seconds(10, 0));
  }
  RunStep(pacer, device, 1, 0);
  EXPECT_DOUBLE_EQ(pacer.DecodeSeconds(9), device.Seconds(1, 0));
}

TEST(StepPacer, NoStepIsLongerThanTheFloorAllowsAndPromptsGetTheRest) {
  const Device device;
  for (const double floor : {0.5, 0.7, 0.9}) {
    StepPacer pacer(floor);
    pacer.OnStep(Load(0, 8192), device.Seconds(0, 8192));
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
  RunStep(pacer, device, 10, 0);
  pacer.OnStep(Load(0, 8192), device.Seconds(0, 8192));
  device.per_prefill_token *= 3;  // what so few tokens cost beside decodes
  const double solo = device.Seconds(10, 0);
  const double first = RunStep(pacer, device, 10);
  EXPECT_GT(first, solo / 0.7) << "planned with what tokens of a full step cost";
  double total = first;
  for (int i = 1; i < 200; ++i) {
    const double seconds = RunStep(pacer, device, 10);
    EXPECT_LE(seconds, solo / 0.7 * 1.001) << "step " << i;
    total += seconds;
  }
  EXPECT_LE(total, 200 * solo / 0.7 + StepPacer::kBurstSeconds);
  EXPECT_GE(total, 200 * solo * (1 + 0.85 * (1 / 0.7 - 1))) << "prompts are held up for nothing";
}

TEST(StepPacer, ATokenDearerThanAStepsShareRunsEverySoOften) {
  Device device;
  device.per_prefill_token = 0.02;  // as on a CPU: a share of 7.7 ms
  StepPacer pacer(0.7);
  RunStep(pacer, device, 1, 0);
  pacer.OnStep(Load(0, 100), device.Seconds(0, 100));
  double total = 0;
  int64_t num_tokens = 0;
  for (int i = 0; i < 1000; ++i) {
    num_tokens += pacer.PrefillTokens(Load(10), kMany);
    EXPECT_LE(pacer.PrefillTokens(Load(10), kMany), 1);
    total += RunStep(pacer, device, 10);
  }
  EXPECT_LE(total, 1000 * device.Seconds(10, 0) / 0.7 * 1.01 + StepPacer::kBurstSeconds);
  EXPECT_GT(num_tokens, 300);
}

TEST(StepPacer, AStallHoldsPromptsUpForAFewStepsOnly) {
  const Device device;
  StepPacer pacer(0.7);
  for (int i = 0; i < 5; ++i) RunStep(pacer, device, 10);
  pacer.OnStep(Load(10, 50), 30);
  int num_steps = 0;
  while (pacer.PrefillTokens(Load(10), kMany) < 20) {
    RunStep(pacer, device, 10);
    ASSERT_LT(++num_steps, 200);
  }
}

TEST(StepPacer, DecodesThatBecomeSlowerAreMeasuredAnew) {
  Device device;
  StepPacer pacer(0.7);
  for (int i = 0; i < 10; ++i) RunStep(pacer, device, 10);
  const int64_t before = pacer.PrefillTokens(Load(10), kMany);
  device.fixed = 0.060;
  for (int i = 0; i < 5000; ++i) RunStep(pacer, device, 10);
  int64_t after = 0;
  for (int i = 0; i < 70; ++i) {
    after = std::max(after, pacer.PrefillTokens(Load(10), kMany));
    RunStep(pacer, device, 10);
  }
  EXPECT_GT(after, 2 * before);
}

// Where the first token of a prompt costs what a thousand do.
struct DearDevice {
  static double Seconds(int num_decodes, int64_t num_prefill_tokens) {
    const double decodes = 0.004 + 0.0008 * num_decodes;
    return num_prefill_tokens == 0 ? decodes
                                   : 0.080 + 4e-5 * static_cast<double>(num_prefill_tokens);
  }
};

TEST(StepPacer, WhereSmallChunksAreDearPromptsRunInLargeStepsAndPayThemBack) {
  StepPacer pacer(0.7);
  pacer.OnStep(Load(0, 900), DearDevice::Seconds(0, 900));
  double total = 0;
  int64_t num_tokens = 0;
  int num_mixed = 0, num_small = 0;
  for (int i = 0; i < 2000; ++i) {
    const int64_t chunk = pacer.PrefillTokens(Load(10), 2048);
    const double seconds = DearDevice::Seconds(10, chunk);
    pacer.OnStep(Load(10, chunk), seconds);
    total += seconds;
    num_tokens += chunk;
    num_mixed += chunk > 0 ? 1 : 0;
    num_small += chunk > 0 && chunk < 1000 ? 1 : 0;
  }
  const double solo = 2000 * DearDevice::Seconds(10, 0);
  EXPECT_LE(total, solo / 0.7 + StepPacer::kBurstSeconds + 0.2);
  EXPECT_GE(static_cast<double>(num_tokens) / total,
            0.75 * 0.3 * 2048 / DearDevice::Seconds(0, 2048));
  EXPECT_LE(num_small, 3 + num_mixed / 100) << "what was found dear is tried again now and then";
}

TEST(StepPacer, WhatPromptsLeftUnusedTheyMayTakeAtOnce) {
  StepPacer pacer(0.7);
  pacer.OnStep(Load(0, 2048), DearDevice::Seconds(0, 2048));
  pacer.OnStep(Load(1, 10), DearDevice::Seconds(1, 10));  // dear
  for (int i = 0; i < 500; ++i) pacer.OnStep(Load(1), DearDevice::Seconds(1, 0));
  double burst = 0;
  while (const int64_t chunk = pacer.PrefillTokens(Load(1), 2048)) {
    const double seconds = DearDevice::Seconds(1, chunk);
    pacer.OnStep(Load(1, chunk), seconds);
    burst += seconds;
  }
  EXPECT_GE(burst, StepPacer::kBurstSeconds);
  EXPECT_LE(burst, StepPacer::kBurstSeconds + DearDevice::Seconds(1, 2048));
  // A step in flight counts before its duration is known.
  for (int i = 0; i < 500; ++i) pacer.OnStep(Load(1), DearDevice::Seconds(1, 0));
  EXPECT_GT(pacer.PrefillTokens(Load(1), 2048, 2048), 0);
  EXPECT_EQ(pacer.PrefillTokens(Load(1), 2048, 10 * 2048), 0);
}

TEST(StepPacer, ManyThatWaitTakeNoMoreThanOneWould) {
  StepPacer pacer(0.7);
  for (int i = 0; i < 5; ++i) pacer.OnStep(Load(1), DearDevice::Seconds(1, 0));
  double total = 0;
  for (int i = 0; i < 2000; ++i) {
    StepLoad load = Load(1);
    load.num_waiting_sessions = 14;
    load.num_prefill_tokens = pacer.PrefillTokens(load, 2048);
    const double seconds = DearDevice::Seconds(1, load.num_prefill_tokens);
    pacer.OnStep(load, seconds);
    total += seconds;
  }
  const double solo = 2000 * DearDevice::Seconds(1, 0);
  EXPECT_LE(total, solo / 0.7 + StepPacer::kBurstSeconds + 0.2);
  EXPECT_GE(total, 0.95 * solo / 0.7);
}

}  // namespace
}  // namespace fathom::scheduler
