// The dtype names of safetensors. Any thread.
#pragma once

#include <optional>
#include <string_view>

#include "checkpoint/checkpoint.h"

namespace fathom::checkpoint {

// "BF16", "F8_E4M3", ...; null for a dtype that no checkpoint of this family has.
std::optional<FileDType> FindFileDType(std::string_view name);

}  // namespace fathom::checkpoint
