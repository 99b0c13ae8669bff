// SafetensorsWriter: a safetensors file whose tensors are known beforehand and whose bytes come
// later, in order or at any place. The file appears under its name when Finish succeeds, and not at
// all otherwise.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/file.h"

namespace fathom::checkpoint {

class SafetensorsWriter {
 public:
  // The data lie in the order of `tensors`; the bytes of each follow from its dtype and shape.
  static Result<std::unique_ptr<SafetensorsWriter>> Create(const std::string& path,
                                                           const std::vector<TensorInfo>& tensors);

  // Bytes of tensor `idx` at `offset` inside it. Many threads; every byte is written once.
  Status WriteAt(size_t idx, int64_t offset, std::span<const std::byte> bytes);
  // The next bytes of the data, across tensors. One thread; not mixed with WriteAt.
  Status Append(std::span<const std::byte> bytes);
  // When all bytes are written (CHECKed).
  Status Finish();

 private:
  SafetensorsWriter(OutputFile file, int64_t header_bytes, const std::vector<TensorInfo>& tensors);
  Status WriteData(int64_t place, std::span<const std::byte> bytes);

  OutputFile file_;
  int64_t header_bytes_;
  std::vector<int64_t> begins_;  // of each tensor in the data, then the end
  std::atomic<int64_t> written_bytes_{0};
};

}  // namespace fathom::checkpoint
