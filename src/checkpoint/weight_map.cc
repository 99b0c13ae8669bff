#include "checkpoint/weight_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>

#include "checkpoint/file.h"
#include "json/json.h"

namespace fathom::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr int64_t kMaxIndexBytes = 256 << 20;
constexpr size_t kMaxFiles = 10'000;

// A plain name: no folder, no step upwards, nothing hidden.
bool IsPlainName(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name.front() != '.' &&
         name.find('/') == std::string::npos && name.find('\\') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

// Where files of the folder may lie: the repository's cache for a Hugging Face snapshot
// (models--ORG--NAME/snapshots/REVISION, whose links lead to models--ORG--NAME/blobs), else the
// folder.
fs::path ConfiningRoot(const fs::path& real_dir) {
  const fs::path snapshots = real_dir.parent_path();
  const fs::path repository = snapshots.parent_path();
  const bool in_cache =
      snapshots.filename() == "snapshots" && repository.filename().string().starts_with("models--");
  return in_cache ? repository : real_dir;
}

bool IsInside(const fs::path& path, const fs::path& root) {
  return std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
}

Result<WeightMap> ParseIndex(const std::string& path, const std::string& text) {
  Result<json::Value> root = json::Parse(text, {.max_depth = 16, .max_nodes = 4'000'000});
  if (!root.ok()) return BadModel(fmt::format("{}: {}", path, root.status().message()));
  const json::Value* map = root->Find("weight_map");
  if (map == nullptr || !map->is_object() || map->members().empty()) {
    return BadModel(
        fmt::format("{}: weight_map is missing, expected an object of tensor: file", path));
  }
  std::map<std::string, size_t> files;
  for (const json::Member& member : map->members()) {
    if (!member.value.is_string() || !IsPlainName(member.value.AsString())) {
      return BadModel(
          fmt::format("{}: tensor {} lies in {}, expected a file name inside the folder", path,
                      json::Quote(member.key), json::Dump(member.value)));
    }
    files.emplace(member.value.AsString(), 0);
    if (files.size() > kMaxFiles) {
      return BadModel(fmt::format("{}: names more than {} files", path, kMaxFiles));
    }
  }
  WeightMap result;
  for (auto& [name, index] : files) {
    index = result.files.size();
    result.files.push_back(name);
  }
  for (const json::Member& member : map->members()) {
    result.entries.push_back({member.key, files.at(member.value.AsString())});
  }
  return result;
}

}  // namespace

Result<WeightMap> LoadWeightMap(const std::string& dir) {
  const fs::path folder(dir);
  std::error_code error;
  if (fs::exists(folder / kIndexName, error)) {
    ASSIGN_OR_RETURN(const std::string path, ConfinedPath(dir, kIndexName));
    ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, kMaxIndexBytes));
    return ParseIndex((folder / kIndexName).string(), text);
  }
  if (fs::exists(folder / kSingleName, error)) return WeightMap{{kSingleName}, {}};
  return NotFound(
      fmt::format("{}: no weights here, expected {} or {}", dir, kIndexName, kSingleName));
}

Result<std::string> ConfinedPath(const std::string& dir, const std::string& name) {
  std::error_code error;
  const fs::path path = fs::path(dir) / name;
  const fs::path real_dir = fs::canonical(dir, error);
  if (error) return BadModel(fmt::format("{}: {}", dir, error.message()));
  const fs::path real_path = fs::canonical(path, error);
  if (error) {
    return BadModel(fmt::format("cannot open {}: {}; is the download complete?", path.string(),
                                error.message()));
  }
  if (!IsInside(real_path, ConfiningRoot(real_dir))) {
    return BadModel(
        fmt::format("{} is a link to {}, outside of the model's folder; copy or move the file",
                    path.string(), real_path.string()));
  }
  return real_path.string();
}

}  // namespace fathom::checkpoint
