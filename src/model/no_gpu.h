// What a program launches where there is no GPU: no_gpu.cc stands in for the CUDA runtime of eight
// H200, whose memory is addresses and whose launches are told and not run. Tests only, linked with
// the options in CMakeLists.txt.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>

namespace fathom::model {

struct Launched {
  const char* kernel;
  dim3 grid, block;
  unsigned cluster;
  size_t shared_bytes;  // dynamic
};

// From now on. One thread at a time.
void OnLaunch(std::function<void(const Launched&)> told);

// What the GPUs are; 9.0 at first.
void SetComputeCapability(int major, int minor);

}  // namespace fathom::model
