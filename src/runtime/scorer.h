// Scorer: runs given tokens through the model and shows the logits of every position: for `fathom
// score` and comparisons with oracles. Several sequences go together, each in chunks. No scheduler,
// no sampling. Owns a KV cache of its own; one thread; the model and the device outlive it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"
#include "runtime/device_batch.h"
#include "runtime/kv_cache.h"
#include "runtime/logits_buffer.h"

namespace fathom::runtime {

struct ScorerOptions {
  int vocab_size = 0;
  int sliding_window = 128;
  int chunk_tokens = 512;      // of each sequence in one step
  int num_seqs = 1;            // run together
  int64_t max_model_len = 0;   // the longest sequence
  int64_t kv_cache_bytes = 0;  // 0: what num_seqs sequences of max_model_len need
  model::ModelLimits limits;   // the model's
};

// A token of what is scored.
struct TokenPlace {
  size_t sequence_idx = 0;
  int64_t position = 0;
};

// Sees a run, on the caller's thread.
class ScoreVisitor {
 public:
  virtual ~ScoreVisitor() = default;
  // Before each forward: rows[r] is the token of the step's row r, as a ChoiceRecorder counts them.
  virtual void OnStep(std::span<const TokenPlace> /*rows*/) {}
  // After each forward, once for every row: its raw logits, [vocab]. Positions of a sequence
  // ascend.
  virtual void OnLogits(const TokenPlace& place, std::span<const float> logits) = 0;
};

class Scorer {
 public:
  // kInvalidArgument: chunk_tokens * num_seqs exceeds the model's limits; kOutOfMemory.
  static Result<std::unique_ptr<Scorer>> Make(const ScorerOptions& options,
                                              const kv_cache::KvLayout& layout,
                                              model::DeepSeekV4& model, device::Device& device);

  // Runs all sequences, num_seqs at a time. kInvalidArgument names a sequence that is empty, too
  // long or has a token outside the vocabulary; nothing is run then. `recorder` may be null.
  Status Run(std::span<const std::vector<int32_t>> sequences, ScoreVisitor& visitor,
             model::ChoiceRecorder* recorder);

 private:
  struct Running;  // one sequence of the group that runs
  Scorer(const ScorerOptions& options, const kv_cache::PoolSizes& sizes, model::DeepSeekV4& model,
         KvCache kv_cache, std::unique_ptr<device::Stream> stream, LogitsBuffer logits);
  Status Validate(std::span<const std::vector<int32_t>> sequences) const;
  Status RunStep(std::vector<Running>& group, ScoreVisitor& visitor,
                 model::ChoiceRecorder* recorder);

  const ScorerOptions options_;
  kv_cache::BlockPool pool_;
  model::DeepSeekV4& model_;
  KvCache kv_cache_;
  std::unique_ptr<device::Stream> stream_;
  LogitsBuffer logits_;
  DeviceBatch device_batch_;
};

}  // namespace fathom::runtime
