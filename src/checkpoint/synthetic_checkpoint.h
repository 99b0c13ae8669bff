// Writes a checkpoint in the official layout: config.json, shards, index, tokenizer. The bytes
// depend on the config and the seed only, not on the threads. The folder holds a whole model or,
// after an error, nothing. Errors of the folder (permission, disk full, not empty) are one line
// with the remedy.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/checkpoint.h"

namespace fathom::checkpoint {

// Bytes written so far and in all. Called from any of the writing threads, one at a time.
using WriteProgress = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

struct SynthOptions {
  std::string config_text;  // a config.json: PresetConfigText, or a file's text
  uint64_t seed = 0;
  std::string dir;
  int num_threads = 1;
  int64_t shard_bytes = 5'000'000'000;  // a shard is closed before it would pass this
};

Status WriteSyntheticCheckpoint(const SynthOptions& options, const WriteProgress& progress);

// The config.json that stands behind `flash`, `pro` or `tiny`; kNotFound names the three.
Result<std::string> PresetConfigText(const std::string& name);

// config.json with only the first `num_layers` layers; the draft blocks stay. kInvalidArgument when
// there are fewer.
Result<std::string> CutLayers(const std::string& config_text, int num_layers);

}  // namespace fathom::checkpoint
