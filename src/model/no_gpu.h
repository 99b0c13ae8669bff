// What a program launches, and asks its GPUs for, where there is none: no_gpu.cc stands in for the
// CUDA runtime of eight H200, whose memory is addresses and whose launches are told and not run.
// Tests only, which link fathom_no_gpu.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace fathom::model {

struct Launched {
  struct Size {
    unsigned x, y, z;
  };
  const char* kernel;
  Size grid, block;
  unsigned cluster;
  size_t shared_bytes;  // dynamic
};

// From now on. One thread at a time.
void OnLaunch(std::function<void(const Launched&)> told);

// The calls since the last time that get or give back what outlives a step: memory, the GPUs' or
// pinned, streams, events and graphs; and copies that reach beyond an allocation. Any thread.
std::vector<std::string> TakeResourceCalls();

// What the GPUs are; 9.0 at first.
void SetComputeCapability(int major, int minor);

}  // namespace fathom::model
