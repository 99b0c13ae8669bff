// DeviceSampler: the Sampler's draws on a GPU (kernels/sampling). A step's rows are drawn together,
// without the host seeing a logit; tokens stay on the device, too, for the step that follows. Two
// steps may be under way, in two places that take turns. Owned by the ModelRunner, one thread.
//
// A row goes to the host (Sampler) instead when it asks for more log-probabilities than a result
// holds, or when the step's edits (penalties, biases) fill their memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "kernels/sampling/sampling_cuda.h"
#include "request/scheduled_batch.h"

namespace fathom::runtime {

// One row to draw from.
struct DeviceSampleRow {
  int32_t logits_row = 0;
  const request::Request* request = nullptr;
  // Prompt and output so far. A token of the output may be missing at its end, when nothing of the
  // request depends on it (request::DependsOnOutput).
  std::span<const int32_t> all_token_ids;
  size_t num_output_tokens = 0;         // those that are missing, too
  std::span<const uint32_t> mask = {};  // as SampleRow's
};

class DeviceSampler {
 public:
  static constexpr int kNumPlaces = 2;

  // kOutOfMemory. Null when the device is no GPU, or the vocabulary too large for its kernel.
  static Result<std::unique_ptr<DeviceSampler>> Make(int max_rows, int vocab_size,
                                                     std::vector<int32_t> eos_token_ids,
                                                     device::Device& device);

  // Takes a row of the step that is being made; false: it is one for the host.
  void Begin(int place);
  bool Add(const DeviceSampleRow& row);
  size_t num_rows() const { return num_rows_; }

  // Brings the rows added since Begin to the device; what Add was given is not needed any more.
  Status Upload(device::Stream& stream);
  // Draws them: row i's token becomes token_ids()[i].
  void Draw(const float* logits, device::Stream& stream);

  // Row i of the place's last step, whose work has ended: token, log-probabilities and status.
  void Read(int place, size_t i, const request::Request& request,
            request::SequenceResult& result) const;

  const int32_t* token_ids() const { return reinterpret_cast<int32_t*>(token_ids_.data()); }

 private:
  // What is uploaded for a step, in host and in device memory.
  struct Place {
    kernels::SamplingRow* rows = nullptr;  // [max_rows]
    kernels::LogitEdit* edits = nullptr;   // [kMaxEdits]
    uint32_t* masks = nullptr;             // [max_rows, words]
  };
  DeviceSampler(int max_rows, int vocab_size, std::vector<int32_t> eos_token_ids);
  Status Allocate(device::Device& device);
  Place PlaceAt(std::byte* base) const;
  int64_t PlaceBytes() const;
  size_t MaxEdits() const;

  kernels::LogitEdit* EditOf(int32_t token_id);
  bool AddEdits(const DeviceSampleRow& row);
  void CollectEdits(const DeviceSampleRow& row);
  bool AddMask(const DeviceSampleRow& row);

  const size_t max_rows_;
  const size_t vocab_size_;
  const size_t num_mask_words_;
  const std::vector<int32_t> eos_token_ids_;
  device::Buffer host_, on_device_;  // kNumPlaces places each
  device::Buffer results_;           // host: [kNumPlaces, max_rows] SampledRow
  device::Buffer token_ids_;         // device: [max_rows]

  // Of the step that is being made.
  int place_ = 0;
  size_t num_rows_ = 0, num_edits_ = 0, num_masks_ = 0;
  std::vector<kernels::LogitEdit> row_edits_;
  std::vector<int32_t> edit_of_token_;  // [vocab], -1 between rows
};

}  // namespace fathom::runtime
