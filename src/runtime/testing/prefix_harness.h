// PrefixHarness: one model on one device with the prefix cache, its memory and its disk around it,
// run by hand, for tests that compare a prefix from the cache with one that is computed. One
// thread. Failures are gtest's.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "kv_cache/prefix_cache.h"
#include "kv_store/disk_store.h"
#include "model/model.h"
#include "runtime/device_batch.h"
#include "runtime/kv_cache.h"

namespace fathom::runtime {

// What harnesses share: none of it remembers a sequence.
struct HarnessModel {
  config::ModelConfig config;
  kv_cache::KvLayout layout;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<model::DeepSeekV4> model;
  device::Buffer logits;  // [max_chunk, vocab_size]
  int max_chunk = 0;
};

// Official numerics with FP4 index keys, or fp32. A CUDA device gives the CUDA model, and without a
// source one of dummy weights.
Result<std::unique_ptr<HarnessModel>> LoadHarnessModel(const config::ModelConfig& config,
                                                       config::Numerics numerics,
                                                       const checkpoint::TensorSource* source,
                                                       std::unique_ptr<device::Device> device,
                                                       int max_chunk, int64_t max_model_len);

using LogitsRows = std::vector<std::vector<float>>;

class PrefixHarness {
 public:
  // Tokens that ran in one step, which need not be the sequence's own (drafts).
  struct Call {
    int64_t position = 0;
    std::vector<int32_t> token_ids;
  };
  struct Sequence {
    std::vector<int32_t> token_ids;
    int64_t num_computed = 0;
    int64_t num_cached = 0;
    kv_cache::SequenceKv kv = {};
    std::vector<Call> calls = {};
  };

  explicit PrefixHarness(HarnessModel& model) : model_(model) {}
  ~PrefixHarness();
  PrefixHarness(const PrefixHarness&) = delete;
  PrefixHarness& operator=(const PrefixHarness&) = delete;

  // Room for some 20 blocks, a snapshot at every boundary, device memory only.
  kv_cache::PrefixCacheOptions Options() const;

  // Empty caches whose memory is full of something else; the disk stays.
  void Restart(kv_cache::PrefixCacheOptions options);

  void Admit(Sequence& s);
  void Forward(Sequence& s, std::span<const int32_t> token_ids, LogitsRows* rows,
               model::ChoiceRecorder* recorder = nullptr);
  // From now on a step of one token is one of a prompt, not of decodes.
  void set_prompt_steps() { prompt_steps_ = true; }
  // The next tokens of the sequence, at most `most`, up to where the cache wants a chunk to end.
  void RunChunk(Sequence& s, int64_t most, LogitsRows* rows,
                model::ChoiceRecorder* recorder = nullptr);
  void RunToEnd(Sequence& s, int64_t chunk, LogitsRows* rows);
  void Release(Sequence& s) { cache_->Release(s.kv, s.token_ids, s.num_computed); }

  void RunTransfers();
  void Settle();  // until nothing is under way
  // Pushes everything else out of device memory.
  void FillDevice();

  kv_cache::PrefixCache& cache() { return *cache_; }

 private:
  int64_t SnapshotBytes() const;
  void FillWithGarbage(std::byte* data, int64_t bytes);

  HarnessModel& model_;
  kv_cache::PrefixCacheOptions options_;
  KvCache memory_;
  std::filesystem::path directory_;
  std::unique_ptr<kv_store::DiskStore> disk_;
  std::unique_ptr<kv_cache::PrefixCache> cache_;
  DeviceBatch batch_;
  bool prompt_steps_ = false;
  std::mt19937 random_{11};
};

}  // namespace fathom::runtime
