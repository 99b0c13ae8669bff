#include "runtime/logits_buffer.h"

#include "base/check.h"

namespace fathom::runtime {

Result<LogitsBuffer> LogitsBuffer::Make(int max_rows, int vocab_size, device::Device& device) {
  LogitsBuffer buffer;
  buffer.max_rows_ = max_rows;
  buffer.vocab_size_ = static_cast<size_t>(vocab_size);
  const size_t num_floats = static_cast<size_t>(max_rows) * buffer.vocab_size_;
  ASSIGN_OR_RETURN(buffer.device_,
                   device.Allocate(static_cast<int64_t>(num_floats * sizeof(float))));
  if (device.kind() != device::DeviceKind::kCpu) buffer.host_.resize(num_floats);
  return buffer;
}

Status LogitsBuffer::Fetch(size_t first_row, size_t num_rows, device::Stream& stream) {
  CHECK_LE(first_row + num_rows, static_cast<size_t>(max_rows_));
  if (!host_.empty()) {
    const size_t first = first_row * vocab_size_;
    const auto bytes = static_cast<int64_t>(num_rows * vocab_size_ * sizeof(float));
    RETURN_IF_ERROR(stream.Copy(host_.data() + first, device_data() + first, bytes));
  }
  return stream.Synchronize();
}

std::span<const float> LogitsBuffer::row(size_t i) const {
  const float* data = host_.empty() ? device_data() : host_.data();
  return {data + i * vocab_size_, vocab_size_};
}

}  // namespace fathom::runtime
