// StepBench: steps of a model, prefill chunks and decodes, on KV pools of its own that nobody
// computed: made-up contents on a GPU, zeros on a CPU. Every step runs on all ranks of the session,
// which are of one process, each enqueued by a thread of its own; operators are timed on the first.
// Data ranks take sequences in turn. Owned by a bench command; main thread. The session outlives
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "apps/fathom/bench/rank_threads.h"
#include "apps/fathom/model_session.h"
#include "base/status.h"
#include "device/device.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"
#include "model/roofline.h"
#include "runtime/device_batch.h"

namespace fathom::app {

// How many distinct experts each layer chose in a step.
using ExpertCounts = std::vector<int>;
double MeanExperts(const ExpertCounts& counts);

// The least that a rank of every stage does in a step of all sequences: of the session's model, or
// of some of its layers.
std::vector<model::ProductCost> CostsOfRank(const ModelSession& session,
                                            const config::ModelConfig& config,
                                            const kv_cache::KvLayout& layout,
                                            model::StepShape shape);

class StepBench {
 public:
  // Pools for `num_seqs` sequences of up to `max_tokens` tokens. kOutOfMemory.
  static Result<std::unique_ptr<StepBench>> Make(const ModelSession& session, int num_seqs,
                                                 int64_t max_tokens);

  // Every sequence stands at `context` tokens from now on, wherever it was; steps follow on that.
  Status Rewind(int64_t context);
  // Makes the host's side of a step of the sequences first_seq... Every sequence's last token gives
  // logits.
  void Prepare(const model::StepShape& shape, int first_seq = 0);
  // Enqueues the step that was prepared; again and again, if wanted.
  Status Forward(model::ChoiceRecorder* recorder = nullptr);
  Status Synchronize();
  // Prepare, Forward and Synchronize; what the layers chose.
  Result<ExpertCounts> CountExperts(const model::StepShape& shape, int first_seq = 0);

  device::Stream& stream() { return *pools_.front().stream; }
  // Of the whole model's layers.
  const kv_cache::KvLayout& layout() const { return layout_; }
  const ModelSession& session() const { return session_; }

 private:
  // Of one rank.
  struct Pools {
    kv_cache::KvLayout layout;
    device::Buffer blocks, window_pages, state_slots, logits;
    std::unique_ptr<device::Stream> stream;

    model::KvCacheView kv() const {
      return {blocks.data(), window_pages.data(), state_slots.data()};
    }
  };

  explicit StepBench(const ModelSession& session);
  size_t num_data_ranks() const { return batches_.size(); }
  Result<Pools> AllocatePools(const SessionRank& rank, int all_seqs) const;
  request::BlockTable Table(int seq, int64_t begin, int64_t end);
  std::vector<model::ForwardBatch> Views();
  Status ForwardOn(size_t rank, const model::ForwardBatch& batch, model::ChoiceRecorder* recorder);

  const ModelSession& session_;
  const kv_cache::KvLayout layout_;
  int64_t blocks_per_seq_ = 0;
  std::vector<Pools> pools_;  // of each rank
  RankThreads threads_;
  // The window pages that each sequence holds: [seq][place] is the page's number, or -1.
  std::vector<std::vector<int64_t>> pages_;
  // The step, of each data rank.
  std::vector<runtime::DeviceBatch> batches_;
  std::vector<int32_t> data_rank_tokens_;
  bool is_decode_ = false;
  std::vector<int32_t> tokens_;  // of one sequence
};

// What a decode step of `num_seqs` sequences takes on the device when the host is ahead,
// microseconds: the mean of the four at and about `context`, as every fourth completes entries.
Result<double> DecodeDeviceUs(StepBench& bench, int num_seqs, int64_t context);

}  // namespace fathom::app
