#include "checkpoint/safetensors_writer.h"

#include <utility>

#include "base/check.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/tensor_list.h"

namespace fathom::checkpoint {

SafetensorsWriter::SafetensorsWriter(OutputFile file, int64_t header_bytes,
                                     const std::vector<TensorInfo>& tensors)
    : file_(std::move(file)), header_bytes_(header_bytes) {
  int64_t begin = 0;
  for (const TensorInfo& tensor : tensors) {
    begins_.push_back(begin);
    begin += tensor.bytes;
  }
  begins_.push_back(begin);
}

Result<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, const std::vector<TensorInfo>& tensors) {
  std::vector<TensorInfo> sized;
  for (const TensorInfo& t : tensors) sized.push_back(MakeTensorInfo(t.name, t.dtype, t.shape));
  const std::string header = MakeSafetensorsHeader(sized);
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(path));
  RETURN_IF_ERROR(file.WriteAt(0, std::as_bytes(std::span(header))));
  return std::unique_ptr<SafetensorsWriter>(
      new SafetensorsWriter(std::move(file), static_cast<int64_t>(header.size()), sized));
}

Status SafetensorsWriter::WriteAt(size_t idx, int64_t offset, std::span<const std::byte> bytes) {
  CHECK_LT(idx + 1, begins_.size());
  CHECK_GE(offset, 0);
  CHECK_LE(begins_[idx] + offset + static_cast<int64_t>(bytes.size()), begins_[idx + 1]);
  return WriteData(begins_[idx] + offset, bytes);
}

Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  const int64_t place = written_bytes_.load();
  CHECK_LE(place + static_cast<int64_t>(bytes.size()), begins_.back());
  return WriteData(place, bytes);
}

Status SafetensorsWriter::WriteData(int64_t place, std::span<const std::byte> bytes) {
  RETURN_IF_ERROR(file_.WriteAt(header_bytes_ + place, bytes));
  written_bytes_ += static_cast<int64_t>(bytes.size());
  return OkStatus();
}

Status SafetensorsWriter::Finish() {
  CHECK_EQ(written_bytes_.load(), begins_.back());
  return file_.Commit();
}

}  // namespace fathom::checkpoint
