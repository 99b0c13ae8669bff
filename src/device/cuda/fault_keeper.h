// Has CUDA say which kernel broke a GPU: in a dump (fault_dump.h), which it makes when a kernel
// faults, in memory of this process. Launches take some 30 ns longer, and the error itself is told
// milliseconds later, after calls that seemed to succeed: so whoever waits asks HasFaultDump.
#pragma once

#include <optional>

#include "device/cuda/fault_dump.h"

namespace fathom::device {

// To be called before anything else of CUDA but behind LoadKernelsEagerly, as it starts the driver,
// while there is one thread. Does nothing where the driver is too old.
void KeepFaultDumps();

// A GPU of this process is broken. The rest: of such a process. Any thread.
bool HasFaultDump() noexcept;
std::optional<BrokenKernel> FindBrokenKernel();

}  // namespace fathom::device
