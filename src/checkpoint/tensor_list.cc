#include "checkpoint/tensor_list.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fathom::checkpoint {

TensorInfo MakeTensorInfo(std::string name, FileDType dtype, std::vector<int64_t> shape) {
  TensorInfo info{std::move(name), dtype, std::move(shape), BytesPerElement(dtype)};
  for (const int64_t extent : info.shape) info.bytes *= extent;
  return info;
}

const TensorInfo* FindTensor(const std::vector<TensorInfo>& tensors, std::string_view name) {
  const auto at = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorInfo& tensor, std::string_view n) { return tensor.name < n; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

void CheckRange(const TensorInfo& tensor, int64_t offset, size_t bytes) {
  CHECK_GE(offset, 0);
  CHECK_LE(offset, tensor.bytes);
  CHECK_LE(bytes, static_cast<uint64_t>(tensor.bytes - offset));
}

std::string FormatShape(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace fathom::checkpoint
