// Metrics registry: counters, gauges and histograms with Prometheus names and labels. Updating is
// lock-free and may happen on any thread; handles live as long as the registry. The text exposition
// is ExposeText().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fathom {

using MetricLabels = std::vector<std::pair<std::string, std::string>>;

class Counter {
 public:
  void Increment(uint64_t by = 1) { value_.fetch_add(by, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

class Gauge {
 public:
  void Set(double value) { value_.store(value, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

class Histogram {
 public:
  explicit Histogram(std::vector<double> upper_bounds);  // ascending; +Inf is implied
  void Observe(double value);
  const std::vector<double>& upper_bounds() const { return upper_bounds_; }
  uint64_t bucket_count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  std::vector<double> upper_bounds_;
  std::vector<std::atomic<uint64_t>> counts_;  // one per bound, then +Inf; not cumulative
  std::atomic<double> sum_{0};
};

class MetricsRegistry {
 public:
  // Same name and labels: the same object. The help text of the first call for a name is kept.
  Counter& AddCounter(const std::string& name, const std::string& help, MetricLabels labels = {});
  Gauge& AddGauge(const std::string& name, const std::string& help, MetricLabels labels = {});
  Histogram& AddHistogram(const std::string& name, const std::string& help,
                          std::vector<double> upper_bounds, MetricLabels labels = {});
  // Prometheus text format 0.0.4. Counters are exposed with the _total suffix.
  std::string ExposeText() const;

 private:
  struct Family;
  struct Series;
  Series& FindOrAdd(const std::string& name, const std::string& help, const char* type,
                    MetricLabels labels);

  mutable std::mutex mutex_;  // guards families_; the metrics themselves are atomic
  std::vector<std::unique_ptr<Family>> families_;

 public:
  MetricsRegistry();
  ~MetricsRegistry();
};

}  // namespace fathom
