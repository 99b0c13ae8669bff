#include "base/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom {
namespace {

using testing::HasSubstr;

TEST(Metrics, CountersEndInTotalAndKeepTheirLabels) {
  MetricsRegistry registry;
  registry.AddCounter("vllm:request_success", "Finished requests", {{"finished_reason", "stop"}})
      .Increment(3);
  registry.AddCounter("vllm:request_success", "Finished requests", {{"finished_reason", "stop"}})
      .Increment();
  EXPECT_THAT(registry.ExposeText(),
              HasSubstr("# TYPE vllm:request_success_total counter\n"
                        "vllm:request_success_total{finished_reason=\"stop\"} 4\n"));
}

TEST(Metrics, HistogramBucketsAreCumulativeAndBoundsInclusive) {
  MetricsRegistry registry;
  Histogram& histogram = registry.AddHistogram("ttft_seconds", "First token", {0.5, 1});
  histogram.Observe(0.5);
  histogram.Observe(0.75);
  histogram.Observe(9);
  EXPECT_THAT(registry.ExposeText(), HasSubstr("ttft_seconds_bucket{le=\"0.5\"} 1\n"
                                               "ttft_seconds_bucket{le=\"1\"} 2\n"
                                               "ttft_seconds_bucket{le=\"+Inf\"} 3\n"
                                               "ttft_seconds_sum 10.25\n"
                                               "ttft_seconds_count 3\n"));
}

TEST(Metrics, LabelValuesAreEscaped) {
  MetricsRegistry registry;
  registry.AddGauge("g", "h", {{"model_name", "a\"b\\c\nd"}}).Set(1);
  EXPECT_THAT(registry.ExposeText(), HasSubstr("g{model_name=\"a\\\"b\\\\c\\nd\"} 1\n"));
}

}  // namespace
}  // namespace fathom
