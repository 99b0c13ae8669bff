#include "checkpoint/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "checkpoint/file_dtype.h"
#include "checkpoint/tensor_list.h"
#include "json/json.h"

namespace fathom::checkpoint {
namespace {

constexpr int64_t kAlignment = 8;
constexpr size_t kMaxRank = 8;
constexpr size_t kMaxNameBytes = 1024;
// About eight values describe a tensor: room for 250,000 tensors in a file.
constexpr json::ParseLimits kHeaderLimits = {
    .max_depth = 4, .max_nodes = 2'000'000, .unique_keys = true};

Status BadTensor(const std::string& file, const std::string& name, const std::string& what) {
  return BadModel(fmt::format("{}: tensor {}: {}", file, json::Quote(name), what));
}

// A list of integers of at least 0, or nothing.
std::optional<std::vector<int64_t>> ReadNaturals(const json::Value* list, size_t max_size) {
  if (list == nullptr || !list->is_array() || list->items().size() > max_size) return std::nullopt;
  std::vector<int64_t> numbers;
  for (const json::Value& item : list->items()) {
    const auto number = item.ToInt64();
    if (!number || *number < 0) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

// The product of the shape and the element size, or nothing when it passes 63 bits.
std::optional<int64_t> CheckedBytes(const TensorInfo& info) {
  int64_t bytes = BytesPerElement(info.dtype);
  for (const int64_t extent : info.shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

// One member of the header; `place->offset` counts from the start of the data.
Status ParseTensor(const json::Member& member, const std::string& file, int64_t data_bytes,
                   TensorPlace* place) {
  const std::string& name = member.key;
  const json::Value& value = member.value;
  if (name.empty() || name.size() > kMaxNameBytes) {
    return BadModel(fmt::format("{}: a tensor name has {} bytes, expected 1 to {}", file,
                                name.size(), kMaxNameBytes));
  }
  const json::Value* dtype_name = value.Find("dtype");
  if (dtype_name == nullptr || !dtype_name->is_string()) {
    return BadTensor(file, name, "dtype is missing, expected a string");
  }
  const auto dtype = FindFileDType(dtype_name->AsString());
  if (!dtype) {
    return BadTensor(file, name,
                     fmt::format("dtype is {}, expected one of a DeepSeek-V4 checkpoint",
                                 json::Quote(dtype_name->AsString())));
  }
  auto shape = ReadNaturals(value.Find("shape"), kMaxRank);
  if (!shape) {
    return BadTensor(file, name,
                     fmt::format("shape: expected at most {} sizes of 0 or more", kMaxRank));
  }
  const auto offsets = ReadNaturals(value.Find("data_offsets"), 2);
  if (!offsets || offsets->size() != 2) {
    return BadTensor(file, name, "data_offsets: expected [begin, end], both 0 or more");
  }
  if (value.members().size() != 3) {
    return BadTensor(file, name, "expected exactly dtype, shape and data_offsets");
  }
  place->info = {name, *dtype, std::move(*shape), 0};
  place->offset = (*offsets)[0];
  const int64_t end = (*offsets)[1];
  if (end < place->offset || end > data_bytes) {
    return BadTensor(file, name,
                     fmt::format("data_offsets [{}, {}] leave the file's {} bytes of data",
                                 place->offset, end, data_bytes));
  }
  const auto bytes = CheckedBytes(place->info);
  if (!bytes || *bytes != end - place->offset) {
    return BadTensor(
        file, name,
        fmt::format("{} of shape {} needs {} bytes, data_offsets hold {}", Name(*dtype),
                    FormatShape(place->info.shape),
                    bytes ? std::to_string(*bytes) : "more than 2^63", end - place->offset));
  }
  place->info.bytes = *bytes;
  return OkStatus();
}

Status CheckMetadata(const json::Value& value, const std::string& file) {
  const auto is_string = [](const json::Member& member) { return member.value.is_string(); };
  if (value.is_object() && std::all_of(value.members().begin(), value.members().end(), is_string)) {
    return OkStatus();
  }
  return BadModel(fmt::format("{}: __metadata__: expected an object of strings", file));
}

// The tensors, ordered by their data, cover [0, data_bytes) exactly.
Status CheckCoverage(const std::vector<TensorPlace>& places, int64_t data_bytes,
                     const std::string& file) {
  int64_t covered = 0;
  for (const TensorPlace& place : places) {
    if (place.offset != covered) {
      return BadTensor(
          file, place.info.name,
          fmt::format("its data begin at byte {}, expected {}: tensors {}", place.offset, covered,
                      place.offset < covered ? "overlap" : "leave a gap"));
    }
    covered += place.info.bytes;
  }
  if (covered == data_bytes) return OkStatus();
  return BadModel(fmt::format("{}: the tensors hold {} bytes, the file has {} after its header",
                              file, covered, data_bytes));
}

}  // namespace

Result<int64_t> CheckHeaderLength(uint64_t length, int64_t file_bytes, const std::string& file) {
  if (length < 2 || length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return BadModel(fmt::format("{}: header length is {}, expected 2 to {}", file, length,
                                kMaxSafetensorsHeaderBytes));
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > file_bytes - kSafetensorsLengthBytes) {
    return BadModel(
        fmt::format("{}: header length is {}, but the file has {} bytes: it is truncated", file,
                    length, file_bytes));
  }
  return header_bytes;
}

Result<std::vector<TensorPlace>> ParseSafetensorsHeader(std::string_view json, int64_t data_bytes,
                                                        const std::string& file) {
  if (json.empty() || json.front() != '{') {
    return BadModel(fmt::format("{}: the header is no JSON object", file));
  }
  Result<json::Value> root = json::Parse(json, kHeaderLimits);
  if (!root.ok()) return BadModel(fmt::format("{}: header: {}", file, root.status().message()));
  std::vector<TensorPlace> places;
  places.reserve(root->members().size());
  for (const json::Member& member : root->members()) {
    if (member.key == "__metadata__") {
      RETURN_IF_ERROR(CheckMetadata(member.value, file));
    } else {
      RETURN_IF_ERROR(ParseTensor(member, file, data_bytes, &places.emplace_back()));
    }
  }
  // Empty tensors first among those that begin at the same byte.
  std::sort(places.begin(), places.end(), [](const TensorPlace& a, const TensorPlace& b) {
    return std::pair(a.offset, a.info.bytes) < std::pair(b.offset, b.info.bytes);
  });
  RETURN_IF_ERROR(CheckCoverage(places, data_bytes, file));
  const int64_t data_begin = kSafetensorsLengthBytes + static_cast<int64_t>(json.size());
  for (TensorPlace& place : places) place.offset += data_begin;
  return places;
}

std::string MakeSafetensorsHeader(const std::vector<TensorInfo>& tensors) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  int64_t offset = 0;
  for (const TensorInfo& tensor : tensors) {
    json += fmt::format(R"(,{}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})",
                        json::Quote(tensor.name), Name(tensor.dtype), FormatShape(tensor.shape),
                        offset, offset + tensor.bytes);
    offset += tensor.bytes;
  }
  json += '}';
  json.resize((json.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const uint64_t length = json.size();
  std::string header(kSafetensorsLengthBytes, '\0');
  std::memcpy(header.data(), &length, sizeof(length));
  return header + json;
}

}  // namespace fathom::checkpoint
