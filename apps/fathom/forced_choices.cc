#include "apps/fathom/forced_choices.h"

#include <fmt/format.h>

#include <cstdio>

#include "base/float_types.h"

namespace fathom::app {
namespace {

Result<std::vector<checkpoint::TensorPlace>> ReadHeader(const checkpoint::InputFile& file) {
  uint64_t length = 0;
  RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(&length, 1))));
  ASSIGN_OR_RETURN(const int64_t header_bytes,
                   checkpoint::CheckHeaderLength(length, file.bytes(), file.path()));
  std::string json(static_cast<size_t>(header_bytes), ' ');
  RETURN_IF_ERROR(
      file.ReadAt(checkpoint::kSafetensorsLengthBytes, std::as_writable_bytes(std::span(json))));
  return checkpoint::ParseSafetensorsHeader(
      json, file.bytes() - header_bytes - checkpoint::kSafetensorsLengthBytes, file.path());
}

}  // namespace

Result<std::unique_ptr<ForcedChoices>> ForcedChoices::Open(const std::string& path,
                                                           const config::ModelConfig& config,
                                                           bool with_streams) {
  ASSIGN_OR_RETURN(const checkpoint::InputFile file, checkpoint::InputFile::Open(path));
  ASSIGN_OR_RETURN(const auto places, ReadHeader(file));
  std::unique_ptr<ForcedChoices> forced(new ForcedChoices(config, with_streams));
  for (const checkpoint::TensorPlace& place : places) {
    RETURN_IF_ERROR(forced->Read(file, place));
  }
  return forced;
}

size_t ForcedChoices::RowBytes(char kind) const {
  const auto bytes = [](int64_t count, size_t size) { return static_cast<size_t>(count) * size; };
  switch (kind) {
    case 'r':
      return bytes(config_.num_experts_per_token, sizeof(int32_t));
    case 'i':
      return bytes(config_.index_topk, sizeof(int32_t));
    case 's':
      return bytes(int64_t{config_.hc_mult} * config_.hidden_size, sizeof(BFloat16));
    default:
      return 0;
  }
}

Status ForcedChoices::Read(const checkpoint::InputFile& file,
                           const checkpoint::TensorPlace& place) {
  const std::string& name = place.info.name;
  size_t list = 0;
  int layer = 0;
  const char kind = name[0];
  const bool named =
      name.starts_with("routing.") || name.starts_with("index.") || name.starts_with("streams.");
  const size_t row_bytes = RowBytes(kind);
  const auto bytes = static_cast<size_t>(place.info.bytes);
  if (!named || std::sscanf(name.c_str() + name.find('.'), ".%zu.%d", &list, &layer) != 2 ||
      place.info.shape.empty() || bytes != static_cast<size_t>(place.info.shape[0]) * row_bytes) {
    return BadModel(fmt::format(
        "{}: tensor {} is none that --trace writes for this model: expected routing.LIST.LAYER, "
        "index.LIST.LAYER or streams.LIST.LAYER with {}, {} or {} bytes a token",
        file.path(), name, RowBytes('r'), RowBytes('i'), RowBytes('s')));
  }
  if (kind == 's' && !with_streams_) return OkStatus();
  std::vector<std::byte>& rows = rows_of_[{kind, list, layer}];
  rows.resize(bytes);
  return file.ReadAt(place.offset, rows);
}

std::span<const int32_t> ForcedChoices::ForcedRouting(int layer) { return Choices('r', layer); }
std::span<const int32_t> ForcedChoices::ForcedIndex(int layer) { return Choices('i', layer); }
std::span<const std::byte> ForcedChoices::ForcedStreams(int layer) { return Rows('s', layer); }

std::span<const int32_t> ForcedChoices::Choices(char kind, int layer) {
  const std::span<const std::byte> rows = Rows(kind, layer);
  return {reinterpret_cast<const int32_t*>(rows.data()), rows.size() / sizeof(int32_t)};
}

// Of the step's tokens; empty where the file has none (hash-routed layers).
std::span<const std::byte> ForcedChoices::Rows(char kind, int layer) {
  const size_t row_bytes = RowBytes(kind);
  step_.clear();
  for (const runtime::TokenPlace& row : rows_) {
    const auto found = rows_of_.find({kind, row.sequence_idx, layer});
    if (found == rows_of_.end()) return {};
    const size_t first = static_cast<size_t>(row.position) * row_bytes;
    if (first + row_bytes > found->second.size()) return {};
    const auto begin = found->second.begin() + static_cast<std::ptrdiff_t>(first);
    step_.insert(step_.end(), begin, begin + static_cast<std::ptrdiff_t>(row_bytes));
  }
  return step_;
}

}  // namespace fathom::app
