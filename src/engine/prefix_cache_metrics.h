// PrefixCacheMetrics: what the prefix cache counts, for the registry: vLLM's names where it has
// them (tokens asked for and found), Fathom's own for tiers and evictions. The engine's thread
// writes.
#pragma once

#include <utility>
#include <vector>

#include "base/metrics.h"
#include "kv_cache/prefix_cache.h"

namespace fathom::engine {

class PrefixCacheMetrics {
 public:
  PrefixCacheMetrics(MetricsRegistry& registry, const MetricLabels& labels);

  void Set(const kv_cache::PrefixCacheStats& stats);

 private:
  using Field = uint64_t kv_cache::PrefixCacheStats::*;
  kv_cache::PrefixCacheStats last_;
  Counter& hits_;
  std::vector<std::pair<Counter*, Field>> counters_;
  Gauge& disk_bytes_;
  Gauge& disk_on_;
};

}  // namespace fathom::engine
