// Any bytes as a safetensors file: refused, or tensors that cover its data exactly and that the
// writer's own header describes again.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "checkpoint/safetensors_header.h"

namespace {

using fathom::checkpoint::CheckHeaderLength;
using fathom::checkpoint::MakeSafetensorsHeader;
using fathom::checkpoint::ParseSafetensorsHeader;
using fathom::checkpoint::TensorInfo;
using fathom::checkpoint::TensorPlace;

constexpr size_t kLengthBytes = fathom::checkpoint::kSafetensorsLengthBytes;

void CheckCover(const std::vector<TensorPlace>& places, int64_t data_begin, int64_t file_bytes) {
  int64_t covered = data_begin;
  for (const TensorPlace& place : places) {
    CHECK_EQ(place.offset, covered);
    CHECK_GE(place.info.bytes, 0);
    covered += place.info.bytes;
  }
  CHECK_EQ(covered, file_bytes);
}

void CheckRewritten(const std::vector<TensorPlace>& places, int64_t data_bytes) {
  std::vector<TensorInfo> tensors;
  for (const TensorPlace& place : places) tensors.push_back(place.info);
  const std::string header = MakeSafetensorsHeader(tensors);
  const auto again = ParseSafetensorsHeader(header.substr(kLengthBytes), data_bytes, "again");
  CHECK(again.ok());
  CHECK_EQ(again->size(), places.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kLengthBytes) return 0;
  uint64_t length = 0;
  std::memcpy(&length, data, kLengthBytes);
  const auto file_bytes = static_cast<int64_t>(size);
  const auto header_bytes = CheckHeaderLength(length, file_bytes, "fuzz");
  if (!header_bytes.ok()) return 0;
  const std::string_view json(reinterpret_cast<const char*>(data) + kLengthBytes,
                              static_cast<size_t>(*header_bytes));
  const int64_t data_begin = static_cast<int64_t>(kLengthBytes) + *header_bytes;
  const auto places = ParseSafetensorsHeader(json, file_bytes - data_begin, "fuzz");
  if (!places.ok()) {
    CHECK(places.status().code() == fathom::StatusCode::kBadModel);
    CHECK(places.status().message().find('\n') == std::string::npos);
    return 0;
  }
  CheckCover(*places, data_begin, file_bytes);
  CheckRewritten(*places, file_bytes - data_begin);
  return 0;
}
