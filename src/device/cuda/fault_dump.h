// Reads the dump that CUDA makes of a GPU which a kernel broke: an ELF file, whose sections
// NVIDIA's cudacoredump.h (part of cuda-gdb) describes. Pure; a damaged dump is read as far as it
// goes.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace fathom::device {

struct BrokenKernel {
  std::string name;             // as in the source, without namespaces
  int blocks = 0, threads = 0;  // of a block
};

// Null: no kernel did it, or its code is not in the dump.
std::optional<BrokenKernel> FindBrokenKernel(std::span<const std::byte> dump);

}  // namespace fathom::device
