#include "engine/rank_runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "runtime/kv_cache.h"

namespace fathom::engine {
namespace {

Result<runtime::KvCache> MakeKvCache(const EngineOptions& options, const KvPlan& plan,
                                     const EngineRank& rank) {
  runtime::HostPoolSizes host;
  if (plan.host.num_blocks > 0) {
    host = {
        .num_blocks = plan.host.num_blocks,
        .num_snapshots = plan.host.num_snapshots,
        .snapshot_bytes = kv_cache::SnapshotBytesWithPages(rank.layout, options.sliding_window)};
  }
  ASSIGN_OR_RETURN(auto cache, runtime::KvCache::Make(rank.layout, plan.pools, *rank.device, host));
  const std::string name =
      options.parallel.world_size() == 1
          ? ""
          : fmt::format(" of rank {}", config::RankOf(options.parallel, rank.place));
  LogInfo("KV cache{}: {} blocks of {} tokens, {}", name, plan.pools.num_blocks,
          kv_cache::kBlockTokens, kv_cache::DescribePools(rank.layout, plan.pools));
  if (cache.host_bytes() > 0) {
    LogInfo("KV cache{} in host memory: {} MiB; on disk: {}", name, cache.host_bytes() >> 20,
            options.kv.disk_directory.empty() ? "none" : options.kv.disk_directory);
  }
  return cache;
}

// So that no step waits for it; each rank on a thread.
void CaptureDecodes(const std::vector<runtime::LocalExecutor::Rank>& ranks) {
  const SystemClock clock;
  const TimePoint begin = clock.Now();
  std::atomic<int> num_captured = 0;
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) {
    threads.emplace_back([&] { num_captured = rank.runner->CaptureDecodes(); });
  }
  for (std::thread& thread : threads) thread.join();
  if (num_captured == 0) return;
  LogInfo("captured {} steps of decodes in {:.2f} s", num_captured.load(),
          Seconds(clock.Now() - begin));
}

// The ranks of this process that have the same KV cache: the tensor ranks of a stage and a data
// rank, which follow each other.
std::vector<std::span<const EngineRank>> GroupByStage(const std::vector<EngineRank>& ranks) {
  const auto same = [](const EngineRank& a, const EngineRank& b) {
    return a.place.pipeline == b.place.pipeline && a.place.data == b.place.data;
  };
  std::vector<std::span<const EngineRank>> groups;
  for (size_t begin = 0, i = 1; i <= ranks.size(); ++i) {
    if (i < ranks.size() && same(ranks[begin], ranks[i])) continue;
    groups.push_back(std::span(ranks).subspan(begin, i - begin));
    begin = i;
  }
  return groups;
}

// Who has the same bytes finds them again, however many tensor ranks there are. Processes of one
// host that share a directory have folders of their own.
std::string DiskFolder(const EngineOptions& options, const config::RankPlace& first) {
  const int num_stages = options.parallel.pipeline_parallel_size;
  std::string name = options.kv.model_fingerprint;
  if (num_stages > 1) name += fmt::format("-stage-{}-of-{}", first.pipeline, num_stages);
  if (first.data > 0) name += fmt::format("-data-{}", first.data);
  if (first.tensor > 0) name += fmt::format("-tensor-{}", first.tensor);
  return name;
}

std::unique_ptr<runtime::RankDisk> MakeRankDisk(
    const std::vector<EngineRank>& ranks, const std::vector<runtime::LocalExecutor::Rank>& local,
    std::unique_ptr<kv_store::DiskStore> store) {
  if (store == nullptr) return nullptr;
  std::vector<runtime::RankDisk::Part> parts;
  size_t next = 0;
  for (const auto& group : GroupByStage(ranks)) {
    runtime::RankDisk::Part& part = parts.emplace_back();
    part.data_rank = static_cast<size_t>(group.front().place.data);
    for (size_t i = 0; i < group.size(); ++i) {
      part.ranks.push_back(&local[next++].runner->kv_cache());
    }
  }
  return std::make_unique<runtime::RankDisk>(std::move(store), std::move(parts));
}

}  // namespace

int MaxLogitsRows(const EngineOptions& options) {
  constexpr int64_t kPromptLogitsBytes = int64_t{64} << 20;
  const int64_t row_bytes = int64_t{options.vocab_size} * static_cast<int64_t>(sizeof(float));
  const int64_t rows = options.limits.max_num_seqs + kPromptLogitsBytes / row_bytes;
  return static_cast<int>(std::min<int64_t>(rows, options.limits.max_batched_tokens));
}

Status CheckOptions(const EngineOptions& options) {
  const model::ModelLimits& limits = options.limits;
  if (limits.max_num_seqs < 1 || limits.max_model_len < 2 || options.max_queue < 0) {
    return InvalidArgument(
        fmt::format("--max-num-seqs must be at least 1, --max-model-len at least 2 and --max-queue "
                    "at least 0, got {}, {} and {}",
                    limits.max_num_seqs, limits.max_model_len, options.max_queue));
  }
  if (limits.max_batched_tokens < limits.max_num_seqs) {
    return InvalidArgument(fmt::format(
        "--max-num-batched-tokens is {}: it must be at least --max-num-seqs, which is {}",
        limits.max_batched_tokens, limits.max_num_seqs));
  }
  if (!(options.decode_floor >= 0 && options.decode_floor <= 0.95)) {
    return InvalidArgument(
        fmt::format("--decode-floor must be 0 to 0.95, got {}", options.decode_floor));
  }
  return OkStatus();
}

std::vector<RankMemory> MemoryOf(const EngineOptions& options,
                                 const std::vector<EngineRank>& ranks) {
  std::vector<RankMemory> memory;
  for (const EngineRank& rank : ranks) {
    memory.push_back(MemoryOf(options, rank.layout, *rank.device, static_cast<int>(ranks.size())));
  }
  return memory;
}

// The disk reads and writes host memory.
bool KeepsOnDisk(const EngineOptions& options, const KvPlan& plan) {
  return !options.kv.disk_directory.empty() && options.kv.disk_bytes > 0 &&
         plan.host.num_blocks > 0;
}

Result<std::unique_ptr<kv_store::DiskStore>> OpenDisk(const EngineOptions& options,
                                                      const KvPlan& plan,
                                                      const std::vector<EngineRank>& ranks,
                                                      int num_nodes) {
  if (!KeepsOnDisk(options, plan)) return std::unique_ptr<kv_store::DiskStore>();
  const KvTierOptions& kv = options.kv;
  kv_store::DiskStoreOptions disk{
      .directory = kv.disk_directory,
      .parts = {},
      .key = plan.disk_key,
      .write_bytes_per_second = (kv.disk_write_bytes_per_second + num_nodes - 1) / num_nodes};
  for (const auto& group : GroupByStage(ranks)) {
    const kv_cache::KvLayout& layout = group.front().layout;
    disk.parts.push_back(
        {.name = DiskFolder(options, group.front().place),
         .payload_bytes = {layout.block_bytes,
                           kv_cache::SnapshotBytesWithPages(layout, options.sliding_window)}});
  }
  return kv_store::DiskStore::Open(disk);
}

Result<std::unique_ptr<runtime::LocalExecutor>> MakeLocalExecutor(
    const EngineOptions& options, const KvPlan& plan, const std::vector<EngineRank>& ranks,
    int max_in_flight, std::unique_ptr<kv_store::DiskStore> disk) {
  std::vector<runtime::LocalExecutor::Rank> local;
  for (const EngineRank& rank : ranks) {
    ASSIGN_OR_RETURN(auto kv_cache, MakeKvCache(options, plan, rank));
    ASSIGN_OR_RETURN(
        auto runner,
        runtime::ModelRunner::Make(
            {.vocab_size = options.vocab_size,
             .max_logits_rows = MaxLogitsRows(options),
             .eos_token_ids = options.eos_token_ids,
             .num_layers = options.num_layers,
             .num_experts_per_token = options.num_experts_per_token,
             .sampling = runtime::SamplingOf(options.parallel, rank.place, max_in_flight)},
            *rank.model, std::move(kv_cache), *rank.device));
    local.push_back(
        {.place = rank.place, .runner = std::move(runner), .transport = rank.transport});
  }
  CaptureDecodes(local);
  auto rank_disk = MakeRankDisk(ranks, local, std::move(disk));
  return std::make_unique<runtime::LocalExecutor>(options.parallel, std::move(local), max_in_flight,
                                                  std::move(rank_disk));
}

StepLimits StepLimitsOf(const EngineOptions& options, const KvPlan& plan) {
  return {.num_data_ranks = options.parallel.data_parallel_size,
          .vocab_size = options.vocab_size,
          .max_num_seqs = options.limits.max_num_seqs,
          .max_num_batched_tokens = options.limits.max_batched_tokens,
          .max_logits_rows = MaxLogitsRows(options),
          .max_model_len = plan.max_model_len,
          .sliding_window = options.sliding_window,
          .experts_per_token = options.num_layers * options.num_experts_per_token,
          .pools = plan.pools,
          .host = plan.host,
          .has_disk = plan.disk_key.has_value()};
}

}  // namespace fathom::engine
