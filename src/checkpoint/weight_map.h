// WeightMap: which files of a model folder hold its tensors, by model.safetensors.index.json, or by
// model.safetensors alone. File names are confined to the folder. Any thread.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace fathom::checkpoint {

struct WeightMap {
  struct Entry {
    std::string tensor;
    size_t file = 0;  // index into `files`
  };
  std::vector<std::string> files;  // names inside the folder, ordered
  std::vector<Entry> entries;      // what the index says; empty for a single file
};

// kNotFound when the folder has neither an index nor a single file.
Result<WeightMap> LoadWeightMap(const std::string& dir);

// The path of a file of the folder, its links followed. They may lead to another place in the
// folder or, for a snapshot in the Hugging Face cache, in that repository's cache; kBadModel
// otherwise.
Result<std::string> ConfinedPath(const std::string& dir, const std::string& name);

}  // namespace fathom::checkpoint
