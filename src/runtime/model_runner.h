// ModelRunner: one step from plan to tokens: ScheduledBatch -> DeviceBatch -> forward -> Sampler ->
// StepResult. Owned by a Worker and used on its thread alone; the model and the device outlive it.
//
// On a GPU a step is enqueued, sampled there (device_sampler.h), and its result is waited for
// later, so that the next step can be enqueued behind it; its pending tokens never leave the
// device. What only the host can do (prompt log-probabilities, many best tokens, the experts) is
// done in Launch, for its rows alone. On a CPU all of a step is run in Launch.
//
// Of the ranks that run one batch, one tells the results. The others run the same forward; where
// steps are planned ahead they also choose the same tokens, for the next step's forward.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "model/model.h"
#include "request/scheduled_batch.h"
#include "runtime/device_batch.h"
#include "runtime/device_sampler.h"
#include "runtime/grammar_masks.h"
#include "runtime/kv_cache.h"
#include "runtime/logits_buffer.h"
#include "runtime/sampler.h"

namespace fathom::runtime {

// What a rank makes of a step's logits.
enum class Sampling {
  kResults,  // what was asked for
  // The tokens that the next step may need before its plan has them: of all sequences but those
  // with a constraint, which is another rank's to hold. The results are nobody's.
  kTokens,
  kNone,  // nothing: the plan has all tokens
};

struct ModelRunnerOptions {
  int vocab_size = 0;
  int max_logits_rows = 0;  // in one step
  std::vector<int32_t> eos_token_ids;
  int num_layers = 0;
  int num_experts_per_token = 0;
  Sampling sampling = Sampling::kResults;
};

class ModelRunner {
 public:
  static Result<std::unique_ptr<ModelRunner>> Make(const ModelRunnerOptions& options,
                                                   model::DeepSeekV4& model, KvCache kv_cache,
                                                   device::Device& device);

  ~ModelRunner();  // waits for what was launched

  // Before the first Launch; all ranks at once. How many steps of decodes were made ready.
  int CaptureDecodes();

  // Steps that may be launched and not collected.
  static constexpr int kMaxInFlight = DeviceSampler::kNumPlaces;

  // Starts a step behind those that were started; a pending token is what the one before samples.
  // The batch lives until its Collect, what it views until the Collect of the step before, or until
  // Launch returns when there is none. An error is the device's, and the end of the runner.
  Status Launch(const request::ScheduledBatch& batch);
  // Waits for the oldest step. An error as above; what fails one request is in its SequenceResult.
  Result<request::StepResult> Collect();

  // Both: one step.
  Result<request::StepResult> Run(const request::ScheduledBatch& batch);

  // For its host slots; any thread.
  const KvCache& kv_cache() const { return kv_cache_; }

 private:
  struct Step {
    const request::ScheduledBatch* batch = nullptr;
    int place = 0;
    request::StepResult result;             // what the host did
    std::vector<size_t> on_device;          // the sequences of the device's rows
    std::vector<size_t> on_host;            // those that the host samples
    std::vector<GrammarMasks::Mask> masks;  // of each sequence; empty for one that samples nothing
    // Nothing is sampled yet: a choice depends on a token of the step before, which is not known.
    bool is_late = false;
    std::vector<std::vector<int32_t>> histories;  // of each sequence, see HistoryOf
  };
  ModelRunner(const ModelRunnerOptions& options, model::DeepSeekV4& model, KvCache kv_cache,
              std::unique_ptr<device::Stream> stream, LogitsBuffer logits,
              std::unique_ptr<DeviceSampler> device_sampler);
  Status LaunchStep(const request::ScheduledBatch& batch);
  // A device's error with the step's shapes, and what of it had begun, if that is known.
  Status NameStep(const Status& status, const request::ScheduledBatch& batch) const;
  Status RunForward(const request::ScheduledBatch& batch, Step& step);
  bool Samples(const request::ScheduledSequence& s) const;
  bool ReportsExperts(const request::ScheduledBatch& batch) const;
  void FillBatch(const request::ScheduledBatch& batch);
  void AddPendingToken(const request::ScheduledSequence& s);
  size_t SampleRowOf(const request::ScheduledBatch& batch, size_t i) const;
  Status AddDeviceRows(Step& step);
  Status FetchHostRows(const Step& step);
  void KeepSampled(const Step& step);
  Status Sample(Step& step);
  bool NeedsTokensOfTheDevice(const request::ScheduledBatch& batch) const;
  Status SampleLate(Step& step, const request::StepResult& before);
  std::span<const int32_t> HistoryOf(const Step& step, size_t i) const;
  void StartMasks(Step& step);
  void ComputePromptLogprobs(const request::ScheduledBatch& batch, request::StepResult& result);
  size_t NumExpertsPerRow() const {
    return static_cast<size_t>(num_layers_) * static_cast<size_t>(num_experts_per_token_);
  }
  void ReportExperts(const request::ScheduledBatch& batch, request::StepResult& result) const;
  void SampleOnHost(Step& step);

  const Sampling sampling_;
  const int num_layers_;
  const int num_experts_per_token_;
  model::DeepSeekV4& model_;
  KvCache kv_cache_;
  std::unique_ptr<device::Stream> stream_;
  ThreadPool* const thread_pool_;  // null on a GPU
  LogitsBuffer logits_;
  Sampler sampler_;
  const std::unique_ptr<DeviceSampler> device_sampler_;  // null: the host samples all
  GrammarMasks masks_;
  DeviceBatch device_batch_;
  std::vector<size_t> first_row_;    // of each sequence, among the logits rows
  std::vector<int32_t> expert_ids_;  // [layers, T, experts per token]; empty: nobody asked

  std::deque<Step> steps_;  // launched, oldest first
  int place_ = 0;           // of the newest step, of kMaxInFlight
  std::array<std::unique_ptr<device::Event>, kMaxInFlight> ended_;  // of each place
  // What the newest step samples: the token, or where the device has it.
  struct Sampled {
    int32_t token_id = request::kPendingToken;
    int32_t device_row = -1;
  };
  std::unordered_map<request::RequestId, Sampled> sampled_;
};

}  // namespace fathom::runtime
