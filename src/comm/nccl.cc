#include "comm/nccl.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace fathom::comm {

Result<NcclLibrary> LoadNccl(const std::string& file) {
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return NotFound(
        fmt::format("NCCL cannot be used: {}; install it, or add its folder to "
                    "LD_LIBRARY_PATH",
                    dlerror()));
  }
  NcclLibrary nccl;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find(nccl.GetVersion, "ncclGetVersion");
  find(nccl.GetErrorString, "ncclGetErrorString");
  find(nccl.CommInitAll, "ncclCommInitAll");
  find(nccl.CommAbort, "ncclCommAbort");
  find(nccl.CommGetAsyncError, "ncclCommGetAsyncError");
  find(nccl.GroupStart, "ncclGroupStart");
  find(nccl.GroupEnd, "ncclGroupEnd");
  find(nccl.Broadcast, "ncclBroadcast");
  if (missing.empty()) return nccl;
  dlclose(library);
  return NotFound(fmt::format(
      "NCCL cannot be used: {} has no function {}; needed is NCCL 2.10 or newer", file, missing));
}

}  // namespace fathom::comm
