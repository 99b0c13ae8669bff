// NCCL, found when it is needed: libnccl.so.2 is opened with dlopen and its functions are declared
// here, so that nothing is linked and no header of it is built with. The one adapter of that
// library. Values; any thread.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "base/status.h"

namespace fathom::comm {

using NcclCommunicator = void*;
inline constexpr int kNcclBytes = 1;  // a type: unsigned, of 8 bits
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;

// The functions of NCCL 2 by their names without "nccl"; results are its error codes.
struct NcclLibrary {
  int (*GetVersion)(int* version) = nullptr;
  const char* (*GetErrorString)(int result) = nullptr;
  int (*CommInitAll)(NcclCommunicator* communicators, int count, const int* gpus) = nullptr;
  int (*CommAbort)(NcclCommunicator communicator) = nullptr;
  int (*CommGetAsyncError)(NcclCommunicator communicator, int* result) = nullptr;
  int (*GroupStart)() = nullptr;
  int (*GroupEnd)() = nullptr;
  int (*Broadcast)(const void* send, void* receive, size_t count, int type, int root,
                   NcclCommunicator communicator, cudaStream_t stream) = nullptr;
};

// kNotFound: there is no such library, or it lacks a function; the message has the loader's words.
// The library stays open.
Result<NcclLibrary> LoadNccl(const std::string& file = "libnccl.so.2");

}  // namespace fathom::comm
