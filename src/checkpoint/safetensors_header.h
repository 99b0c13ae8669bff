// The header of a safetensors file: 8 bytes of little-endian length, a JSON object
// {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__":
// {...}}, then the data, which the tensors cover exactly, without gap or overlap. Pure functions;
// any thread. kBadModel names the file, the tensor, what was expected and what was found. Source:
// the format's own specification (huggingface/safetensors).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace fathom::checkpoint {

inline constexpr int64_t kSafetensorsLengthBytes = 8;
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct TensorPlace {
  TensorInfo info;
  int64_t offset = 0;  // of its first byte in the file
};

// Checks the length field of a file of `file_bytes`; the length of the JSON text.
Result<int64_t> CheckHeaderLength(uint64_t length, int64_t file_bytes, const std::string& file);

// The tensors of the header's JSON text, in the order of their data. `data_bytes` is what follows
// the header.
Result<std::vector<TensorPlace>> ParseSafetensorsHeader(std::string_view json, int64_t data_bytes,
                                                        const std::string& file);

// The header bytes for tensors that lie one after another: length field and JSON text, padded to 8
// bytes.
std::string MakeSafetensorsHeader(const std::vector<TensorInfo>& tensors);

}  // namespace fathom::checkpoint
