#include "runtime/model_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/logprobs.h"

namespace fathom::runtime {
namespace {

// How many of a sequence's tokens this step are followed by a prompt token whose log-probability
// was asked for. None when there is output already: then they have been reported, and the prompt
// runs again after a preemption.
size_t NumPromptLogprobs(const request::ScheduledSequence& s) {
  const size_t num_prompt_tokens = s.request->prompt_token_ids.size();
  if (!s.request->sampling.num_prompt_logprobs || s.is_pending() ||
      s.all_token_ids.size() > num_prompt_tokens) {
    return 0;
  }
  const auto begin = static_cast<size_t>(s.num_computed_tokens);
  return std::min(begin + s.token_ids.size(), num_prompt_tokens - 1) - begin;
}

bool WantsExperts(const request::ScheduledSequence& s) {
  return s.request->routed_experts_start.has_value();
}

ThreadPool* PoolOf(device::Stream& stream) {
  return stream.kind() == device::DeviceKind::kCpu ? &stream.thread_pool() : nullptr;
}

// Enough to have the masks of many sequences before a step of a few milliseconds ends.
int NumMaskThreads() { return std::clamp(NumUsableCores() / 2, 1, 8); }

}  // namespace

Result<std::unique_ptr<ModelRunner>> ModelRunner::Make(const ModelRunnerOptions& options,
                                                       model::DeepSeekV4& model, KvCache kv_cache,
                                                       device::Device& device) {
  ASSIGN_OR_RETURN(auto stream, device.MakeStream());
  ASSIGN_OR_RETURN(auto logits,
                   LogitsBuffer::Make(options.max_logits_rows, options.vocab_size, device));
  ASSIGN_OR_RETURN(auto sampler, DeviceSampler::Make(options.max_logits_rows, options.vocab_size,
                                                     options.eos_token_ids, device));
  std::unique_ptr<ModelRunner> runner(new ModelRunner(options, model, std::move(kv_cache),
                                                      std::move(stream), std::move(logits),
                                                      std::move(sampler)));
  for (auto& ended : runner->ended_) {
    ASSIGN_OR_RETURN(ended, device.MakeEvent());
  }
  return runner;
}

ModelRunner::ModelRunner(const ModelRunnerOptions& options, model::DeepSeekV4& model,
                         KvCache kv_cache, std::unique_ptr<device::Stream> stream,
                         LogitsBuffer logits, std::unique_ptr<DeviceSampler> device_sampler)
    : sampling_(options.sampling),
      num_layers_(options.num_layers),
      num_experts_per_token_(options.num_experts_per_token),
      model_(model),
      kv_cache_(std::move(kv_cache)),
      stream_(std::move(stream)),
      thread_pool_(PoolOf(*stream_)),
      logits_(std::move(logits)),
      sampler_(options.vocab_size, options.eos_token_ids, thread_pool_),
      device_sampler_(std::move(device_sampler)),
      masks_(options.vocab_size, options.sampling == Sampling::kResults ? NumMaskThreads() : 0) {}

// Nothing that the device still uses may be freed; an error has been reported, or will be.
ModelRunner::~ModelRunner() { (void)stream_->Synchronize(); }

int ModelRunner::CaptureDecodes() {
  const int32_t* sampled = device_sampler_ == nullptr ? nullptr : device_sampler_->token_ids();
  return model_.CaptureDecodes(kv_cache_.view(), logits_.device_data(), sampled, *stream_);
}

Result<request::StepResult> ModelRunner::Run(const request::ScheduledBatch& batch) {
  RETURN_IF_ERROR(Launch(batch));
  return Collect();
}

// A GPU that broke says so at some later call: the oldest step in flight is the one that broke it.
Status ModelRunner::Launch(const request::ScheduledBatch& batch) {
  const Status status = LaunchStep(batch);
  return NameStep(status, steps_.empty() ? batch : *steps_.front().batch);
}

Status ModelRunner::NameStep(const Status& status, const request::ScheduledBatch& batch) const {
  if (status.code() != StatusCode::kDevice) return status;
  int64_t longest = 0;
  for (const request::ScheduledSequence& s : batch.sequences) {
    longest = std::max(longest, s.num_computed_tokens + static_cast<int64_t>(s.token_ids.size()));
  }
  const std::string last_begun = model_.LastBegun();
  return DeviceError(
      fmt::format("a step of {} tokens of {} sequences, the longest of {} tokens, failed{}{}: {}",
                  batch.num_tokens(), batch.sequences.size(), longest,
                  last_begun.empty() ? "" : " in ", last_begun, status.message()));
}

Status ModelRunner::LaunchStep(const request::ScheduledBatch& batch) {
  CHECK_LT(steps_.size(), static_cast<size_t>(kMaxInFlight));
  RETURN_IF_ERROR(kv_cache_.Run(batch.transfers.copies, *stream_));
  place_ = (place_ + 1) % kMaxInFlight;
  Step step;
  step.batch = &batch;
  step.place = place_;
  step.result.step = batch.step;
  for (const request::ScheduledSequence& s : batch.sequences) {
    step.result.sequences.emplace_back().request_id = s.request_id;
  }
  const bool takes_part = std::any_of(batch.data_rank_tokens.begin(), batch.data_rank_tokens.end(),
                                      [](int32_t num_tokens) { return num_tokens > 0; });
  if (!batch.sequences.empty() || takes_part) RETURN_IF_ERROR(RunForward(batch, step));
  RETURN_IF_ERROR(ended_[static_cast<size_t>(step.place)]->Record(*stream_));
  steps_.push_back(std::move(step));
  return OkStatus();
}

Result<request::StepResult> ModelRunner::Collect() {
  CHECK(!steps_.empty());
  Step step = std::move(steps_.front());
  steps_.pop_front();
  RETURN_IF_ERROR(NameStep(ended_[static_cast<size_t>(step.place)]->Wait(), *step.batch));
  RETURN_IF_ERROR(model_.Health());
  for (size_t row = 0; row < step.on_device.size(); ++row) {
    const size_t i = step.on_device[row];
    device_sampler_->Read(step.place, row, *step.batch->sequences[i].request,
                          step.result.sequences[i]);
  }
  if (!steps_.empty() && steps_.front().is_late) {
    RETURN_IF_ERROR(NameStep(SampleLate(steps_.front(), step.result), *steps_.front().batch));
  }
  return std::move(step.result);
}

Status ModelRunner::RunForward(const request::ScheduledBatch& batch, Step& step) {
  FillBatch(batch);
  step.is_late = NeedsTokensOfTheDevice(batch);
  if (!step.is_late) StartMasks(step);
  model::ForwardBatch view = device_batch_.View();
  view.data_rank_tokens = batch.data_rank_tokens;
  view.data_ranks_decode = batch.data_ranks_decode;
  expert_ids_.resize(ReportsExperts(batch) ? view.token_ids.size() * NumExpertsPerRow() : 0);
  view.expert_ids = expert_ids_;
  if (device_sampler_ != nullptr) view.sampled = device_sampler_->token_ids();
  // Grammars work while the forward runs; what else a draw needs is uploaded ahead of it.
  const bool is_early = !step.is_late && !masks_.is_working();
  if (is_early) RETURN_IF_ERROR(AddDeviceRows(step));
  RETURN_IF_ERROR(model_.Forward(view, kv_cache_.view(), logits_.device_data(), *stream_, nullptr));
  if (step.is_late) return OkStatus();
  if (!is_early) RETURN_IF_ERROR(AddDeviceRows(step));
  return Sample(step);
}

Status ModelRunner::Sample(Step& step) {
  if (!step.on_device.empty()) device_sampler_->Draw(logits_.device_data(), *stream_);
  RETURN_IF_ERROR(FetchHostRows(step));
  SampleOnHost(step);
  if (sampling_ == Sampling::kResults) ComputePromptLogprobs(*step.batch, step.result);
  ReportExperts(*step.batch, step.result);
  KeepSampled(step);
  return OkStatus();
}

// A choice depends on the token that the step before samples, and only the device knows it.
bool ModelRunner::NeedsTokensOfTheDevice(const request::ScheduledBatch& batch) const {
  return std::any_of(batch.sequences.begin(), batch.sequences.end(),
                     [this](const request::ScheduledSequence& s) {
                       return s.is_pending() && request::DependsOnOutput(*s.request) &&
                              sampled_.at(s.request_id).device_row >= 0;
                     });
}

// The step before has ended, while this one's forward runs.
Status ModelRunner::SampleLate(Step& step, const request::StepResult& before) {
  for (const request::SequenceResult& r : before.sequences) {
    if (!r.sampled_token_ids.empty()) sampled_[r.request_id].token_id = r.sampled_token_ids[0];
  }
  StartMasks(step);
  RETURN_IF_ERROR(AddDeviceRows(step));
  RETURN_IF_ERROR(Sample(step));
  return ended_[static_cast<size_t>(step.place)]->Record(*stream_);
}

// Whether this rank chooses the sequence's token.
bool ModelRunner::Samples(const request::ScheduledSequence& s) const {
  if (!s.sample || sampling_ == Sampling::kNone) return false;
  return sampling_ == Sampling::kResults || s.request->constraint == nullptr;
}

bool ModelRunner::ReportsExperts(const request::ScheduledBatch& batch) const {
  return sampling_ == Sampling::kResults &&
         std::any_of(batch.sequences.begin(), batch.sequences.end(), WantsExperts);
}

void ModelRunner::FillBatch(const request::ScheduledBatch& batch) {
  device_batch_.Clear();
  first_row_.clear();
  for (const request::ScheduledSequence& s : batch.sequences) {
    if (s.is_pending()) {
      AddPendingToken(s);
    } else {
      device_batch_.AddSequence(s.token_ids, s.num_computed_tokens, s.block_table);
    }
    const size_t prompt_size = s.request->prompt_token_ids.size();
    if (static_cast<size_t>(s.num_computed_tokens) < prompt_size) device_batch_.MarkPrompt();
    first_row_.push_back(device_batch_.num_logits_rows());
    const size_t num_prompt_rows = NumPromptLogprobs(s);
    for (size_t i = 0; i < num_prompt_rows; ++i) device_batch_.AddLogitsRow(i);
    if (s.sample) device_batch_.AddLogitsRow(s.token_ids.size() - 1);
  }
}

void ModelRunner::AddPendingToken(const request::ScheduledSequence& s) {
  const Sampled& sampled = sampled_.at(s.request_id);
  if (sampled.device_row >= 0) {
    return device_batch_.AddSampledToken(sampled.device_row, s.num_computed_tokens, s.block_table);
  }
  // A request that failed has none: what it runs is dropped.
  const int32_t token_ids[] = {std::max(sampled.token_id, 0)};
  device_batch_.AddSequence(token_ids, s.num_computed_tokens, s.block_table);
}

// Among the logits rows.
size_t ModelRunner::SampleRowOf(const request::ScheduledBatch& batch, size_t i) const {
  return first_row_[i] + NumPromptLogprobs(batch.sequences[i]);
}

// With the pending token of a sequence whose choice depends on it.
std::span<const int32_t> ModelRunner::HistoryOf(const Step& step, size_t i) const {
  const std::vector<int32_t>& with_pending = step.histories[i];
  return with_pending.empty() ? step.batch->sequences[i].all_token_ids
                              : std::span<const int32_t>(with_pending);
}

void ModelRunner::StartMasks(Step& step) {
  std::vector<GrammarMasks::Sequence> sequences;
  step.histories.resize(step.batch->sequences.size());
  for (size_t i = 0; i < step.batch->sequences.size(); ++i) {
    const request::ScheduledSequence& s = step.batch->sequences[i];
    if (!Samples(s)) continue;
    if (s.is_pending() && request::DependsOnOutput(*s.request)) {
      step.histories[i].assign(s.all_token_ids.begin(), s.all_token_ids.end());
      step.histories[i].push_back(std::max(sampled_.at(s.request_id).token_id, 0));
    }
    sequences.push_back({.constraint = s.request->constraint.get(),
                         .output = HistoryOf(step, i).subspan(s.request->prompt_token_ids.size())});
  }
  masks_.Start(sequences);
}

// Who samples which row, and the device's rows.
Status ModelRunner::AddDeviceRows(Step& step) {
  const request::ScheduledBatch& batch = *step.batch;
  const std::span<const GrammarMasks::Mask> masks = masks_.Wait();
  step.masks.resize(batch.sequences.size());
  if (device_sampler_ != nullptr) device_sampler_->Begin(step.place);
  size_t next_mask = 0;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const request::ScheduledSequence& s = batch.sequences[i];
    if (!Samples(s)) continue;
    const GrammarMasks::Mask& mask = step.masks[i] = masks[next_mask++];
    if (!mask.status.ok()) {
      step.result.sequences[i].status = mask.status;
      continue;
    }
    const bool added =
        device_sampler_ != nullptr &&
        device_sampler_->Add({.logits_row = static_cast<int32_t>(SampleRowOf(batch, i)),
                              .request = s.request,
                              .all_token_ids = HistoryOf(step, i),
                              .num_output_tokens = s.num_output_tokens(),
                              .mask = mask.words});
    (added ? step.on_device : step.on_host).push_back(i);
  }
  return step.on_device.empty() ? OkStatus() : device_sampler_->Upload(*stream_);
}

// What the host looks at; all on a CPU, where that costs nothing.
Status ModelRunner::FetchHostRows(const Step& step) {
  const request::ScheduledBatch& batch = *step.batch;
  if (!expert_ids_.empty()) RETURN_IF_ERROR(stream_->Synchronize());
  for (const size_t i : step.on_host) {
    RETURN_IF_ERROR(logits_.Fetch(SampleRowOf(batch, i), 1, *stream_));
  }
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const size_t num_rows = NumPromptLogprobs(batch.sequences[i]);
    if (num_rows > 0 && sampling_ == Sampling::kResults)
      RETURN_IF_ERROR(logits_.Fetch(first_row_[i], num_rows, *stream_));
  }
  return OkStatus();
}

void ModelRunner::KeepSampled(const Step& step) {
  const auto& sequences = step.batch->sequences;
  sampled_.clear();
  for (size_t i = 0; i < sequences.size(); ++i) {
    const std::vector<int32_t>& token_ids = step.result.sequences[i].sampled_token_ids;
    if (!Samples(sequences[i])) continue;
    sampled_[sequences[i].request_id] = {.token_id = token_ids.empty() ? request::kPendingToken
                                                                       : token_ids[0]};
  }
  for (size_t row = 0; row < step.on_device.size(); ++row) {
    sampled_[sequences[step.on_device[row]].request_id].device_row = static_cast<int32_t>(row);
  }
}

// From layers of tokens to tokens of layers.
void ModelRunner::ReportExperts(const request::ScheduledBatch& batch,
                                request::StepResult& result) const {
  if (expert_ids_.empty()) return;
  const auto k = static_cast<size_t>(num_experts_per_token_);
  const auto num_tokens = static_cast<size_t>(batch.num_tokens());
  size_t first = 0;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const request::ScheduledSequence& s = batch.sequences[i];
    const size_t end = first + s.token_ids.size();
    std::vector<uint16_t>& out = result.sequences[i].routed_experts;
    if (WantsExperts(s)) out.reserve(s.token_ids.size() * NumExpertsPerRow());
    for (size_t t = first; WantsExperts(s) && t < end; ++t) {
      for (int layer = 0; layer < num_layers_; ++layer) {
        const int32_t* ids = expert_ids_.data() + (static_cast<size_t>(layer) * num_tokens + t) * k;
        out.insert(out.end(), ids, ids + k);
      }
    }
    first = end;
  }
}

void ModelRunner::SampleOnHost(Step& step) {
  std::vector<SampleRow> rows;
  std::vector<request::SequenceResult*> results;
  for (const size_t i : step.on_host) {
    const request::ScheduledSequence& s = step.batch->sequences[i];
    rows.push_back({.logits = logits_.row(SampleRowOf(*step.batch, i)),
                    .request = s.request,
                    .all_token_ids = HistoryOf(step, i),
                    .mask = step.masks[i].words,
                    .num_missing = s.is_pending() && step.histories[i].empty() ? size_t{1} : 0});
    results.push_back(&step.result.sequences[i]);
  }
  sampler_.Sample(rows, results);
}

void ModelRunner::ComputePromptLogprobs(const request::ScheduledBatch& batch,
                                        request::StepResult& result) {
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const request::ScheduledSequence& s = batch.sequences[i];
    const size_t num_rows = NumPromptLogprobs(s);
    if (num_rows == 0) continue;
    request::SequenceResult& out = result.sequences[i];
    out.prompt_logprobs.resize(num_rows);
    std::vector<Status> row_status(num_rows);
    const auto compute = [&](int64_t begin, int64_t end) {
      for (auto row = static_cast<size_t>(begin); row < static_cast<size_t>(end); ++row) {
        const std::span<const float> logits = logits_.row(first_row_[i] + row);
        row_status[row] = CheckLogits(logits);
        if (!row_status[row].ok()) continue;
        const auto next = static_cast<size_t>(s.num_computed_tokens) + row + 1;
        out.prompt_logprobs[row] = ComputeLogprobs(logits, s.all_token_ids[next],
                                                   *s.request->sampling.num_prompt_logprobs);
      }
    };
    if (thread_pool_ != nullptr) {
      thread_pool_->ParallelFor(static_cast<int64_t>(num_rows), 4, compute);
    } else {
      compute(0, static_cast<int64_t>(num_rows));
    }
    for (const Status& status : row_status) {
      if (!status.ok()) out.status = status;
    }
  }
}

}  // namespace fathom::runtime
