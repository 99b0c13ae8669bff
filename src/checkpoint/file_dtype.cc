#include "checkpoint/file_dtype.h"

#include "base/check.h"

namespace fathom::checkpoint {
namespace {

struct DTypeRow {
  FileDType dtype;
  const char* name;  // as safetensors spells it
  int64_t bytes;
};

constexpr DTypeRow kDTypes[] = {
    {FileDType::kF32, "F32", 4},        {FileDType::kBF16, "BF16", 2},
    {FileDType::kF8E4M3, "F8_E4M3", 1}, {FileDType::kF8E8M0, "F8_E8M0", 1},
    {FileDType::kI8, "I8", 1},          {FileDType::kI32, "I32", 4},
    {FileDType::kI64, "I64", 8},        {FileDType::kU8, "U8", 1},
    {FileDType::kF16, "F16", 2},
};

const DTypeRow& Row(FileDType dtype) {
  const DTypeRow& row = kDTypes[static_cast<size_t>(dtype)];
  CHECK(row.dtype == dtype);
  return row;
}

}  // namespace

int64_t BytesPerElement(FileDType dtype) { return Row(dtype).bytes; }
const char* Name(FileDType dtype) { return Row(dtype).name; }

std::optional<FileDType> FindFileDType(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (name == row.name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace fathom::checkpoint
