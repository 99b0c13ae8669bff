#include "apps/fathom/forced_choices.h"

#include <fmt/format.h>

#include <cstdio>

#include "checkpoint/file.h"

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
                                                           const config::ModelConfig& config) {
  ASSIGN_OR_RETURN(const checkpoint::InputFile file, checkpoint::InputFile::Open(path));
  ASSIGN_OR_RETURN(const auto places, ReadHeader(file));
  std::unique_ptr<ForcedChoices> forced(new ForcedChoices(config));
  for (const checkpoint::TensorPlace& place : places) {
    const std::string& name = place.info.name;
    size_t list = 0;
    int layer = 0;
    if (name.starts_with("streams.")) continue;
    const bool routing = name.starts_with("routing.");
    const char* rest = name.c_str() + name.find('.') + 1;
    const bool named = routing || name.starts_with("index.");
    const int64_t width = routing ? config.num_experts_per_token : config.index_topk;
    if (!named || std::sscanf(rest, "%zu.%d", &list, &layer) != 2 ||
        place.info.dtype != checkpoint::FileDType::kI32 || place.info.shape.size() != 2 ||
        place.info.shape[1] != width) {
      return BadModel(fmt::format(
          "{}: tensor {} is none that --trace writes for this model: expected routing.LIST.LAYER "
          "[tokens, {}] or index.LIST.LAYER [tokens, {}], I32",
          path, name, config.num_experts_per_token, config.index_topk));
    }
    std::vector<int32_t>& choices = forced->choices_[{name[0], list, layer}];
    choices.resize(static_cast<size_t>(place.info.bytes) / sizeof(int32_t));
    RETURN_IF_ERROR(file.ReadAt(place.offset, std::as_writable_bytes(std::span(choices))));
  }
  return forced;
}

std::span<const int32_t> ForcedChoices::ForcedRouting(int layer) {
  return Choices('r', layer, static_cast<size_t>(config_.num_experts_per_token));
}

std::span<const int32_t> ForcedChoices::ForcedIndex(int layer) {
  return Choices('i', layer, static_cast<size_t>(config_.index_topk));
}

// Of the step's tokens; empty where the file has none (hash-routed layers).
std::span<const int32_t> ForcedChoices::Choices(char kind, int layer, size_t width) {
  step_.clear();
  for (const runtime::TokenPlace& row : rows_) {
    const auto found = choices_.find({kind, row.sequence_idx, layer});
    if (found == choices_.end()) return {};
    const size_t first = static_cast<size_t>(row.position) * width;
    if (first + width > found->second.size()) return {};
    const auto begin = found->second.begin() + static_cast<std::ptrdiff_t>(first);
    step_.insert(step_.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
  }
  return step_;
}

}  // namespace fathom::app
