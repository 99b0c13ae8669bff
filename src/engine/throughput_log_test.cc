#include "engine/throughput_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom::engine {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

// What Update writes to the log at `now`.
std::string Written(ThroughputLog& log, TimePoint now, uint64_t prompt, uint64_t generation) {
  testing::internal::CaptureStderr();
  log.Update(now, prompt, generation, {.num_running = 2, .num_waiting = 1, .kv_cache_usage = 0.25});
  return testing::internal::GetCapturedStderr();
}

TEST(ThroughputLog, SaysTheAveragesOfTheLastTenSeconds) {
  ThroughputLog log;
  const TimePoint start = TimePoint() + seconds(1000);
  log.Restart(start, 500, 700);
  EXPECT_EQ(Written(log, start + seconds(9), 900, 800), "");
  EXPECT_THAT(Written(log, start + seconds(10), 1500, 800),
              HasSubstr("Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 10.0 "
                        "tokens/s, Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 25.0%"));
  EXPECT_EQ(Written(log, start + seconds(19), 1600, 900), "");
  EXPECT_THAT(Written(log, start + seconds(20), 1500, 1000), HasSubstr("throughput: 20.0"));
}

}  // namespace
}  // namespace fathom::engine
