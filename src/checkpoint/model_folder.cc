// ResolveModelFolder and LoadModelConfig: from the model's name on the command line to its checked
// config.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/file.h"
#include "checkpoint/weight_map.h"

namespace fathom::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr int64_t kMaxRefBytes = 256;

bool IsNamePart(std::string_view part) {
  constexpr std::string_view kSigns = "-_.";
  const auto allowed = [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           kSigns.find(c) != std::string_view::npos;
  };
  return !part.empty() && part.size() <= 96 && part.front() != '.' && part.front() != '-' &&
         part.find("..") == std::string_view::npos &&
         std::all_of(part.begin(), part.end(), allowed);
}

// "org/name", as the Hugging Face hub spells repositories.
bool IsRepositoryName(std::string_view name) {
  const size_t slash = name.find('/');
  return slash != std::string_view::npos && IsNamePart(name.substr(0, slash)) &&
         IsNamePart(name.substr(slash + 1));
}

Status NotDownloaded(const std::string& model, const fs::path& repository) {
  return BadModel(
      fmt::format("{} is no folder, and {} holds no snapshot of it; download it: hf download {}",
                  model, repository.string(), model));
}

// The snapshot that refs/main names.
Result<std::string> FindSnapshot(const std::string& model, const std::string& hf_home) {
  std::string folder = "models--" + model;
  folder.replace(folder.find('/'), 1, "--");
  const fs::path repository = fs::path(hf_home) / "hub" / folder;
  std::error_code error;
  const fs::path ref = repository / "refs" / "main";
  if (!fs::exists(ref, error)) return NotDownloaded(model, repository);
  ASSIGN_OR_RETURN(std::string revision, ReadSmallFile(ref.string(), kMaxRefBytes));
  revision.erase(
      std::find_if(revision.begin(), revision.end(), [](char c) { return c == '\n' || c == '\r'; }),
      revision.end());
  if (!IsNamePart(revision)) {
    return BadModel(
        fmt::format("{} holds no revision; download again: hf download {}", ref.string(), model));
  }
  const fs::path snapshot = repository / "snapshots" / revision;
  if (!fs::is_directory(snapshot, error)) return NotDownloaded(model, repository);
  return snapshot.string();
}

bool HasDraftTensors(const WeightMap& map) {
  return std::any_of(map.entries.begin(), map.entries.end(), [](const WeightMap::Entry& entry) {
    return entry.tensor.starts_with("mtp.");
  });
}

}  // namespace

Result<std::string> ResolveModelFolder(const std::string& model, const std::string& hf_home) {
  std::error_code error;
  if (fs::is_directory(model, error)) return model;
  if (fs::exists(model, error)) {
    return BadModel(fmt::format("{} is a file, expected a model folder", model));
  }
  if (IsRepositoryName(model)) return FindSnapshot(model, hf_home);
  return BadModel(
      fmt::format("{} does not exist; expected a model folder or a Hugging Face repository name "
                  "such as deepseek-ai/DeepSeek-V4-Flash",
                  model));
}

Result<config::ModelConfig> LoadModelConfig(const std::string& dir) {
  const std::string path = (fs::path(dir) / "config.json").string();
  ASSIGN_OR_RETURN(const std::string real_path, ConfinedPath(dir, "config.json"));
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(real_path, kMaxConfigBytes));
  ASSIGN_OR_RETURN(config::ModelConfig config, ParseModelConfig(text, path));
  if (config.draft == config::DraftKind::kNone) return config;
  // Checkpoints that were cut keep the field of their origin; without draft tensors there is no
  // draft.
  Result<WeightMap> map = LoadWeightMap(dir);
  if (!map.ok() || map->entries.empty() || HasDraftTensors(*map)) return config;
  LogInfo("{}: no mtp.* tensors; drafts are off", dir);
  config.draft = config::DraftKind::kNone;
  config.num_draft_blocks = 0;
  config.compress_ratios.resize(static_cast<size_t>(config.num_layers));
  return config;
}

}  // namespace fathom::checkpoint
