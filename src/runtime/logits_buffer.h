// LogitsBuffer: where a forward writes its logits, and where the host reads them: the same memory
// on a CPU, a copy on a GPU. Owned by a ModelRunner or Scorer; one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/device.h"

namespace fathom::runtime {

class LogitsBuffer {
 public:
  static Result<LogitsBuffer> Make(int max_rows, int vocab_size, device::Device& device);

  float* device_data() const { return reinterpret_cast<float*>(device_.data()); }

  // Waits for the stream and brings `num_rows` rows to the host.
  Status Fetch(size_t first_row, size_t num_rows, device::Stream& stream);

  // Row i, which was fetched: [vocab].
  std::span<const float> row(size_t i) const;

  int max_rows() const { return max_rows_; }

 private:
  int max_rows_ = 0;
  size_t vocab_size_ = 0;
  device::Buffer device_;    // [max_rows, vocab], FP32
  std::vector<float> host_;  // the same; empty on a CPU
};

}  // namespace fathom::runtime
