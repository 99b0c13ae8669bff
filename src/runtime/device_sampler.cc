#include "runtime/device_sampler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "runtime/logit_edits.h"
#include "runtime/logprobs.h"
#include "runtime/philox.h"

namespace fathom::runtime {
namespace {

using kernels::LogitEdit;
using kernels::SampledRow;
using kernels::SamplingRow;

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Result<std::unique_ptr<DeviceSampler>> DeviceSampler::Make(int max_rows, int vocab_size,
                                                           std::vector<int32_t> eos_token_ids,
                                                           device::Device& device) {
  if (device.kind() != device::DeviceKind::kCuda || vocab_size > kernels::MaxSamplingVocab()) {
    return std::unique_ptr<DeviceSampler>();
  }
  std::unique_ptr<DeviceSampler> sampler(
      new DeviceSampler(max_rows, vocab_size, std::move(eos_token_ids)));
  RETURN_IF_ERROR(sampler->Allocate(device));
  return sampler;
}

DeviceSampler::DeviceSampler(int max_rows, int vocab_size, std::vector<int32_t> eos_token_ids)
    : max_rows_(static_cast<size_t>(max_rows)),
      vocab_size_(static_cast<size_t>(vocab_size)),
      num_mask_words_((vocab_size_ + 31) / 32),
      eos_token_ids_(std::move(eos_token_ids)),
      edit_of_token_(vocab_size_, -1) {}

Status DeviceSampler::Allocate(device::Device& device) {
  const int64_t bytes = kNumPlaces * PlaceBytes();
  ASSIGN_OR_RETURN(host_, device.AllocateHost(bytes));
  ASSIGN_OR_RETURN(on_device_, device.Allocate(bytes));
  const auto rows = static_cast<int64_t>(max_rows_);
  ASSIGN_OR_RETURN(results_, device.AllocateHost(kNumPlaces * rows * int64_t{sizeof(SampledRow)}));
  ASSIGN_OR_RETURN(token_ids_, device.Allocate(rows * int64_t{sizeof(int32_t)}));
  return OkStatus();
}

// Room for a row that names every token, and for some hundred in each.
size_t DeviceSampler::MaxEdits() const { return std::max(2 * vocab_size_, 512 * max_rows_); }

int64_t DeviceSampler::PlaceBytes() const {
  return Aligned(static_cast<int64_t>(max_rows_ * sizeof(SamplingRow))) +
         Aligned(static_cast<int64_t>(MaxEdits() * sizeof(LogitEdit))) +
         Aligned(static_cast<int64_t>(max_rows_ * num_mask_words_ * sizeof(uint32_t)));
}

DeviceSampler::Place DeviceSampler::PlaceAt(std::byte* base) const {
  Place place;
  base += place_ * PlaceBytes();
  place.rows = reinterpret_cast<SamplingRow*>(base);
  base += Aligned(static_cast<int64_t>(max_rows_ * sizeof(SamplingRow)));
  place.edits = reinterpret_cast<LogitEdit*>(base);
  base += Aligned(static_cast<int64_t>(MaxEdits() * sizeof(LogitEdit)));
  place.masks = reinterpret_cast<uint32_t*>(base);
  return place;
}

void DeviceSampler::Begin(int place) {
  place_ = place;
  num_rows_ = num_edits_ = num_masks_ = 0;
}

bool DeviceSampler::Add(const DeviceSampleRow& row) {
  const request::SamplingParams& params = row.request->sampling;
  CHECK_LT(num_rows_, max_rows_);
  if (params.num_logprobs.value_or(0) > kernels::kMaxTopLogprobs) return false;
  const size_t first_edit = num_edits_;
  if (!AddEdits(row)) return false;
  const bool masked = AddMask(row);
  PlaceAt(host_.data()).rows[num_rows_++] = {
      .temperature = params.temperature,
      .top_p = params.top_p,
      .min_p = params.min_p,
      .uniform = UniformAt(params.seed, row.num_output_tokens),
      .repetition_penalty = params.repetition_penalty,
      .frequency_penalty = params.frequency_penalty,
      .presence_penalty = params.presence_penalty,
      .top_k = params.top_k,
      .logits_row = row.logits_row,
      .mask_row = masked ? static_cast<int32_t>(num_masks_ - 1) : -1,
      .first_edit = static_cast<int32_t>(first_edit),
      .num_edits = static_cast<int32_t>(num_edits_ - first_edit),
      .num_logprobs = params.num_logprobs ? std::max(0, *params.num_logprobs) : -1};
  return true;
}

// The row's edit of a token; null when the vocabulary has no such token.
LogitEdit* DeviceSampler::EditOf(int32_t token_id) {
  if (token_id < 0 || static_cast<size_t>(token_id) >= vocab_size_) return nullptr;
  int32_t& index = edit_of_token_[static_cast<size_t>(token_id)];
  if (index < 0) {
    index = static_cast<int32_t>(row_edits_.size());
    row_edits_.push_back({.token_id = token_id});
  }
  return &row_edits_[static_cast<size_t>(index)];
}

bool DeviceSampler::AddEdits(const DeviceSampleRow& row) {
  if (EditsNothing(row.request->sampling, row.num_output_tokens)) return true;
  row_edits_.clear();
  CollectEdits(row);
  for (const LogitEdit& edit : row_edits_) edit_of_token_[static_cast<size_t>(edit.token_id)] = -1;
  if (num_edits_ + row_edits_.size() > MaxEdits()) return false;
  std::copy(row_edits_.begin(), row_edits_.end(), PlaceAt(host_.data()).edits + num_edits_);
  num_edits_ += row_edits_.size();
  return true;
}

// What EditLogits does, as one edit a token.
void DeviceSampler::CollectEdits(const DeviceSampleRow& row) {
  const request::SamplingParams& params = row.request->sampling;
  const auto output = row.all_token_ids.subspan(row.request->prompt_token_ids.size());
  const auto flag = [this](int32_t token_id, uint32_t bit) {
    if (LogitEdit* edit = EditOf(token_id)) edit->flags |= bit;
  };
  for (const std::vector<int32_t>& word : params.bad_words) {
    if (CompletesBadWord(word, output)) flag(word.back(), LogitEdit::kRuledOut);
  }
  for (const auto& [token_id, bias] : params.logit_bias) {
    if (LogitEdit* edit = EditOf(token_id)) edit->bias = bias;
  }
  if (IsMinTokensPending(params, row.num_output_tokens)) {
    for (const int32_t token_id : eos_token_ids_) flag(token_id, LogitEdit::kStop);
    for (const int32_t token_id : params.stop_token_ids) flag(token_id, LogitEdit::kStop);
  }
  if (params.repetition_penalty != 1.0) {
    for (const int32_t token_id : row.all_token_ids) flag(token_id, LogitEdit::kRepeated);
  }
  if (params.frequency_penalty == 0 && params.presence_penalty == 0) return;
  for (const int32_t token_id : output) {
    if (LogitEdit* edit = EditOf(token_id)) ++edit->count;
  }
}

// Of the grammar and allowed_token_ids together.
bool DeviceSampler::AddMask(const DeviceSampleRow& row) {
  const std::vector<int32_t>& allowed = row.request->sampling.allowed_token_ids;
  if (row.mask.empty() && allowed.empty()) return false;
  const std::span<uint32_t> words(PlaceAt(host_.data()).masks + num_masks_ * num_mask_words_,
                                  num_mask_words_);
  ++num_masks_;
  if (allowed.empty()) {
    std::copy(row.mask.begin(), row.mask.end(), words.begin());
    return true;
  }
  std::fill(words.begin(), words.end(), 0u);
  for (const int32_t token_id : allowed) {
    if (token_id < 0 || static_cast<size_t>(token_id) >= vocab_size_) continue;
    words[static_cast<size_t>(token_id) / 32] |= 1u << token_id % 32;
  }
  for (size_t i = 0; i < row.mask.size(); ++i) words[i] &= row.mask[i];
  return true;
}

Status DeviceSampler::Upload(device::Stream& stream) {
  const Place host = PlaceAt(host_.data()), device = PlaceAt(on_device_.data());
  const auto upload = [&stream](auto* to, const auto* from, size_t count) {
    if (count == 0) return OkStatus();
    return stream.Copy(to, from, static_cast<int64_t>(count * sizeof(*from)));
  };
  RETURN_IF_ERROR(upload(device.rows, host.rows, num_rows_));
  RETURN_IF_ERROR(upload(device.edits, host.edits, num_edits_));
  return upload(device.masks, host.masks, num_masks_ * num_mask_words_);
}

void DeviceSampler::Draw(const float* logits, device::Stream& stream) {
  const Place device = PlaceAt(on_device_.data());
  kernels::Launch(
      kernels::CudaSamplingParams{.logits = logits,
                                  .vocab = static_cast<int64_t>(vocab_size_),
                                  .num_rows = static_cast<int>(num_rows_),
                                  .rows = device.rows,
                                  .edits = device.edits,
                                  .masks = device.masks,
                                  .results = reinterpret_cast<SampledRow*>(results_.data()) +
                                             static_cast<size_t>(place_) * max_rows_,
                                  .token_ids = reinterpret_cast<int32_t*>(token_ids_.data())},
      stream);
}

void DeviceSampler::Read(int place, size_t i, const request::Request& request,
                         request::SequenceResult& result) const {
  const SampledRow& row = reinterpret_cast<const SampledRow*>(
      results_.data())[static_cast<size_t>(place) * max_rows_ + i];
  if (row.token_id == kernels::kNoTokenLeft) {
    result.status = NoTokenLeft();
    return;
  }
  if (row.token_id < 0) {
    result.status = LogitsNotFinite();
    return;
  }
  result.sampled_token_ids.push_back(row.token_id);
  if (!request.sampling.num_logprobs) return;
  request::TokenLogprobs logprobs;
  logprobs.chosen = {row.token_id, row.logprob};
  logprobs.rank = row.rank;
  const auto num_top =
      std::min(static_cast<size_t>(std::max(0, *request.sampling.num_logprobs)), vocab_size_);
  for (size_t n = 0; n < num_top; ++n) {
    logprobs.top.push_back({row.top[n].token_id, row.top[n].logprob});
  }
  result.logprobs.push_back(std::move(logprobs));
}

}  // namespace fathom::runtime
