#include "runtime/model_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "runtime/logprobs.h"

namespace fathom::runtime {
namespace {

// A step that has nothing to do but wait for the disk: new requests are seen after it.
constexpr auto kStoreWait = std::chrono::milliseconds(5);

// How many of a sequence's tokens this step are followed by a prompt token whose log-probability
// was asked for. None when there is output already: then they have been reported, and the prompt
// runs again after a preemption.
size_t NumPromptLogprobs(const request::ScheduledSequence& s) {
  const size_t num_prompt_tokens = s.request->prompt_token_ids.size();
  if (!s.request->sampling.num_prompt_logprobs || s.all_token_ids.size() > num_prompt_tokens) {
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
                                                       device::Device& device,
                                                       std::unique_ptr<kv_store::DiskStore> disk) {
  ASSIGN_OR_RETURN(auto stream, device.MakeStream());
  ASSIGN_OR_RETURN(auto logits,
                   LogitsBuffer::Make(options.max_logits_rows, options.vocab_size, device));
  return std::unique_ptr<ModelRunner>(new ModelRunner(
      options, model, std::move(kv_cache), std::move(stream), std::move(logits), std::move(disk)));
}

ModelRunner::ModelRunner(const ModelRunnerOptions& options, model::DeepSeekV4& model,
                         KvCache kv_cache, std::unique_ptr<device::Stream> stream,
                         LogitsBuffer logits, std::unique_ptr<kv_store::DiskStore> disk)
    : num_layers_(options.num_layers),
      num_experts_per_token_(options.num_experts_per_token),
      model_(model),
      kv_cache_(std::move(kv_cache)),
      stream_(std::move(stream)),
      thread_pool_(PoolOf(*stream_)),
      logits_(std::move(logits)),
      sampler_(options.vocab_size, options.eos_token_ids, thread_pool_),
      masks_(options.vocab_size, NumMaskThreads()),
      disk_(std::move(disk)) {}

Result<request::StepResult> ModelRunner::Run(const request::ScheduledBatch& batch) {
  RETURN_IF_ERROR(kv_cache_.Run(batch.transfers.copies, *stream_));
  if (!batch.sequences.empty()) RETURN_IF_ERROR(RunForward(batch));

  request::StepResult result;
  result.step = batch.step;
  RETURN_IF_ERROR(RunStore(batch.transfers, result));
  result.sequences.resize(batch.sequences.size());
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    result.sequences[i].request_id = batch.sequences[i].request_id;
  }
  SampleTokens(batch, result);
  ComputePromptLogprobs(batch, result);
  if (!batch.sequences.empty()) ReportExperts(batch, result);
  return result;
}

Status ModelRunner::RunForward(const request::ScheduledBatch& batch) {
  FillBatch(batch);
  StartMasks(batch);
  model::ForwardBatch view = device_batch_.View();
  const bool reports_experts =
      std::any_of(batch.sequences.begin(), batch.sequences.end(), WantsExperts);
  expert_ids_.resize(reports_experts ? view.token_ids.size() * NumExpertsPerRow() : 0);
  view.expert_ids = expert_ids_;
  model_.Forward(view, kv_cache_.view(), logits_.device_data(), *stream_, nullptr);
  const Status fetched = logits_.Fetch(device_batch_.num_logits_rows(), *stream_);
  masks_.Wait();  // before the batch may go
  return fetched;
}

// The disk sees host slots only when the copies into them are done.
Status ModelRunner::RunStore(const request::KvTransfers& transfers, request::StepResult& result) {
  if (disk_ == nullptr) return OkStatus();
  if (!transfers.store.empty()) RETURN_IF_ERROR(stream_->Synchronize());
  for (const request::KvStoreRequest& r : transfers.store) {
    const bool has_slot = r.host_slot >= 0;
    disk_->Submit(
        r, has_slot ? kv_cache_.host_slot(r.record.kind, r.host_slot) : std::span<std::byte>());
  }
  if (transfers.wait_for_store) disk_->WaitForEvent(kStoreWait);
  result.store_events = disk_->TakeEvents();
  return OkStatus();
}

void ModelRunner::FillBatch(const request::ScheduledBatch& batch) {
  device_batch_.Clear();
  first_row_.clear();
  for (const request::ScheduledSequence& s : batch.sequences) {
    device_batch_.AddSequence(s.token_ids, s.num_computed_tokens, s.block_table);
    first_row_.push_back(device_batch_.num_logits_rows());
    const size_t num_prompt_rows = NumPromptLogprobs(s);
    for (size_t i = 0; i < num_prompt_rows; ++i) device_batch_.AddLogitsRow(i);
    if (s.sample) device_batch_.AddLogitsRow(s.token_ids.size() - 1);
  }
}

void ModelRunner::StartMasks(const request::ScheduledBatch& batch) {
  std::vector<GrammarMasks::Sequence> sequences;
  for (const request::ScheduledSequence& s : batch.sequences) {
    if (!s.sample) continue;
    sequences.push_back({.constraint = s.request->constraint.get(),
                         .output = s.all_token_ids.subspan(s.request->prompt_token_ids.size())});
  }
  masks_.Start(sequences);
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

void ModelRunner::SampleTokens(const request::ScheduledBatch& batch, request::StepResult& result) {
  std::vector<SampleRow> rows;
  std::vector<request::SequenceResult*> results;
  const std::span<const GrammarMasks::Mask> masks = masks_.Wait();
  size_t next_mask = 0;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const request::ScheduledSequence& s = batch.sequences[i];
    if (!s.sample) continue;
    const GrammarMasks::Mask& mask = masks[next_mask++];
    if (!mask.status.ok()) {
      result.sequences[i].status = mask.status;
      continue;
    }
    rows.push_back({.logits = logits_.row(first_row_[i] + NumPromptLogprobs(s)),
                    .request = s.request,
                    .all_token_ids = s.all_token_ids,
                    .mask = mask.words});
    results.push_back(&result.sequences[i]);
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
