// A small random model and a cache for it, for tests: sequences run in any chunks, alone or in a
// batch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "device/device.h"
#include "model/deepseek_v4_cuda.h"
#include "model/model.h"
#include "model/weights.h"

namespace fathom::model {

// Window, C4 and C128 layers, hash and score routing, an indexer that has to choose.
config::ModelConfig SmallConfig();

// One sequence's place in the cache: contiguous blocks and window pages of its own.
struct TestSequence {
  std::vector<int32_t> token_ids;
  int32_t num_computed = 0;
  int index = 0;                           // names its blocks, pages and state slot
  std::vector<std::vector<float>> logits;  // one row a computed token
};

class TestModel {
 public:
  TestModel(const config::ModelConfig& config, config::Numerics numerics, int num_threads,
            int max_seqs = 4, int max_len = 1200,
            kv_cache::IndexKeyDType index_dtype = kv_cache::IndexKeyDType::kFp4,
            const checkpoint::TensorSource* weights = nullptr,  // null: synthetic ones
            std::unique_ptr<device::Device> gpu = nullptr,      // null: the CPU
            const CudaModelOptions& options = {},
            const ModelRank& rank = {});  // config and weights are the whole model's
  static ModelLimits Limits(int max_seqs, int max_len);

  TestSequence Add(std::vector<int32_t> token_ids);
  // One step: the next counts[i] tokens of each sequence, appended to their logits (of the last
  // stage's ranks; elsewhere they mean nothing). `data_rank_tokens`, `data_ranks_decode`: as
  // ForwardBatch's.
  void Step(std::span<TestSequence* const> sequences, std::span<const int> counts,
            ChoiceRecorder* recorder = nullptr, std::span<const int32_t> data_rank_tokens = {},
            bool data_ranks_decode = false);
  // From now on only the last token of each sequence's step has logits.
  void set_last_logits_only() { last_logits_only_ = true; }
  // Runs to the end in chunks of at most `chunk`.
  void RunInChunks(TestSequence& sequence, int chunk);
  // Gives `to` the cache and the progress of `from`, which is `source`'s, of the same lengths; its
  // tokens stay.
  void CopyCache(const TestModel& source, const TestSequence& from, TestSequence& to);
  // Takes tokens back, as a rejected draft does.
  void Rollback(TestSequence& sequence, int32_t num_tokens);

  const config::ModelConfig& config() const { return config_; }
  // Of the last step: [layers, tokens, experts per token].
  const std::vector<int32_t>& expert_ids() const { return expert_ids_; }

 private:
  config::ModelConfig config_;
  kv_cache::KvLayout layout_;
  int max_blocks_;
  int max_pages_;
  int next_index_ = 0;
  bool last_logits_only_ = false;
  std::vector<int32_t> expert_ids_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<DeepSeekV4> model_;
  device::Buffer blocks_, pages_, slots_, logits_;
};

std::vector<int32_t> RandomTokens(const config::ModelConfig& config, int count, uint32_t seed);

}  // namespace fathom::model
