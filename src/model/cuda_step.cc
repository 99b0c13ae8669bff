#include "model/cuda_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "device/cuda/cuda_check.h"

namespace fathom::model {
namespace {

void Check(cudaError_t error) { device::CheckCuda(error, __FILE__, __LINE__); }

// The arrays of a step on their way to the device: packed into one buffer, one copy.
class StepImage {
 public:
  StepImage(std::byte* host, const std::byte* device, int64_t capacity)
      : host_(host), device_(device), capacity_(capacity) {}

  const int32_t* Put(std::span<const int32_t> values, int64_t count, int32_t padding) {
    const int64_t bytes = (count * 4 + 255) / 256 * 256;
    CHECK_LE(bytes_ + bytes, capacity_);
    auto* out = reinterpret_cast<int32_t*>(host_ + bytes_);
    std::copy(values.begin(), values.end(), out);
    std::fill(out + values.size(), out + count, padding);
    const auto* on_device = reinterpret_cast<const int32_t*>(device_ + bytes_);
    bytes_ += bytes;
    return on_device;
  }
  // Rows of a table, `stride` apart on the device; what a row lacks is -1, and so are further rows.
  const int32_t* PutRows(std::span<const int32_t> values, int64_t rows, int64_t row_size,
                         int64_t stride) {
    auto* out = reinterpret_cast<int32_t*>(host_ + bytes_);
    const int32_t* on_device = Put({}, rows * stride, -1);
    const int64_t num_rows = row_size == 0 ? 0 : static_cast<int64_t>(values.size()) / row_size;
    for (int64_t r = 0; r < num_rows; ++r) {
      std::copy_n(values.begin() + r * row_size, row_size, out + r * stride);
    }
    return on_device;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* host_;
  const std::byte* device_;
  int64_t capacity_;
  int64_t bytes_ = 0;
};

}  // namespace

int DecodeBucket(int num_seqs, int max_num_seqs) {
  int bucket = 1;
  while (bucket < num_seqs && bucket < 8) bucket *= 2;
  if (bucket < num_seqs) {
    const int unit = num_seqs <= 16 ? 4 : 8;
    bucket = (num_seqs + unit - 1) / unit * unit;
  }
  return std::min(bucket, max_num_seqs);
}

Result<std::unique_ptr<StepUploader>> StepUploader::Make(const ModelLimits& limits, int index_topk,
                                                         const CudaWorkspace& workspace) {
  std::unique_ptr<StepUploader> uploader(new StepUploader(limits, index_topk, workspace));
  for (Place& place : uploader->places_) {
    void* host = nullptr;
    if (cudaMallocHost(&host, static_cast<size_t>(workspace.batch_bytes)) != cudaSuccess) {
      return OutOfMemory(fmt::format("cannot pin {} bytes of host memory", workspace.batch_bytes));
    }
    place.host = static_cast<std::byte*>(host);
    Check(cudaEventCreateWithFlags(&place.copied, cudaEventDisableTiming));
  }
  return uploader;
}

StepUploader::~StepUploader() {
  for (const Place& place : places_) {
    if (place.copied != nullptr) cudaEventDestroy(place.copied);
    cudaFreeHost(place.host);
  }
}

void StepUploader::ListTokens(const ForwardBatch& batch) {
  token_seq_.clear();
  positions_.clear();
  for (size_t s = 0; s < batch.num_computed.size(); ++s) {
    const int32_t count = batch.cu_seqlens_q[s + 1] - batch.cu_seqlens_q[s];
    CHECK_LE(batch.num_computed[s] + count, limits_.max_model_len);
    for (int32_t k = 0; k < count; ++k) {
      token_seq_.push_back(static_cast<int32_t>(s));
      positions_.push_back(batch.num_computed[s] + k);
    }
  }
}

int StepUploader::TableStride(int max_blocks) const {
  int stride = 16;
  while (stride < max_blocks) stride *= 2;
  CHECK_LE(max_blocks, max_table_blocks());
  return std::min(stride, max_table_blocks());
}

CudaStep StepUploader::Upload(const ForwardBatch& batch, int num_decodes, device::Stream& stream) {
  const auto num_tokens = static_cast<int>(batch.token_ids.size());
  const auto num_seqs = static_cast<int>(batch.num_computed.size());
  CHECK_LE(num_tokens, limits_.max_batched_tokens);
  CHECK_LE(num_seqs, limits_.max_num_seqs);
  const bool pad = num_decodes > 0;
  const int bucket = DecodeBucket(num_decodes, limits_.max_num_seqs);
  const int tokens = pad ? bucket : num_tokens, seqs = pad ? bucket : num_seqs;
  ListTokens(batch);
  rows_.assign(batch.logits_rows.begin(), batch.logits_rows.end());
  for (int t = num_tokens; t < tokens; ++t) rows_.push_back(t);

  CudaStep step;
  step.stream = &stream;
  step.prefill = !IsDecode(batch);
  step.most_tokens = tokens;
  for (const int32_t position : positions_) {
    step.max_entries = std::max(step.max_entries, (position + 1) / 4);
  }
  step.any_index_scoring = step.max_entries > index_topk_;
  Place& place = places_[turn_ ^= 1];
  Check(cudaEventSynchronize(place.copied));  // the copy before the last has left the memory
  StepImage image(place.host, workspace_.batch, workspace_.batch_bytes);
  kernels::CudaBatch& b = step.batch;
  step.token_ids = image.Put(batch.token_ids, tokens, 0);
  step.token_sources = image.Put(batch.token_sources, tokens, -1);
  step.sampled = batch.sampled;
  b.token_seq = image.Put(token_seq_, tokens, -1);
  b.positions = image.Put(positions_, tokens, 0);
  b.cu_seqlens_q = image.Put(batch.cu_seqlens_q, seqs + 1, num_tokens);
  b.num_computed = image.Put(batch.num_computed, seqs, 0);
  b.first_window_page = image.Put(batch.first_window_page, seqs, 0);
  b.state_slots = image.Put(batch.state_slots, seqs, -1);
  step.logits_rows = image.Put(rows_, tokens, 0);
  b.max_window_pages = static_cast<int>(WindowStride(batch.max_window_pages));
  b.window_tables =
      image.PutRows(batch.window_tables, seqs, batch.max_window_pages, b.max_window_pages);
  b.max_blocks = TableStride(batch.max_blocks);
  b.block_tables = image.PutRows(batch.block_tables, seqs, batch.max_blocks, b.max_blocks);
  if (!step.prefill) step.max_entries = b.max_blocks * (kv_cache::kBlockTokens / 4);
  b.num_seqs = seqs;
  b.num_tokens = step.total_tokens = tokens;
  step.num_logits_rows = static_cast<int64_t>(rows_.size());
  device::CheckCuda(stream.Copy(workspace_.batch, place.host, image.bytes()), stream, __FILE__,
                    __LINE__);
  Check(cudaEventRecord(place.copied, static_cast<cudaStream_t>(stream.native_handle())));
  return step;
}

CudaStep StepUploader::UploadNobody(int num_seqs, int max_blocks, int64_t context,
                                    const int32_t* sampled, device::Stream& stream) {
  const auto n = static_cast<size_t>(num_seqs);
  const std::vector<int32_t> none(n * static_cast<size_t>(max_blocks), -1), zeros(n, 0);
  const std::vector<int32_t> num_computed(n, static_cast<int32_t>(context));
  std::vector<int32_t> counting(n + 1);
  std::iota(counting.begin(), counting.end(), 0);
  const ForwardBatch batch{.token_ids = zeros,
                           .token_sources = zeros,
                           .sampled = sampled,
                           .cu_seqlens_q = counting,
                           .num_computed = num_computed,
                           .block_tables = none,
                           .max_blocks = max_blocks,
                           .window_tables = std::span(none).first(n),
                           .max_window_pages = 1,
                           .first_window_page = zeros,
                           .state_slots = std::span(none).first(n),
                           .logits_rows = std::span(counting).first(n),
                           .expert_ids = {}};
  return Upload(batch, num_seqs, stream);
}

}  // namespace fathom::model
