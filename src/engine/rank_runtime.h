// What MakeEngine and RunFollower share: from a process' ranks to an executor that runs steps on
// them, and what the nodes tell each other before the first step.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/kv_plan.h"
#include "engine/make_engine.h"
#include "engine/step_codec.h"
#include "kv_store/disk_store.h"
#include "runtime/local_executor.h"

namespace fathom::engine {

// kInvalidArgument: limits that contradict each other.
Status CheckOptions(const EngineOptions& options);

std::vector<RankMemory> MemoryOf(const EngineOptions& options,
                                 const std::vector<EngineRank>& ranks);

// The logits of a step: a row for each sequence, and some for prompt log-probabilities.
int MaxLogitsRows(const EngineOptions& options);

// Whether there is a tier below host memory.
bool KeepsOnDisk(const EngineOptions& options, const KvPlan& plan);

// The folders of this process' ranks in options.kv.disk_directory, one for each stage and data
// rank. Null where nothing is kept there. plan.disk_key: node 0's, for the others.
Result<std::unique_ptr<kv_store::DiskStore>> OpenDisk(const EngineOptions& options,
                                                      const KvPlan& plan,
                                                      const std::vector<EngineRank>& ranks,
                                                      int num_nodes);

// Allocates the ranks' KV caches. `disk` may be null.
Result<std::unique_ptr<runtime::LocalExecutor>> MakeLocalExecutor(
    const EngineOptions& options, const KvPlan& plan, const std::vector<EngineRank>& ranks,
    int max_in_flight, std::unique_ptr<kv_store::DiskStore> disk);

StepLimits StepLimitsOf(const EngineOptions& options, const KvPlan& plan);

// Between nodes: what a node's ranks have, to node 0, and what all make of it. Decoding checks
// everything against what the options and the node's own memory allow: kPeer.
std::string EncodeMemory(const std::vector<RankMemory>& ranks);
Result<std::vector<RankMemory>> DecodeMemory(std::string_view bytes, int num_ranks);
std::string EncodeKvPlan(const KvPlan& plan);
Result<KvPlan> DecodeKvPlan(std::string_view bytes, const EngineOptions& options,
                            const std::vector<RankMemory>& own);

}  // namespace fathom::engine
