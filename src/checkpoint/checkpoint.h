// Checkpoint: an official-format model folder, opened and checked, tensors not yet read. Every
// shape, dtype and byte range is validated before a weight byte is touched; kBadModel names file,
// tensor, expected, found. Immutable after Open; reads may run on many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "config/model_config.h"

namespace fathom::checkpoint {

enum class FileDType { kF32, kBF16, kF8E4M3, kF8E8M0, kI8, kI32, kI64, kU8, kF16 };
int64_t BytesPerElement(FileDType dtype);
const char* Name(FileDType dtype);

struct TensorInfo {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// Where tensor bytes come from: files, or values made in memory (--load-format dummy).
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  // All tensors, ordered by name. Complete and shape-checked for the config.
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  virtual const TensorInfo* Find(std::string_view name) const = 0;
  // Copies the bytes [offset, offset + out.size()) of the tensor, one of tensors(), into `out`.
  virtual Status Read(const TensorInfo& tensor, int64_t offset, std::span<std::byte> out) const = 0;
};

// A model name on the command line to its folder: a path, or a Hugging Face repository name found
// in the local cache (hf_home: HF_HOME or ~/.cache/huggingface, given by apps/). kBadModel prints
// the download command.
Result<std::string> ResolveModelFolder(const std::string& model, const std::string& hf_home);

// <dir>/config.json, checked.
Result<config::ModelConfig> LoadModelConfig(const std::string& dir);
// The config from a file or from text of config.json.
Result<config::ModelConfig> ParseModelConfig(std::string_view text, const std::string& name);

// Opens the folder's safetensors (model.safetensors.index.json and shards, or model.safetensors).
Result<std::unique_ptr<TensorSource>> OpenCheckpoint(const std::string& dir,
                                                     const config::ModelConfig& config);

// The tensors that a checkpoint of this config has: official names, dtypes, shapes (drafts
// included).
std::vector<TensorInfo> ExpectedTensors(const config::ModelConfig& config);

// The same weights that `fathom synth --seed` would write, made on demand.
std::unique_ptr<TensorSource> MakeSyntheticSource(const config::ModelConfig& config, uint64_t seed);

}  // namespace fathom::checkpoint
