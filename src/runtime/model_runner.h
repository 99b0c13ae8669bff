// ModelRunner: one step from plan to tokens: ScheduledBatch -> DeviceBatch -> forward -> Sampler ->
// StepResult. Owned by a Worker and used on its thread alone; the model and the device outlive it.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "kv_store/disk_store.h"
#include "model/model.h"
#include "request/scheduled_batch.h"
#include "runtime/device_batch.h"
#include "runtime/grammar_masks.h"
#include "runtime/kv_cache.h"
#include "runtime/logits_buffer.h"
#include "runtime/sampler.h"

namespace fathom::runtime {

struct ModelRunnerOptions {
  int vocab_size = 0;
  int max_logits_rows = 0;  // in one step
  std::vector<int32_t> eos_token_ids;
  int num_layers = 0;
  int num_experts_per_token = 0;
};

class ModelRunner {
 public:
  // `disk` keeps what the cache's host slots are written to; null: there is none.
  static Result<std::unique_ptr<ModelRunner>> Make(
      const ModelRunnerOptions& options, model::DeepSeekV4& model, KvCache kv_cache,
      device::Device& device, std::unique_ptr<kv_store::DiskStore> disk = nullptr);

  // An error is the device's, and the end of the runner; what fails one request is in its
  // SequenceResult.
  Result<request::StepResult> Run(const request::ScheduledBatch& batch);

 private:
  ModelRunner(const ModelRunnerOptions& options, model::DeepSeekV4& model, KvCache kv_cache,
              std::unique_ptr<device::Stream> stream, LogitsBuffer logits,
              std::unique_ptr<kv_store::DiskStore> disk);
  Status RunForward(const request::ScheduledBatch& batch);
  Status RunStore(const request::KvTransfers& transfers, request::StepResult& result);
  void FillBatch(const request::ScheduledBatch& batch);
  void StartMasks(const request::ScheduledBatch& batch);
  void ComputePromptLogprobs(const request::ScheduledBatch& batch, request::StepResult& result);
  size_t NumExpertsPerRow() const {
    return static_cast<size_t>(num_layers_) * static_cast<size_t>(num_experts_per_token_);
  }
  void ReportExperts(const request::ScheduledBatch& batch, request::StepResult& result) const;
  void SampleTokens(const request::ScheduledBatch& batch, request::StepResult& result);

  const int num_layers_;
  const int num_experts_per_token_;
  model::DeepSeekV4& model_;
  KvCache kv_cache_;
  std::unique_ptr<device::Stream> stream_;
  ThreadPool* const thread_pool_;  // null on a GPU
  LogitsBuffer logits_;
  Sampler sampler_;
  GrammarMasks masks_;
  DeviceBatch device_batch_;
  std::vector<size_t> first_row_;    // of each sequence, among the logits rows
  std::vector<int32_t> expert_ids_;  // [layers, T, experts per token]; empty: nobody asked
  // Last: its threads use the cache's host slots.
  std::unique_ptr<kv_store::DiskStore> disk_;
};

}  // namespace fathom::runtime
