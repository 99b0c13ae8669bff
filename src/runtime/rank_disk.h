// RankDisk: what the ranks of this process have of the KV cache on disk. Tensor ranks have the same
// bytes: one file serves those of a stage. Used by the executor, when the copies of a step are done
// on all ranks.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kv_store/disk_store.h"
#include "request/scheduled_batch.h"
#include "runtime/kv_cache.h"

namespace fathom::runtime {

class RankDisk {
 public:
  // The ranks of a stage and a data rank.
  struct Part {
    size_t data_rank = 0;
    std::vector<const KvCache*> ranks;
  };
  // `parts` are the store's, in its order. The caches outlive this.
  RankDisk(std::unique_ptr<kv_store::DiskStore> store, std::vector<Part> parts);

  // A step's requests, of each data rank. Where no data rank has anything else to do it waits a
  // moment for an answer.
  void Submit(std::span<const request::ScheduledBatch> batches);
  // Adds what the disk has told, by data rank.
  void TakeEvents(std::span<request::StepResult> results);

 private:
  void Submit(size_t part, const request::KvStoreRequest& request);

  const std::vector<Part> parts_;
  const std::unique_ptr<kv_store::DiskStore> store_;
};

}  // namespace fathom::runtime
