// OpenCheckpoint: reads and checks the headers of all files of a model folder, then the list of
// tensors against the config's; weight bytes are read later, on demand.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/file.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/tensor_list.h"
#include "checkpoint/weight_map.h"
#include "json/json.h"

namespace fathom::checkpoint {
namespace {

// A tensor and where it lies.
struct Placed {
  TensorPlace place;
  size_t file = 0;
};

class SafetensorsSource final : public TensorSource {
 public:
  // `placed` is ordered by name.
  SafetensorsSource(std::vector<InputFile> files, std::vector<Placed> placed)
      : files_(std::move(files)) {
    tensors_.reserve(placed.size());
    locations_.reserve(placed.size());
    for (Placed& p : placed) {
      tensors_.push_back(std::move(p.place.info));
      locations_.push_back({p.file, p.place.offset});
    }
  }

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }

  const TensorInfo* Find(std::string_view name) const override {
    return FindTensor(tensors_, name);
  }

  Status Read(const TensorInfo& tensor, int64_t offset, std::span<std::byte> out) const override {
    CheckRange(tensor, offset, out.size());
    const auto i = static_cast<size_t>(&tensor - tensors_.data());
    CHECK_LT(i, tensors_.size());
    const Location& at = locations_[i];
    return files_[at.file].ReadAt(at.offset + offset, out);
  }

 private:
  struct Location {
    size_t file;
    int64_t offset;
  };
  std::vector<InputFile> files_;
  std::vector<TensorInfo> tensors_;  // ordered by name
  std::vector<Location> locations_;  // of each tensor
};

Result<std::vector<TensorPlace>> ReadHeader(const InputFile& file, const std::string& name) {
  if (file.bytes() < kSafetensorsLengthBytes) {
    return BadModel(fmt::format("{}: {} bytes, expected a safetensors file", name, file.bytes()));
  }
  uint64_t length = 0;
  RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(&length, 1))));
  ASSIGN_OR_RETURN(const int64_t header_bytes, CheckHeaderLength(length, file.bytes(), name));
  std::string text(static_cast<size_t>(header_bytes), '\0');
  RETURN_IF_ERROR(file.ReadAt(kSafetensorsLengthBytes, std::as_writable_bytes(std::span(text))));
  return ParseSafetensorsHeader(text, file.bytes() - kSafetensorsLengthBytes - header_bytes, name);
}

// The tensors of all files, ordered by name; a name stands in one file only.
Result<std::vector<Placed>> ReadHeaders(const std::string& dir, const WeightMap& map,
                                        std::vector<InputFile>* files) {
  std::vector<Placed> placed;
  for (size_t i = 0; i < map.files.size(); ++i) {
    ASSIGN_OR_RETURN(const std::string path, ConfinedPath(dir, map.files[i]));
    ASSIGN_OR_RETURN(InputFile file, InputFile::Open(path));
    ASSIGN_OR_RETURN(std::vector<TensorPlace> places, ReadHeader(file, map.files[i]));
    for (TensorPlace& place : places) placed.push_back({std::move(place), i});
    files->push_back(std::move(file));
  }
  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.place.info.name < b.place.info.name; });
  const auto twice = std::adjacent_find(
      placed.begin(), placed.end(),
      [](const Placed& a, const Placed& b) { return a.place.info.name == b.place.info.name; });
  if (twice != placed.end()) {
    return BadModel(fmt::format("tensor {} stands in both {} and {}",
                                json::Quote(twice->place.info.name), map.files[twice->file],
                                map.files[(twice + 1)->file]));
  }
  return placed;
}

const Placed* FindPlaced(const std::vector<Placed>& placed, std::string_view name) {
  const auto at =
      std::lower_bound(placed.begin(), placed.end(), name,
                       [](const Placed& p, std::string_view n) { return p.place.info.name < n; });
  return at != placed.end() && at->place.info.name == name ? &*at : nullptr;
}

// Every tensor that the index places lies in the file that it names.
Status CheckIndex(const WeightMap& map, const std::vector<Placed>& placed) {
  for (const WeightMap::Entry& entry : map.entries) {
    const Placed* found = FindPlaced(placed, entry.tensor);
    if (found != nullptr && found->file == entry.file) continue;
    return BadModel(
        fmt::format("tensor {}: the index places it in {}, where it is not{}",
                    json::Quote(entry.tensor), map.files[entry.file],
                    found == nullptr ? "" : fmt::format("; it is in {}", map.files[found->file])));
  }
  return OkStatus();
}

// NUMERICS leaves the confidence head's type open; published copies differ.
bool DTypeFits(const TensorInfo& expected, FileDType found) {
  return found == expected.dtype ||
         (found == FileDType::kBF16 && expected.name.ends_with("confidence_head.proj.weight"));
}

Status CheckTensor(const TensorInfo& expected, const Placed* found, const WeightMap& map) {
  const std::string want = fmt::format("{} {}", Name(expected.dtype), FormatShape(expected.shape));
  if (found == nullptr) {
    const std::string where =
        map.files.size() == 1 ? map.files[0] : fmt::format("{} files", map.files.size());
    return BadModel(fmt::format("tensor {} is missing in {}, expected {} by config.json",
                                expected.name, where, want));
  }
  const TensorInfo& info = found->place.info;
  if (DTypeFits(expected, info.dtype) && info.shape == expected.shape) return OkStatus();
  return BadModel(fmt::format("{}: tensor {} is {} {}, expected {} by config.json",
                              map.files[found->file], expected.name, Name(info.dtype),
                              FormatShape(info.shape), want));
}

// The draft block that a name belongs to, or -1.
int64_t DraftBlockOf(std::string_view name) {
  constexpr std::string_view kPrefix = "mtp.";
  if (!name.starts_with(kPrefix)) return -1;
  name.remove_prefix(kPrefix.size());
  int64_t block = 0;
  size_t digits = 0;
  for (; digits < name.size() && digits < 6 && name[digits] >= '0' && name[digits] <= '9';
       ++digits) {
    block = 10 * block + (name[digits] - '0');
  }
  return digits > 0 && digits < name.size() && name[digits] == '.' ? block : -1;
}

// Splits off the tensors that the model does not use: told in one line, never loaded.
Status DropUnknown(const config::ModelConfig& config, const std::vector<TensorInfo>& expected,
                   std::vector<Placed>* placed) {
  std::unordered_map<std::string_view, bool> known;
  known.reserve(expected.size());
  for (const TensorInfo& tensor : expected) known.emplace(tensor.name, true);
  const auto unknown = std::stable_partition(placed->begin(), placed->end(), [&](const Placed& p) {
    return known.contains(p.place.info.name);
  });
  for (auto it = unknown; it != placed->end(); ++it) {
    const std::string& name = it->place.info.name;
    if (config.draft != config::DraftKind::kNone && DraftBlockOf(name) >= config.num_draft_blocks) {
      return BadModel(fmt::format("tensor {}: config.json has {} draft blocks", json::Quote(name),
                                  config.num_draft_blocks));
    }
  }
  if (unknown != placed->end()) {
    LogInfo("checkpoint: {} tensors that this model does not use are left unread, the first is {}",
            placed->end() - unknown, json::Quote(unknown->place.info.name));
  }
  placed->erase(unknown, placed->end());
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<TensorSource>> OpenCheckpoint(const std::string& dir,
                                                     const config::ModelConfig& config) {
  Result<WeightMap> map = LoadWeightMap(dir);
  if (!map.ok()) return BadModel(map.status().message());
  const auto in_folder = [&](const Status& status) {
    return BadModel(fmt::format("{}: {}", dir, status.message()));
  };
  std::vector<InputFile> files;
  Result<std::vector<Placed>> placed = ReadHeaders(dir, *map, &files);
  if (!placed.ok()) return in_folder(placed.status());
  if (Status status = CheckIndex(*map, *placed); !status.ok()) return in_folder(status);
  const std::vector<TensorInfo> expected = ExpectedTensors(config);
  for (const TensorInfo& tensor : expected) {
    const Status status = CheckTensor(tensor, FindPlaced(*placed, tensor.name), *map);
    if (!status.ok()) return in_folder(status);
  }
  if (Status status = DropUnknown(config, expected, &*placed); !status.ok())
    return in_folder(status);
  return std::unique_ptr<TensorSource>(
      std::make_unique<SafetensorsSource>(std::move(files), *std::move(placed)));
}

}  // namespace fathom::checkpoint
