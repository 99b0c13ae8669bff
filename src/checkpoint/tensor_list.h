// What every TensorSource does with its list of tensors. Any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace fathom::checkpoint {

// A tensor with its size in bytes.
TensorInfo MakeTensorInfo(std::string name, FileDType dtype, std::vector<int64_t> shape);

// By binary search in a list that is ordered by name; null when absent.
const TensorInfo* FindTensor(const std::vector<TensorInfo>& tensors, std::string_view name);

// CHECKs that [offset, offset + bytes) lies inside the tensor: a reader asks for what it was told
// exists.
void CheckRange(const TensorInfo& tensor, int64_t offset, size_t bytes);

// "[2048, 64]".
std::string FormatShape(const std::vector<int64_t>& shape);

}  // namespace fathom::checkpoint
