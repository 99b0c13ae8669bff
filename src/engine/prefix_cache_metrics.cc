#include "engine/prefix_cache_metrics.h"

namespace fathom::engine {

using kv_cache::PrefixCacheStats;

PrefixCacheMetrics::PrefixCacheMetrics(MetricsRegistry& registry, const MetricLabels& labels)
    : hits_(registry.AddCounter("vllm:prefix_cache_hits",
                                "Prompt tokens found in the prefix cache.", labels)),
      disk_bytes_(
          registry.AddGauge("fathom:kv_disk_bytes", "Bytes of the KV cache on disk.", labels)),
      disk_on_(registry.AddGauge("fathom:kv_disk_on",
                                 "1 while the KV cache's disk works, 0 when it failed or there is "
                                 "none.",
                                 labels)) {
  const auto add = [&](const char* name, const char* help, const MetricLabels& more, Field field) {
    MetricLabels all = labels;
    all.insert(all.end(), more.begin(), more.end());
    counters_.emplace_back(&registry.AddCounter(name, help, std::move(all)), field);
  };
  add("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", {},
      &PrefixCacheStats::query_tokens);
  const char* hits = "fathom:prefix_cache_hits_by_tier";
  const char* hits_help = "Prompt tokens found in the prefix cache, by where they were.";
  add(hits, hits_help, {{"tier", "device"}}, &PrefixCacheStats::device_hit_tokens);
  add(hits, hits_help, {{"tier", "host"}}, &PrefixCacheStats::host_hit_tokens);
  add(hits, hits_help, {{"tier", "disk"}}, &PrefixCacheStats::disk_hit_tokens);
  const char* evictions = "fathom:kv_evictions";
  const char* evictions_help = "What the KV cache gave up, by what it was and why.";
  const auto evicted = [&](const char* kind, const char* reason, Field field) {
    add(evictions, evictions_help, {{"kind", kind}, {"reason", reason}}, field);
  };
  evicted("block", "device_full", &PrefixCacheStats::evicted_device_blocks);
  evicted("snapshot", "device_full", &PrefixCacheStats::evicted_device_snapshots);
  evicted("tail", "device_full", &PrefixCacheStats::evicted_tails);
  evicted("block", "host_full", &PrefixCacheStats::evicted_host_blocks);
  evicted("snapshot", "host_full", &PrefixCacheStats::evicted_host_snapshots);
  evicted("record", "disk_full", &PrefixCacheStats::evicted_disk_records);
  evicted("record", "damaged", &PrefixCacheStats::lost_disk_records);
  const char* written = "fathom:kv_bytes_written";
  const char* written_help = "Bytes of the KV cache written to a lower tier.";
  add(written, written_help, {{"tier", "host"}}, &PrefixCacheStats::host_bytes_written);
  add(written, written_help, {{"tier", "disk"}}, &PrefixCacheStats::disk_bytes_written);
}

void PrefixCacheMetrics::Set(const PrefixCacheStats& stats) {
  const auto hits = [](const PrefixCacheStats& s) {
    return s.device_hit_tokens + s.host_hit_tokens + s.disk_hit_tokens;
  };
  hits_.Increment(hits(stats) - hits(last_));
  for (const auto& [counter, field] : counters_) counter->Increment(stats.*field - last_.*field);
  disk_bytes_.Set(static_cast<double>(stats.disk_bytes_used));
  disk_on_.Set(stats.disk_on ? 1 : 0);
  last_ = stats;
}

}  // namespace fathom::engine
