#include "apps/fathom/model_fingerprint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "kv_cache/chain_hash.h"

namespace fathom::app {

std::string ModelFingerprint(const ModelOptions& options, const ModelSession& session) {
  std::vector<std::string> parts = {
      fmt::format("{} {} {} {}", static_cast<int>(session.numerics),
                  static_cast<int>(session.index_dtype), static_cast<int>(options.load_format),
                  options.load_format == LoadFormat::kDummy ? options.seed : 0),
      options.model, session.on_gpu() ? "gpu" : "cpu"};
  std::vector<std::string> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(session.folder, error)) {
    const std::string name = entry.path().filename();
    if (!name.ends_with(".safetensors") && name != "config.json") continue;
    files.push_back(fmt::format("{} {} {}", name, entry.file_size(error),
                                entry.last_write_time(error).time_since_epoch().count()));
  }
  std::sort(files.begin(), files.end());
  parts.insert(parts.end(), files.begin(), files.end());
  const std::vector<std::string_view> views(parts.begin(), parts.end());
  const kv_cache::HashKey key = kv_cache::DeriveKey(views);
  std::string name;
  for (size_t i = 0; i < 16; ++i) name += fmt::format("{:02x}", key[i]);
  return name;
}

}  // namespace fathom::app
